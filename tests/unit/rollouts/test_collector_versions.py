"""Every turn carries the version of the weights that sampled it, whoever updates them and when."""

from __future__ import annotations

import queue as queues
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from skyrl_train.tensordict.buffer import ReplayBuffer
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.collectors.weight_updaters import WeightUpdaterBase
from skyrl_train.tensordict.envs.base import StepCounter, Transform
from skyrl_train.tensordict.envs.chat import DatasetChatEnv
from skyrl_train.tensordict.envs.versions import PolicyVersion

DEADLINE_S = 60.0


class Numbered:
    """A policy that says which weights it has: a number, which is its version too."""

    def __init__(self) -> None:
        self.weights = 0

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict["text_response"] = [str(self.weights)] * len(tensordict)
        return tensordict


class VersionUpdater(WeightUpdaterBase):
    def __init__(self, policy: Numbered):
        super().__init__()
        self.policy = policy

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: int) -> None:
        self.policy.weights = server_weights


class CallbackTransform(Transform):
    """Does something in the step that follows so many others of an episode."""

    def __init__(self, steps: int, what: Callable[[], None]):
        self.steps, self.what = steps, what

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        if int(root["step_count"].max()) == self.steps:
            self.what()
        return following


def conversations(turns: int) -> DatasetChatEnv:
    return DatasetChatEnv(dataset=[{"query": "q"}], num_envs=1).append_transform(StepCounter(turns))


def collector(env: DatasetChatEnv, policy: Any = None, **settings: Any) -> LLMCollector:
    settings = {"weight_updater": VersionUpdater, "track_policy_version": True, "flatten_data": True, **settings}
    return LLMCollector(env, policy=policy or Numbered(), **settings)


def push(collects: LLMCollector) -> None:
    """The next weights; their number is the version that they become."""
    assert isinstance(collects.policy_version, int)
    collects.update_policy_weights_(collects.policy_version + 1)  # type: ignore[arg-type]


def said_and_version(batch: TensorDictBase | None) -> list[tuple[int, int]]:
    assert batch is not None
    return [(int(row["text_response"]), int(row["policy_version"])) for row in batch.unbind(0)]


def test_an_update_in_the_middle_of_a_collection_shows():
    env = conversations(4)
    collects = collector(env, dialog_turns_per_batch=4)
    env.append_transform(CallbackTransform(1, lambda: push(collects)))
    batch = next(iter(collects))
    assert said_and_version(batch) == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert batch is not None
    assert [int(row["next", "policy_version"]) for row in batch.unbind(0)] == [0, 0, 1, 1]
    assert collects.get_policy_version() == 1


