"""Batches and end of a collector: plain policies in conversations of given lengths."""

from __future__ import annotations

import gc
import queue as queues
import threading
import time
from contextlib import closing
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector as TorchRLCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, SerialEnv, Transform
from torchrl.envs.llm import ChatEnv

from skyrl_train.errors import ConfigError, DeadlineExceeded
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.envs.chat import DatasetChatEnv
from skyrl_train.tensordict.losses.mc_advantage import MCAdvantage
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.conversations import answer, conversations, questions


def collector(env: Any, turns: int | None = None, **settings: Any) -> LLMCollector:
    settings.setdefault("policy", answer)
    return LLMCollector(env, dialog_turns_per_batch=turns, **settings)


@pytest.mark.defect("D33")
def test_construction_neither_resets_nor_samples():
    calls: list[int] = []

    def counts(tensordict: TensorDictBase) -> TensorDictBase:
        calls.append(len(tensordict))
        return answer(tensordict)

    collects = collector(conversations(1, 1, 1, 1), 2, policy=counts)
    assert isinstance(collects, TorchRLCollector)
    assert calls == []
    assert questions(next(iter(collects))) == [["q0"], ["q1"]]
    assert calls == [2]


@pytest.mark.defect("D33")
def test_policy_may_edit_history_in_place():
    def edits(tensordict: TensorDictBase) -> TensorDictBase:
        history = tensordict["history"]
        said = type(history.prompt)(role=["assistant"], content=["ok"], batch_size=(1,))
        history.full = history.prompt.append(said, inplace=True, dim=-1)
        return tensordict

    batch = next(iter(collector(conversations(3, rows=1), 6, policy=edits)))
    assert batch is not None and batch.batch_size == (1, 6)
    said = [len(step["history"].full.content) for step in batch[0].unbind(0)]
    following = [len(step["next", "history"].prompt.content) for step in batch[0].unbind(0)]
    assert said == following == [2, 3, 4, 2, 3, 4]


def test_batches_number_their_trajectories():
    batch = next(iter(collector(conversations(1, 3, 1), 6)))
    assert batch is not None
    assert questions(batch) == [["q0", "q2", "q0"], ["q1", "q1", "q1"]]
    assert batch["collector", "traj_ids"].tolist() == [[0, 2, 3], [1, 1, 1]]


def test_buffer_refuses_unfinished_trajectories():
    class Ends(Transform):
        """The second row ends after its first turn, without a step counter."""

        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
            done = torch.tensor([[False], [True]])
            next_tensordict.set("reward", torch.tensor([[[1.0]], [[2.0]]]))
            return next_tensordict.set("terminated", done).set("done", done)

    env = ChatEnv.from_dataloader([{"query": ["Why?"]}] * 4, batch_size=(2,)).append_transform(Ends())
    buffer = ReplayBuffer(storage=LazyStackStorage(8), transform=MCAdvantage(grpo_size=1))
    with pytest.raises(RuntimeError, match="not done"):
        next(iter(collector(env, 2, replay_buffer=buffer)))


def test_module_policy_takes_tensors_by_name():
    class Counts(torch.nn.Linear):
        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return answer(tensordict)

    policy, trained = Counts(1, 1), torch.nn.Linear(1, 1)
    collects = collector(conversations(1), 2, policy=policy)
    collects.update_policy_weights_(dict(trained.state_dict()))
    assert torch.equal(policy.weight, trained.weight) and collects.policy_version == 1
    with pytest.raises(ConfigError, match="Give update_policy_weights_ a model"):
        collects.update_policy_weights_()
    assert collects.policy_version == 1


def test_slow_environment_of_pool_does_not_delay_others():
    finish = threading.Event()

    class Waits(Transform):
        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
            assert finish.wait(30.0)
            return next_tensordict

    makers = [lambda: conversations(1, rows=1).append_transform(Waits()), lambda: conversations(3, rows=1)]
    pool = AsyncEnvPool(makers, backend="threading", stack="lazy")
    with collector(pool, 1, yield_completed_trajectories=True, timeout=60.0) as collects:
        lengths = [batch.numel() for batch, _ in zip(collects, range(2), strict=False) if batch is not None]
        finish.set()
    assert lengths == [3, 3]


def test_stuck_environment_of_pool_meets_deadline():
    class Hangs(Transform):
        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
            time.sleep(1.0)
            return next_tensordict

    pool = AsyncEnvPool([lambda: conversations(1, rows=1).append_transform(Hangs())], backend="threading", stack="lazy")
    collects = collector(pool, 1, yield_completed_trajectories=True, timeout=0.1)
    with pytest.raises(DeadlineExceeded, match="an environment of the AsyncEnvPool"):
        next(iter(collects))
    time.sleep(1.0)
    collects.shutdown()


