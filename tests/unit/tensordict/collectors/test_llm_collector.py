"""Batches and end of a collector: plain policies in conversations of given lengths."""

from __future__ import annotations

import queue as queues
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.envs.base import StepCounter, Transform
from skyrl_train.tensordict.envs.chat import DatasetChatEnv
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.losses.mc_advantage import MCAdvantage
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.tensordict_batches import replay_buffer


class EndsByQuestion(Transform):
    """Question "q<i>/<n>" takes n turns; every turn is rewarded with i."""

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        numbers = [str(row["query"])[1:].split("/") for row in root.unbind(0)]
        following.set("reward", torch.tensor([float(i) for i, _ in numbers]).reshape(-1, 1, 1))
        over = following["step_count"] >= torch.tensor([[int(turns)] for _, turns in numbers])
        following.set("terminated", over)
        return following.set("done", over)


def conversations(*turns: int, rows: int = 2) -> DatasetChatEnv:
    """Questions in order, each of so many turns."""
    dataset = [{"query": f"q{place}/{count}"} for place, count in enumerate(turns)]
    env = DatasetChatEnv(dataset=dataset, shuffle=False, num_envs=rows)
    return env.append_transform(StepCounter()).append_transform(EndsByQuestion())


def says_ok(tensordict: TensorDictBase) -> TensorDictBase:
    tensordict["text_response"] = ["ok"] * len(tensordict)
    return tensordict


def questions(batch: TensorDictBase | None) -> list[Any]:
    assert batch is not None
    return [row["query"][:2] if row.ndim == 0 else questions(row) for row in batch.unbind(0)]


def collector(env: Any, turns: int | None = None, **settings: Any) -> LLMCollector:
    settings.setdefault("policy", says_ok)
    return LLMCollector(env, dialog_turns_per_batch=turns, **settings)


@pytest.mark.defect("D33")
def test_nothing_is_sampled_before_it_is_asked_for():
    env = conversations(1, 1, 1, 1)
    collects = collector(env, 2)
    assert questions(env.primer.forward()) == ["q0"]  # the first row of the data is still there
    assert questions(next(iter(collects))) == [["q1"], ["q2"]]


@pytest.mark.defect("D33")
def test_a_plain_policy_may_edit_the_history_in_place():
    def edits(tensordict: TensorDictBase) -> TensorDictBase:
        for row in tensordict.unbind(0):
            prompt = row["history"].prompt
            row["history"].full = prompt.append(History(role="assistant", content="ok", batch_size=()))
        return tensordict

    batch = next(iter(collector(conversations(3, rows=1), 6, policy=edits)))
    assert batch is not None and batch.batch_size == (1, 6)
    said = [len(step["history"].full.to_chats()) for step in batch[0].unbind(0)]
    following = [len(step["next", "history"].prompt.to_chats()) for step in batch[0].unbind(0)]
    assert said == following == [2, 3, 4, 2, 3, 4]


@pytest.mark.defect("D33")
def test_turns_that_are_not_yielded_count():
    collects = collector(conversations(3, rows=1), 1, yield_only_last_steps=True, total_dialog_turns=3)
    (batch,) = collects
    assert batch is not None and batch.batch_size == (1,)
    assert batch["step_count"].item() == 2
    assert collects.turns == 3


def test_by_default_rows_are_as_many_steps_as_give_the_turns():
    batches = list(collector(conversations(1, 2, 3), 3, total_dialog_turns=8))
    assert [questions(batch) for batch in batches] == [[["q0", "q2"], ["q1", "q1"]], [["q2", "q2"], ["q0", "q1"]]]


def test_the_last_batch_has_what_is_left():
    shapes = [
        tuple(batch.batch_size) for batch in collector(conversations(1), 6, total_dialog_turns=8) if batch is not None
    ]
    assert shapes == [(2, 3), (2, 1)]


def test_whole_trajectories_one_after_the_other():
    batches = iter(collector(conversations(3, 1, 2), 3, yield_completed_trajectories=True))
    assert questions(next(batches)) == ["q1", "q0", "q0", "q0", "q2", "q2"]
    first = next(batches)
    assert first is not None
    assert questions(first) == ["q1", "q0", "q0", "q0", "q2", "q2"]
    assert first["next", "done"].flatten().tolist() == [True, False, False, True, False, True]


