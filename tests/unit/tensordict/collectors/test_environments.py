"""Collectors with several workers run every environment of this project; TorchRL's general ones do, too."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torchrl.collectors import Collector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, EnvBase, ParallelEnv, SerialEnv, StepCounter

from skyrl_train.tensordict import (
    CountdownEnv,
    DatasetChatEnv,
    GSM8KEnv,
    IFEvalEnv,
    LLMCollector,
    LLMWrapperBase,
    MATHEnv,
)
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

QUESTIONS = [{"question": f"{n} + {n} = ?", "answer": f"#### {2 * n}"} for n in range(1, 5)]
INSTRUCTIONS = [
    {"prompt": f"Write {n} words.", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]} for n in range(4)
]
PROBLEMS = [{"problem": f"{n} + {n} = ?", "solution": rf"\boxed{{{2 * n}}}"} for n in range(1, 5)]


def wrapper() -> LLMWrapperBase:
    """Return a policy that answers "ok"."""
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(lambda request: [*tokenizer("ok")["input_ids"], tokenizer.eos_token_id])
    return LLMWrapperBase(engine, tokenizer=tokenizer)


def chat(**settings: Any) -> EnvBase:
    env: EnvBase = DatasetChatEnv(dataset=[{"query": "a"}, {"query": "b"}], **settings)
    return env.append_transform(StepCounter(2))


MAKERS: list[Callable[..., EnvBase]] = [
    chat,
    partial(GSM8KEnv, dataset=QUESTIONS),
    partial(IFEvalEnv, dataset=INSTRUCTIONS),
    partial(MATHEnv, dataset=PROBLEMS),
    CountdownEnv,
]
NAMES = ["chat", "gsm8k", "ifeval", "math", "countdown"]


@pytest.mark.parametrize("made", MAKERS, ids=NAMES)
def test_llm_collector_runs_several_workers(made: Callable[..., EnvBase]):
    maker = partial(made, num_envs=1)
    with LLMCollector(SerialEnv(2, maker), policy=wrapper(), dialog_turns_per_batch=4) as collector:
        batch = next(iter(collector))
    assert batch is not None and batch.batch_size == (2, 1, 2)
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=4)
    pool = AsyncEnvPool([maker, maker], backend="threading", stack="lazy")
    with LLMCollector(
        pool,
        policy=wrapper(),
        yield_completed_trajectories=True,
        total_dialog_turns=8,
        replay_buffer=buffer,
        track_policy_version=True,
    ) as collector:
        assert set(collector) == {None}
    rows = buffer.sample()
    assert 8 <= len(buffer) < 8 + 2 and rows["policy_version"].tolist() == [0] * 4
    assert all(row["history"].full.content[-1] == "ok" for row in rows.unbind(0))


@pytest.mark.parametrize("made", MAKERS, ids=NAMES)
def test_completed_trajectories_come_from_serial_environments(made: Callable[..., EnvBase]):
    env = SerialEnv(2, partial(made, num_envs=2))
    with LLMCollector(env, policy=wrapper(), dialog_turns_per_batch=4, yield_completed_trajectories=True) as collector:
        batch = next(iter(collector))
    assert batch is not None and len(batch) >= 4
    ends = batch["next", "done"].flatten().tolist()
    assert ends[-1] and sum(ends) == len(set(batch["collector", "traj_ids"].tolist()))


@pytest.mark.on_demand
@pytest.mark.timeout(120)
def test_environments_run_in_other_processes():
    multiprocessing.set_start_method("spawn", force=True)  # as importing torchrl does
    makers = [partial(GSM8KEnv, dataset=QUESTIONS, num_envs=1, seed=seed) for seed in range(2)]
    env = ParallelEnv(2, makers, consolidate=False)
    settings: dict[str, Any] = {"dialog_turns_per_batch": 2, "total_dialog_turns": 4}
    with LLMCollector(env, policy=wrapper(), yield_completed_trajectories=True, **settings) as collector:
        batches = [batch for batch in collector if batch is not None]
    assert sum(map(len, batches)) == 4
    assert all(batch["next", "done"].all() for batch in batches)
    assert {row["question"] for batch in batches for row in batch.unbind(0)} <= {row["question"] for row in QUESTIONS}


@pytest.mark.parametrize("made", MAKERS, ids=NAMES)
def test_general_collector_runs_environment(made: Callable[..., EnvBase]):
    collector = Collector(
        partial(made, num_envs=2),
        wrapper(),
        frames_per_batch=4,
        total_frames=8,
        use_buffers=False,
        auto_register_policy_transforms=False,
    )
    batches = list(collector)
    assert [batch.batch_size for batch in batches] == [(2, 2), (2, 2)]
    assert all(row["next", "history"].prompt is not None for row in batches[0].reshape(-1).unbind(0))
    collector.shutdown()
