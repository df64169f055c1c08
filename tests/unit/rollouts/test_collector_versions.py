"""Versions of weights in collected turns: each turn has the version that sampled it, at any time of updates."""

from __future__ import annotations

import queue as queues
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import EnvBase, Transform

import tests.support.torchrl  # noqa: F401 - before the imports below, with their warnings
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.collectors.weight_updaters import WeightUpdaterBase
from skyrl_train.tensordict.envs.versions import PolicyVersion
from tests.support.conversations import answer, conversations

DEADLINE_S = 60.0


class VersionPolicy:
    """A policy that answers with its weights, a number that is also their version."""

    def __init__(self) -> None:
        self.weights = 0

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return answer(tensordict, str(self.weights))


class VersionUpdater(WeightUpdaterBase):
    def __init__(self, policy: VersionPolicy):
        super().__init__()
        self.policy = policy

    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: int) -> None:
        self.policy.weights = server_weights


class CallbackTransform(Transform):  # type: ignore[misc]
    """Calls a function in the step of an episode that follows `steps` other steps."""

    def __init__(self, steps: int, callback: Callable[[], None]):
        super().__init__()
        self.steps, self.callback = steps, callback

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        if int(tensordict["step_count"].max()) == self.steps:
            self.callback()
        return next_tensordict


def short() -> EnvBase:
    """Return an environment of conversations of one turn."""
    return conversations(1, rows=1)


def collector(env: EnvBase, policy: Any = None, **settings: Any) -> LLMCollector:
    settings = {"weight_updater": VersionUpdater, "track_policy_version": True, "flatten_data": True, **settings}
    return LLMCollector(env, policy=policy or VersionPolicy(), **settings)


def push(llm_collector: LLMCollector) -> None:
    """Push the next weights, whose number is their version."""
    assert isinstance(llm_collector.policy_version, int)
    llm_collector.update_policy_weights_(llm_collector.policy_version + 1)  # type: ignore[arg-type]


def answers_and_versions(batch: TensorDictBase | None) -> list[tuple[int, int]]:
    assert batch is not None
    return [
        (int(row["history"].full.content[-1]), int(row["policy_version"]))
        for row in (batch.unbind(0) if batch.ndim else [batch])
    ]


def test_update_during_a_collection_changes_versions():
    env = conversations(4, rows=1)
    llm_collector = collector(env, dialog_turns_per_batch=4)
    env.append_transform(CallbackTransform(1, lambda: push(llm_collector)))
    batch = next(iter(llm_collector))
    assert answers_and_versions(batch) == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert batch is not None
    assert [int(row["next", "policy_version"]) for row in batch.unbind(0)] == [0, 0, 1, 1]
    assert llm_collector.get_policy_version() == 1