@pytest.mark.parametrize(("turns", "yielded"), [(3, 4), (2, 2), (None, 2)])
def test_all_that_end_in_one_step_are_yielded(turns: int | None, yielded: int):
    batch = next(iter(collector(conversations(1, 1), turns, yield_completed_trajectories=True)))
    assert batch is not None and len(batch) == yielded


def test_every_batch_may_begin_anew():
    batches = iter(collector(conversations(2, 2, 2, 2), 2, reset_at_each_iter=True))
    assert [questions(next(batches)) for _ in range(2)] == [[["q0"], ["q1"]], [["q2"], ["q3"]]]


def test_a_replay_buffer_gets_rows_and_the_caller_nothing():
    buffer = replay_buffer(8, shuffle=False, batch_size=4)
    collects = collector(conversations(2, 2), 4, total_dialog_turns=4, replay_buffer=buffer)
    assert list(collects) == [None]
    assert questions(buffer.sample()) == ["q0", "q0", "q1", "q1"]


def test_groups_of_whole_trajectories_become_advantages():
    buffer = replay_buffer(8, shuffle=False, batch_size=3, transform=MCAdvantage(2, prompt_key="kind"))
    env = conversations(2, 1)
    env.append_transform(_Kind())
    collects = collector(env, 3, yield_completed_trajectories=True, replay_buffer=buffer, total_dialog_turns=4)
    assert list(collects) == [None]
    assert buffer.sample()["advantage"].flatten().tolist() == pytest.approx([0.7071, -0.7071, -0.7071], abs=1e-3)