class BlockingPolicy(Numbered):
    """Its first answer takes until it is allowed, and says the weights from before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.allowed = threading.Event(), threading.Event()

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        before = self.weights
        self.entered.set()
        assert self.allowed.wait(DEADLINE_S)
        tensordict["text_response"] = [f"{before}{self.weights}"] * len(tensordict)
        return tensordict


def test_weights_do_not_change_during_a_turn():
    policy, queue = BlockingPolicy(), queues.Queue()  # type: ignore[var-annotated]
    with collector(conversations(1), policy, dialog_turns_per_batch=1, total_dialog_turns=1, queue=queue) as collects:
        collects.start()
        assert policy.entered.wait(DEADLINE_S)
        pushing = threading.Thread(target=push, args=[collects])
        pushing.start()
        pushing.join(0.2)
        policy.allowed.set()
        pushing.join(DEADLINE_S)
        assert said_and_version(queue.get(timeout=DEADLINE_S)) == [(0, 0)]
        assert policy.weights == collects.policy_version == 1


def test_update_waiting_too_long_raises():
    policy = BlockingPolicy()
    collects = collector(conversations(1), policy, dialog_turns_per_batch=1, queue=queues.Queue(), timeout=0.05)
    collects.start()
    assert policy.entered.wait(DEADLINE_S)
    with pytest.raises(TimeoutError, match=r"or the push of weights, under way did not finish within 0\.05 s"):
        push(collects)
    policy.allowed.set()
    collects.shutdown(DEADLINE_S)
    assert policy.weights == collects.policy_version == 0


def test_versions_may_be_names():
    names = PolicyVersion("uuid")
    collects = collector(conversations(1), dialog_turns_per_batch=1, track_policy_version=names, weight_updater=None)
    first = next(iter(collects))
    collects.increment_version()
    second = next(iter(collects))
    assert first is not None and second is not None
    assert [first[0]["policy_version"], second[0]["policy_version"]] == [
        change.new_version for change in names.version_history
    ]


def test_without_an_updater_there_is_nothing_to_push_to():
    collects = collector(conversations(1), dialog_turns_per_batch=1, weight_updater=None)
    with pytest.raises(ValueError, match="no updater fits Numbered: give the collector a weight_updater"):
        push(collects)


@pytest.mark.parametrize(
    "given", [{"weights": 1}, {"policy": 1}, {"weights_dict": {"policy": 1}}, {"weights": 1, "model_id": "policy"}]
)
def test_weights_may_be_named_in_several_ways(given: dict[str, Any]):
    collects = collector(conversations(1), dialog_turns_per_batch=1)
    collects.update_policy_weights_(**given)
    assert collects.get_policy_model().weights == collects.policy_version == 1


@pytest.mark.parametrize(
    "given", [{"weights": 1, "policy": 1}, {"weights_dict": {"critic": 1}}, {"model_id": "critic"}]
)
def test_weights_of_another_model_are_refused(given: dict[str, Any]):
    with pytest.raises(ValueError, match=r"one model|give weights once"):
        collector(conversations(1), dialog_turns_per_batch=1).update_policy_weights_(**given)


def test_the_thread_is_never_more_than_the_bound_ahead():
    queue: queues.Queue[TensorDictBase] = queues.Queue()
    with collector(conversations(1), dialog_turns_per_batch=1, queue=queue, max_staleness=1) as collects:
        collects.start()
        ages = []
        for trained in range(4):
            (version,) = [version for _, version in said_and_version(queue.get(timeout=DEADLINE_S))]
            ages.append(trained - version)
            if trained == 1:  # batches 0 and 1 began with version 0; the third waits for an update
                time.sleep(0.2)
                assert queue.empty()
                assert collects.turns == 2
                push(collects)
            if trained:
                push(collects)
        assert 0 <= max(ages) <= 1


@pytest.mark.parametrize(("max_staleness", "dropped"), [(0, 3), (1, 0)])
def test_trajectory_with_stale_turns_is_dropped(max_staleness: int, dropped: int):
    env = conversations(3)
    collects = collector(
        env,
        dialog_turns_per_batch=3,
        yield_completed_trajectories=True,
        flatten_data=None,
        max_staleness=max_staleness,
    )
    pushes = iter([True])
    env.append_transform(CallbackTransform(1, lambda: push(collects) if next(pushes, False) else None))
    batch = next(iter(collects))
    assert collects.dropped_turns == dropped
    assert [version for _, version in said_and_version(batch)] == ([1, 1, 1] if dropped else [0, 0, 1])


def test_trajectories_from_before_an_update_are_stale():
    env = conversations(1)
    collects = collector(
        env, dialog_turns_per_batch=2, yield_completed_trajectories=True, flatten_data=None, max_staleness=0
    )
    pushes = iter([False, True])
    env.append_transform(CallbackTransform(0, lambda: push(collects) if next(pushes, False) else None))
    assert [version for _, version in said_and_version(next(iter(collects)))] == [1, 1]
    assert collects.dropped_turns == 2


def test_a_version_that_acted_does_not_outlive_its_step():
    env = conversations(1)
    collects = collector(env, dialog_turns_per_batch=1)
    next(iter(collects))
    push(collects)
    assert said_and_version(env.rollout(1, collects.policy)[:, 0]) == [(1, 1)]


def test_waiting_thread_raises_and_ends_its_queue():
    queue: queues.Queue[TensorDictBase] = queues.Queue()
    collects = collector(conversations(1), dialog_turns_per_batch=1, queue=queue, max_staleness=0, timeout=0.2)
    collects.start()
    assert said_and_version(queue.get(timeout=DEADLINE_S)) == [(0, 0)]
    assert queue.get(timeout=DEADLINE_S) is None
    with pytest.raises(TimeoutError, match=r"the update before the next batch \(max_staleness=0"):
        collects.shutdown(DEADLINE_S)


def test_full_queue_receives_its_end_later():
    queue: queues.Queue[TensorDictBase] = queues.Queue(1)
    with collector(conversations(1), dialog_turns_per_batch=1, total_dialog_turns=2, queue=queue) as collects:
        collects.start()
        found = [queue.get(timeout=DEADLINE_S) for _ in range(3)]
        assert found[0] is not None and found[1] is not None
        assert found[2] is None


class _PairBuffer:
    """A buffer that stores rows in pairs, when the second one has come."""

    def __init__(self) -> None:
        self.came = 0

    def extend(self, tensordict: TensorDictBase) -> torch.Tensor:
        self.came += 1
        return torch.arange(2 * (1 - self.came % 2))


def test_unstored_batch_waits_for_no_update():
    buffer = _PairBuffer()
    with collector(conversations(1), dialog_turns_per_batch=1, replay_buffer=buffer, max_staleness=0) as collects:
        collects.start()
        deadline = time.monotonic() + DEADLINE_S
        while buffer.came < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert buffer.came == 2


def test_the_thread_ends_with_its_turns():
    buffer = ReplayBuffer(8)
    collects = collector(conversations(1), dialog_turns_per_batch=2, total_dialog_turns=4, replay_buffer=buffer)
    collects.start()
    deadline = time.monotonic() + DEADLINE_S
    while collects.is_running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (len(buffer), collects.is_running()) == (4, False)
    collects.async_shutdown()


def test_the_thread_ends_when_it_waits_for_room():
    queue: queues.Queue[TensorDictBase] = queues.Queue(1)
    collects = collector(conversations(1), dialog_turns_per_batch=1, queue=queue)
    collects.start()
    with pytest.raises(RuntimeError, match="the collector's thread collects"):
        next(iter(collects))
    queue.get(timeout=DEADLINE_S)
    collects.shutdown(DEADLINE_S)
    assert not collects.is_running()


def test_what_ends_the_thread_is_raised():
    def fails(tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError("no answer")

    collects = collector(conversations(1), fails, dialog_turns_per_batch=1, queue=queues.Queue(), weight_updater=None)
    collects.start()
    with pytest.raises(RuntimeError, match="no answer"):
        collects.shutdown(DEADLINE_S)


def test_a_thread_needs_somewhere_to_write():
    with pytest.raises(RuntimeError, match="needs a replay_buffer or a queue"):
        collector(conversations(1), dialog_turns_per_batch=1).start()


def test_two_that_write_versions_are_refused():
    env = conversations(1).append_transform(PolicyVersion())
    assert collector(env, dialog_turns_per_batch=1).policy_version == 0
    with pytest.raises(ValueError, match="has another PolicyVersion"):
        collector(env, dialog_turns_per_batch=1, track_policy_version=PolicyVersion())
    assert torch.equal(env.reset()["policy_version"], torch.zeros(1, dtype=torch.int64))