class BlockingPolicy(VersionPolicy):
    """A policy whose answer waits for `allowed` and has the weights from before and after the wait."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.allowed = threading.Event(), threading.Event()

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        before = self.weights
        self.entered.set()
        assert self.allowed.wait(DEADLINE_S)
        return answer(tensordict, f"{before}{self.weights}")


def test_weights_do_not_change_during_a_turn():
    policy, queue = BlockingPolicy(), queues.Queue()  # type: ignore[var-annotated]
    with collector(short(), policy, dialog_turns_per_batch=1, total_dialog_turns=1, queue=queue) as llm_collector:
        llm_collector.start()
        assert policy.entered.wait(DEADLINE_S)
        pushing = threading.Thread(target=push, args=[llm_collector])
        pushing.start()
        pushing.join(0.2)
        policy.allowed.set()
        pushing.join(DEADLINE_S)
        assert answers_and_versions(queue.get(timeout=DEADLINE_S)) == [(0, 0)]
        assert policy.weights == llm_collector.policy_version == 1


def test_update_waiting_too_long_raises():
    policy = BlockingPolicy()
    llm_collector = collector(short(), policy, dialog_turns_per_batch=1, queue=queues.Queue(), timeout=0.05)
    llm_collector.start()
    assert policy.entered.wait(DEADLINE_S)
    with pytest.raises(TimeoutError, match=r"or another push of weights did not finish within 0\.05 s"):
        push(llm_collector)
    policy.allowed.set()
    llm_collector.shutdown(DEADLINE_S)
    assert policy.weights == llm_collector.policy_version == 0


def test_versions_may_be_uuids():
    names = PolicyVersion("uuid")
    llm_collector = collector(short(), dialog_turns_per_batch=1, track_policy_version=names, weight_updater=None)
    first = next(iter(llm_collector))
    llm_collector.increment_version()
    second = next(iter(llm_collector))
    assert first is not None and second is not None
    assert [first[0]["policy_version"], second[0]["policy_version"]] == [
        change.new_version for change in names.version_history
    ]


def test_push_without_an_updater_raises():
    llm_collector = collector(short(), dialog_turns_per_batch=1, weight_updater=None)
    with pytest.raises(ValueError, match=r"No weight updater is known for VersionPolicy\. Give the coll"):
        push(llm_collector)


@pytest.mark.parametrize(
    "kwargs", [{"weights": 1}, {"policy": 1}, {"weights_dict": {"policy": 1}}, {"weights": 1, "model_id": "policy"}]
)
def test_weights_may_be_passed_in_several_ways(kwargs: dict[str, Any]):
    llm_collector = collector(short(), dialog_turns_per_batch=1)
    llm_collector.update_policy_weights_(**kwargs)
    assert llm_collector.policy.weights == llm_collector.policy_version == 1


@pytest.mark.parametrize(
    "kwargs", [{"weights": 1, "policy": 1}, {"weights_dict": {"critic": 1}}, {"model_id": "critic"}]
)
def test_weights_of_another_model_are_rejected(kwargs: dict[str, Any]):
    with pytest.raises(ValueError, match=r"one model|given more than once"):
        collector(short(), dialog_turns_per_batch=1).update_policy_weights_(**kwargs)


def test_update_before_thread_runs_counts(monkeypatch: pytest.MonkeyPatch):
    buffer = ReplayBuffer(storage=LazyStackStorage(8))
    with collector(short(), dialog_turns_per_batch=1, replay_buffer=buffer, max_staleness=0) as llm_collector:
        begin, run = threading.Event(), llm_collector._run

        def late(*arguments: Any) -> None:
            begin.wait(DEADLINE_S)
            run(*arguments)

        monkeypatch.setattr(llm_collector, "_run", late)
        llm_collector.start()
        push(llm_collector)
        begin.set()
        deadline = time.monotonic() + 5.0
        while len(buffer) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(buffer) == 2


def test_thread_keeps_the_staleness_bound():
    queue: queues.Queue[TensorDictBase] = queues.Queue()
    with collector(short(), dialog_turns_per_batch=1, queue=queue, max_staleness=1) as llm_collector:
        llm_collector.start()
        ages = []
        for trained in range(4):
            (version,) = [version for _, version in answers_and_versions(queue.get(timeout=DEADLINE_S))]
            ages.append(trained - version)
            if trained == 1:  # batches 0 and 1 started with version 0; the third one waits for an update
                time.sleep(0.2)
                assert queue.empty()
                assert llm_collector.turns == 2
                push(llm_collector)
            if trained:
                push(llm_collector)
        assert 0 <= max(ages) <= 1


@pytest.mark.parametrize(("max_staleness", "dropped"), [(0, 3), (1, 0)])
def test_trajectory_with_stale_turns_is_dropped(max_staleness: int, dropped: int):
    env = conversations(3, rows=1)
    llm_collector = collector(
        env,
        dialog_turns_per_batch=3,
        yield_completed_trajectories=True,
        flatten_data=None,
        max_staleness=max_staleness,
    )
    pushes = iter([True])
    env.append_transform(CallbackTransform(1, lambda: push(llm_collector) if next(pushes, False) else None))
    batch = next(iter(llm_collector))
    assert llm_collector.dropped_turns == dropped
    assert [version for _, version in answers_and_versions(batch)] == ([1, 1, 1] if dropped else [0, 0, 1])


def test_trajectories_from_before_an_update_are_stale():
    env = short()
    llm_collector = collector(
        env, dialog_turns_per_batch=2, yield_completed_trajectories=True, flatten_data=None, max_staleness=0
    )
    pushes = iter([False, True])
    env.append_transform(CallbackTransform(0, lambda: push(llm_collector) if next(pushes, False) else None))
    assert [version for _, version in answers_and_versions(next(iter(llm_collector)))] == [1, 1]
    assert llm_collector.dropped_turns == 2


def test_waiting_thread_raises_and_ends_its_queue():
    queue: queues.Queue[TensorDictBase] = queues.Queue()
    llm_collector = collector(short(), dialog_turns_per_batch=1, queue=queue, max_staleness=0, timeout=0.2)
    llm_collector.start()
    assert answers_and_versions(queue.get(timeout=DEADLINE_S)) == [(0, 0)]
    assert queue.get(timeout=DEADLINE_S) is None
    with pytest.raises(TimeoutError, match=r"the update before the next batch \(max_staleness=0"):
        llm_collector.shutdown(DEADLINE_S)


def test_full_queue_receives_its_end_later():
    queue: queues.Queue[TensorDictBase] = queues.Queue(1)
    with collector(short(), dialog_turns_per_batch=1, total_dialog_turns=2, queue=queue) as llm_collector:
        llm_collector.start()
        batches = [queue.get(timeout=DEADLINE_S) for _ in range(3)]
        assert batches[0] is not None and batches[1] is not None
        assert batches[2] is None


class _PairBuffer:
    """A buffer that stores rows in pairs, once the second row of a pair has arrived."""

    def __init__(self) -> None:
        self.num_received = 0

    def extend(self, tensordict: TensorDictBase) -> torch.Tensor:
        self.num_received += 1
        return torch.arange(2 * (1 - self.num_received % 2))


def test_unstored_batch_waits_for_no_update():
    buffer = _PairBuffer()
    with collector(short(), dialog_turns_per_batch=1, replay_buffer=buffer, max_staleness=0) as llm_collector:
        llm_collector.start()
        deadline = time.monotonic() + DEADLINE_S
        while buffer.num_received < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert buffer.num_received == 2


def test_thread_ends_after_its_turns():
    buffer = ReplayBuffer(storage=LazyStackStorage(8))
    llm_collector = collector(short(), dialog_turns_per_batch=2, total_dialog_turns=4, replay_buffer=buffer)
    llm_collector.start()
    deadline = time.monotonic() + DEADLINE_S
    while llm_collector.is_running() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert (len(buffer), llm_collector.is_running()) == (4, False)
    llm_collector.async_shutdown()


def test_thread_waiting_for_a_full_queue_ends():
    queue: queues.Queue[TensorDictBase] = queues.Queue(1)
    llm_collector = collector(short(), dialog_turns_per_batch=1, queue=queue)
    llm_collector.start()
    with pytest.raises(RuntimeError, match="The collector's thread is running"):
        next(iter(llm_collector))
    queue.get(timeout=DEADLINE_S)
    llm_collector.shutdown(DEADLINE_S)
    assert not llm_collector.is_running()


def test_shutdown_raises_the_error_of_the_thread():
    def fail(tensordict: TensorDictBase) -> TensorDictBase:
        raise RuntimeError("no answer")

    llm_collector = collector(short(), fail, dialog_turns_per_batch=1, queue=queues.Queue(), weight_updater=None)
    llm_collector.start()
    with pytest.raises(RuntimeError, match="no answer"):
        llm_collector.shutdown(DEADLINE_S)


def test_thread_requires_a_buffer_or_queue():
    with pytest.raises(RuntimeError, match="needs a replay_buffer or a queue"):
        collector(short(), dialog_turns_per_batch=1).start()