@pytest.mark.defect("D33")
def test_turns_that_are_not_yielded_count():
    collects = collector(conversations(3, rows=1), 1, yield_only_last_steps=True, total_dialog_turns=3)
    (batch,) = collects
    assert batch is not None and batch.batch_size == (1,)
    assert batch["step_count"].item() == 2
    assert collects.turns == collects._frames == 3


def test_rows_have_the_steps_that_give_the_turns():
    batches = list(collector(conversations(1, 2, 3), 3, total_dialog_turns=8))
    assert [questions(batch) for batch in batches] == [[["q0", "q2"], ["q1", "q1"]], [["q2", "q2"], ["q0", "q1"]]]


def test_complete_trajectories_follow_each_other():
    batches = iter(collector(conversations(3, 1, 2), 3, yield_completed_trajectories=True))
    assert questions(next(batches)) == ["q1", "q0", "q0", "q0", "q2", "q2"]
    batch = next(batches)
    assert batch is not None
    assert questions(batch) == ["q1", "q0", "q0", "q0", "q2", "q2"]
    assert batch["next", "done"].flatten().tolist() == [True, False, False, True, False, True]


@pytest.mark.parametrize(("turns", "yielded"), [(3, 4), (2, 2), (None, 2)])
def test_all_trajectories_of_a_step_are_yielded(turns: int | None, yielded: int):
    batch = next(iter(collector(conversations(1, 1), turns, yield_completed_trajectories=True)))
    assert batch is not None and len(batch) == yielded


def test_every_batch_may_begin_anew():
    batches = iter(collector(conversations(2, 2, 2, 2), 2, reset_at_each_iter=True))
    assert [questions(next(batches)) for _ in range(2)] == [[["q0"], ["q1"]], [["q2"], ["q3"]]]


@pytest.mark.filterwarnings("ignore:.* history should have one more batch dimension")  # of TorchRL's specs
def test_environments_may_be_batched_or_asynchronous():
    makers = [lambda place=place: conversations(place + 1, rows=1) for place in range(3)]
    serial = collector(SerialEnv(3, makers), 9, flatten_data=True)
    batch = next(iter(serial))
    assert batch is not None
    assert batch["next", "done"].reshape(3, 3).tolist() == [[True] * 3, [False, True, False], [False, False, True]]
    serial.shutdown()
    pool = AsyncEnvPool(makers, backend="threading", stack="lazy")
    settings: dict[str, Any] = {"yield_completed_trajectories": True, "track_policy_version": True}
    with collector(pool, 1, total_dialog_turns=24, **settings) as collects:
        batches = [batch for batch in collects if batch is not None]
    assert {len(batch) for batch in batches} == {1, 2, 3}
    for batch in batches:
        assert [int(row["query"][-1]) for row in batch.unbind(0)] == [len(batch)] * len(batch)
        assert batch["next", "done"].flatten().tolist() == [False] * (len(batch) - 1) + [True]
        assert batch["policy_version"].tolist() == batch["next", "policy_version"].tolist() == [0] * len(batch)
    assert 24 <= collects.turns < 24 + 5


def test_replay_buffer_gets_rows():
    buffer = ReplayBuffer(storage=LazyStackStorage(8), batch_size=4)
    collects = collector(conversations(2, 2), 4, total_dialog_turns=4, replay_buffer=buffer)
    assert list(collects) == [None]
    assert questions(buffer[:]) == ["q0", "q0", "q1", "q1"]


def test_queue_gets_rows():
    queue: queues.Queue[TensorDictBase] = queues.Queue()
    assert list(collector(conversations(1), 2, total_dialog_turns=4, queue=queue, flatten_data=True)) == [None, None]
    assert [queue.get()["query"][:2] for _ in range(4)] == ["q0"] * 4


def test_every_batch_goes_through_the_postproc():
    collects = collector(conversations(1), 2, total_dialog_turns=2)
    collects.set_postproc(lambda batch: batch.set("seen", torch.ones(batch.batch_size)))
    with pytest.raises(RuntimeError, match="already has a postproc"):
        collects.set_postproc(lambda batch: batch)
    (batch,) = collects
    assert batch is not None and batch["seen"].all()


def test_error_ends_the_current_episodes():
    failures = [RuntimeError("no answer")]

    def fails_once(tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict["step_count"].any() and failures:
            raise failures.pop()
        return answer(tensordict)

    collects = collector(conversations(3, rows=1), 1, yield_completed_trajectories=True, policy=fails_once)
    with pytest.raises(RuntimeError, match="no answer"):
        next(iter(collects))
    batch = next(iter(collects))
    assert batch is not None and batch["step_count"].flatten().tolist() == [0, 1, 2]


def test_policy_may_return_only_its_additions():
    def additions(tensordict: TensorDictBase) -> TensorDictBase:
        return answer(tensordict.copy()).select("history")

    batch = next(iter(collector(conversations(2), 4, policy=additions)))
    assert questions(batch) == [["q0", "q0"], ["q0", "q0"]]


def test_copies_weights_into_a_module_policy():
    class Policy(torch.nn.Module):
        def __init__(self, value: float):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((1,), value))

        def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
            return answer(tensordict)

    collects = collector(conversations(1), 2, policy=Policy(0.0), track_policy_version=True)
    collects.update_policy_weights_(Policy(3.0))
    assert collects.policy.weight.item() == 3.0
    assert collects.policy_version == 1