class _Kind(Transform):
    """All are samples of one prompt."""

    def after_reset(self, given: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        return root.set("kind", torch.zeros(len(root), 1))


def test_a_queue_gets_batches():
    queue: queues.Queue[TensorDictBase] = queues.Queue()
    assert list(collector(conversations(1), 2, total_dialog_turns=4, queue=queue, flatten_data=True)) == [None, None]
    assert [questions(queue.get()), questions(queue.get())] == [["q0", "q0"]] * 2


def test_every_batch_goes_through_the_postproc():
    collects = collector(conversations(1), 2, total_dialog_turns=2)
    collects.set_postproc(lambda batch: batch.set("seen", torch.ones(batch.batch_size)))
    with pytest.raises(RuntimeError, match="already has a postproc"):
        collects.set_postproc(lambda batch: batch)
    (batch,) = collects
    assert batch is not None and batch["seen"].all()


def test_what_fails_ends_the_episodes_under_way():
    failures = [RuntimeError("no answer")]

    def fails_once(tensordict: TensorDictBase) -> TensorDictBase:
        if tensordict["step_count"].any() and failures:
            raise failures.pop()
        return says_ok(tensordict)

    collects = collector(conversations(3, rows=1), 1, yield_completed_trajectories=True, policy=fails_once)
    with pytest.raises(RuntimeError, match="no answer"):
        next(iter(collects))
    batch = next(iter(collects))
    assert batch is not None and batch["step_count"].flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("inplace", [True, False, "empty"])
def test_a_wrapper_may_write_where_it_likes(inplace: Any):
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(lambda request: [*tokenizer("yes")["input_ids"], tokenizer.eos_token_id])
    wrapper = LLMWrapperBase(engine, tokenizer=tokenizer, inplace=inplace)
    collects = collector(conversations(2, rows=1), 2, policy=wrapper, flatten_data=True)
    batch = next(iter(collects))
    assert batch is not None
    assert batch[1]["history"].full.to_chats()[-1]["content"] == "yes"
    assert len(batch[1]["history"].full.to_chats()) == 3
    assert batch[1]["tokens"].response.tolist() == [*tokenizer("yes")["input_ids"], tokenizer.eos_token_id]
    assert wrapper.collector is collects


@pytest.fixture(scope="module")
def short_model() -> Iterator[TransformersWrapper]:
    """A model with a context of 64 tokens, which answers with 10."""
    model, tokenizer = tiny_model(), byte_tokenizer()
    model.config.max_position_embeddings = 64
    settings: dict[str, Any] = {"generate_kwargs": {"max_tokens": 10, "ignore_eos": True}}
    with closing(TransformersWrapper(model, tokenizer=tokenizer, **settings)) as wrapper:
        yield wrapper


def test_a_conversation_ends_where_the_models_context_does(short_model: TransformersWrapper):
    env = conversations(1, 9, 1, 1, 1, 1, 1, 1, 1, 1)
    collects = collector(env, 10, policy=short_model, yield_completed_trajectories=True)
    batch = next(iter(collects))
    assert batch is not None
    turns: dict[str, list[TensorDictBase]] = {}
    for row in batch.unbind(0):
        turns.setdefault(row["query"][:2], []).append(row)
    assert {"q0", "q1", "q2"} <= turns.keys()
    assert 1 < len(turns["q1"]) < 9
    last = turns["q1"][-1]["next"]
    assert (last["truncated"].item(), last["terminated"].item(), last["done"].item()) == (True, False, True)
    assert all(not row["next", "truncated"].item() for row in batch.unbind(0) if row["query"][:2] != "q1")


def test_first_prompts_beyond_the_context_are_passed_over(short_model: TransformersWrapper, caplog: Any):
    dataset = [{"query": f"q{place}/1" + " and so on" * 20 * (place in (0, 3))} for place in range(6)]
    env = DatasetChatEnv(dataset=dataset, shuffle=False, num_envs=2)
    env.append_transform(StepCounter()).append_transform(EndsByQuestion())
    batch = next(iter(collector(env, 4, policy=short_model, yield_completed_trajectories=True)))
    assert questions(batch) == ["q2", "q1", "q5", "q4"]
    assert "longer than the model's context" in caplog.text
    too_long = DatasetChatEnv(dataset=[{"query": "q0/1" * 100}], num_envs=2).append_transform(StepCounter())
    with pytest.raises(ConfigError, match="max_model_len"):
        next(iter(collector(too_long, 2, policy=short_model)))


def test_samples_of_a_prompt_are_rows():
    engine = ScriptedEngine(lambda request: [1])
    wrapper = LLMWrapperBase(engine, tokenizer=byte_tokenizer(), num_samples=2)
    with pytest.raises(ValueError, match=r"DatasetChatEnv\(repeats=...\)"):
        next(iter(collector(conversations(1), 2, policy=wrapper)))


def test_a_policy_that_the_collector_made_is_closed_with_the_environment():
    closed = []

    class Policy:
        def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
            return says_ok(tensordict)

        def close(self) -> None:
            closed.append("policy")

    class Env(DatasetChatEnv):
        def close(self) -> None:
            closed.append("env")
            super().close()

    env = lambda: Env(dataset=[{"query": "q"}], num_envs=1)  # noqa: E731
    with collector(env, 1, policy=None, policy_factory=Policy) as collects:
        next(iter(collects))
    assert closed == ["policy", "env"]
    collects.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        next(iter(collects))


def test_the_environment_is_closed_where_the_policy_cannot_be():
    closed = []

    class Policy:
        def close(self) -> None:
            raise RuntimeError("cannot close")

    class Env(DatasetChatEnv):
        def close(self) -> None:
            closed.append("env")

    env = Env(dataset=[{"query": "q"}], num_envs=1)
    with pytest.raises(RuntimeError, match="cannot close"):
        collector(env, 1, policy=None, policy_factory=Policy).shutdown()
    assert closed == ["env"]


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"replay_buffer": replay_buffer(1), "queue": queues.Queue()}, RuntimeError, "Give only one of them"),
        ({"async_envs": True}, RuntimeError, "Give the environment more rows"),
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
        ({"policy_factory": lambda: says_ok}, ValueError, "exactly one of policy and policy_factory"),
        ({"max_staleness": -1}, ValueError, "max_staleness=-1"),
        ({"timeout": 0.0}, ValueError, r"timeout=0\.0"),
    ],
)
def test_what_cannot_be_had_is_refused(settings: dict[str, Any], error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        collector(conversations(1), **{"turns": 2, **settings})