@pytest.mark.parametrize("pooled", [False, True])
def test_context_ends_the_row_not_the_collector(pooled: bool, caplog: pytest.LogCaptureFixture):
    def made(rows: int = 1) -> Any:
        return DatasetChatEnv(dataset=[{"query": "a"}, {"query": "b" * 70}], num_envs=rows, shuffle=False)

    model = tiny_model()
    model.config.max_position_embeddings = 64
    settings: dict[str, Any] = {"generate_kwargs": {"max_tokens": 10, "ignore_eos": True}}
    env = AsyncEnvPool([made, made], backend="threading", stack="lazy") if pooled else made(2)
    with (
        closing(TransformersWrapper(model, tokenizer=byte_tokenizer(), **settings)) as wrapper,
        collector(env, policy=wrapper, yield_completed_trajectories=True, total_dialog_turns=16) as collects,
    ):
        trajectories: dict[int, list[TensorDictBase]] = {}
        for row in (row for batch in collects if batch is not None for row in batch.unbind(0)):
            trajectories.setdefault(int(row["collector", "traj_ids"]), []).append(row)
    assert {rows[0]["query"][0] for rows in trajectories.values()} == {"a", "b"}
    for rows in trajectories.values():
        *before, last = [len(row["tokens"].response) for row in rows]
        assert last == 0 and all(before) and bool(before) == (rows[0]["query"] == "a")
        assert [row["next", "done"].item() for row in rows] == [False] * len(before) + [True]
        assert not rows[-1]["next", "terminated"].item()
    assert "leave no room in max_model_len=64" in caplog.text


def test_owned_policy_closes_with_the_environment():
    closed: list[str] = []

    class Policy:
        def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
            return answer(tensordict)

        def close(self) -> None:
            closed.append("policy")
            raise RuntimeError("cannot close")

    collects = collector(
        conversations(1, rows=1).append_transform(_Closes(closed)), 1, policy=None, policy_factory=Policy
    )
    next(iter(collects))
    with pytest.raises(RuntimeError, match="cannot close"):
        collects.shutdown()
    assert closed == ["policy", "env"]
    collects.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        next(iter(collects))
    with collector(conversations(1).append_transform(_Closes(closed)), 1, policy=Policy()):
        pass
    assert closed == ["policy", "env", "env"]  # a policy of the caller stays open


def test_abandoned_collector_leaves_the_environment_open():
    closed: list[str] = []
    env = conversations(1).append_transform(_Closes(closed))
    next(iter(collector(env, 2)))
    gc.collect()
    assert closed == []


class _Closes(Transform):
    """Records that its environment was closed."""

    def __init__(self, closed: list[str]):
        super().__init__()
        self.closed = closed

    def close(self) -> None:
        self.closed.append("env")


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        (
            {"replay_buffer": ReplayBuffer(storage=LazyStackStorage(1)), "queue": queues.Queue()},
            RuntimeError,
            "Give only one of them",
        ),
        ({"async_envs": True}, RuntimeError, "AsyncEnvPool"),
        ({"yield_only_last_steps": True, "flatten_data": True}, TypeError, "rows are flat"),
        ({"yield_only_last_steps": True, "reset_at_each_iter": True}, TypeError, "would end"),
        (
            {"yield_only_last_steps": True, "yield_completed_trajectories": False},
            TypeError,
            "needs completed trajectories",
        ),
        ({"yield_completed_trajectories": True, "flatten_data": False}, TypeError, "differ in length"),
        ({"turns": None}, ValueError, "dialog_turns_per_batch is required"),
        ({"turns": 0}, ValueError, "dialog_turns_per_batch=0"),
        ({"total_dialog_turns": 0}, ValueError, "total_dialog_turns=0"),
        ({"policy": None}, ValueError, "exactly one of policy and policy_factory"),
        ({"policy_factory": lambda: answer}, ValueError, "exactly one of policy and policy_factory"),
        ({"max_staleness": -1}, ValueError, "max_staleness=-1"),
        ({"timeout": 0.0}, ValueError, r"timeout=0\.0"),
    ],
)
def test_invalid_settings_are_rejected(settings: dict[str, Any], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        collector(conversations(1), **{"turns": 2, **settings})
