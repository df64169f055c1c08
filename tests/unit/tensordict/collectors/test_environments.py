"""Collectors with several workers run every environment of this project; TorchRL's general ones do, too."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from tensordict import TensorDictBase, lazy_stack
from torchrl.collectors import Collector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import AsyncEnvPool, EnvBase, ParallelEnv, SerialEnv, StepCounter

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.tensordict import (
    CountdownEnv,
    DatasetChatEnv,
    GSM8KEnv,
    IFEvalEnv,
    LLMCollector,
    LLMWrapperBase,
    MATHEnv,
    MLGymWrapper,
    make_gsm8k_env,
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


def texts(tensordict: TensorDictBase) -> TensorDictBase:
    """Answer every prompt of an LLMEnv with "ok"."""
    if tensordict.ndim > 1:
        return lazy_stack([texts(part) for part in tensordict.unbind(0)])
    return tensordict.set("text_response", ["ok"] * len(tensordict))


def policy_of(name: str) -> Any:
    """Return a policy for the environment of that name."""
    return texts if name == "llm" else wrapper()


def answer_of(row: TensorDictBase) -> str:
    """Return the answer of a turn."""
    said = row["history"].full.content[-1] if "history" in row.keys() else row["text_response"]  # noqa: SIM118
    return str(said)


class Echo(TextEnv):
    def step(self, action: str) -> StepOutput:
        return StepOutput([{"role": "user", "content": action}], 1.0, done=False)


def mlgym(num_envs: int) -> EnvBase:
    env: EnvBase = MLGymWrapper(Echo, batch_size=(num_envs,), system_prompt="Repeat.")
    return env.append_transform(StepCounter(2))


def chat(**settings: Any) -> EnvBase:
    env: EnvBase = DatasetChatEnv(dataset=[{"query": "a"}, {"query": "b"}], **settings)
    return env.append_transform(StepCounter(2))


MAKERS: list[Callable[..., EnvBase]] = [
    chat,
    partial(GSM8KEnv, dataset=QUESTIONS),
    partial(IFEvalEnv, dataset=INSTRUCTIONS),
    partial(MATHEnv, dataset=PROBLEMS),
    CountdownEnv,
    partial(make_gsm8k_env, QUESTIONS, tokenizer=byte_tokenizer()),
    mlgym,
]
NAMES = ["chat", "gsm8k", "ifeval", "math", "countdown", "llm", "mlgym"]
CASES = list(zip(NAMES, MAKERS, strict=True))


@pytest.mark.parametrize(("name", "made"), CASES, ids=NAMES)
def test_llm_collector_runs_several_workers(name: str, made: Callable[..., EnvBase]):
    maker = partial(made, num_envs=1)
    with LLMCollector(SerialEnv(2, maker), policy=policy_of(name), dialog_turns_per_batch=4) as collector:
        batch = next(iter(collector))
    assert batch is not None and batch.batch_size == (2, 1, 2)
    buffer = ReplayBuffer(storage=LazyStackStorage(16), batch_size=4)
    pool = AsyncEnvPool([maker, maker], backend="threading", stack="lazy")
    with LLMCollector(
        pool,
        policy=policy_of(name),
        yield_completed_trajectories=True,
        total_dialog_turns=8,
        replay_buffer=buffer,
        track_policy_version=True,
    ) as collector:
        assert set(collector) == {None}
    rows = buffer.sample()
    assert 8 <= len(buffer) < 8 + 2 and rows["policy_version"].tolist() == [0] * 4
    assert {answer_of(row) for row in rows.unbind(0)} == {"ok"}


@pytest.mark.parametrize(("name", "made"), CASES, ids=NAMES)
def test_completed_trajectories_come_from_serial_environments(name: str, made: Callable[..., EnvBase]):
    env = SerialEnv(2, partial(made, num_envs=2))
    with LLMCollector(
        env, policy=policy_of(name), dialog_turns_per_batch=4, yield_completed_trajectories=True
    ) as collector:
        batch = next(iter(collector))
    assert batch is not None and len(batch) >= 4
    ends = batch["next", "done"].flatten().tolist()
    assert ends[-1] and sum(ends) == len(set(batch["collector", "traj_ids"].tolist()))


@pytest.mark.on_demand
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pooled", [False, True])
def test_environments_run_in_other_processes(pooled: bool):
    multiprocessing.set_start_method("spawn", force=True)  # as importing torchrl does
    makers = [partial(GSM8KEnv, dataset=QUESTIONS, num_envs=1, seed=seed) for seed in range(2)]
    pool = partial(AsyncEnvPool, backend="multiprocessing", stack="lazy", exchange="queue")
    env = pool(makers) if pooled else ParallelEnv(2, makers, consolidate=False)
    settings: dict[str, Any] = {"dialog_turns_per_batch": 2, "total_dialog_turns": 4}
    with LLMCollector(env, policy=wrapper(), yield_completed_trajectories=True, **settings) as collector:
        batches = [batch for batch in collector if batch is not None]
    assert 4 <= sum(map(len, batches)) <= 5
    assert all(batch["next", "done"].all() for batch in batches)
    assert {row["question"] for batch in batches for row in batch.unbind(0)} <= {row["question"] for row in QUESTIONS}


@pytest.mark.parametrize(("name", "made"), CASES, ids=NAMES)
def test_general_collector_runs_environment(name: str, made: Callable[..., EnvBase]):
    collector = Collector(
        partial(made, num_envs=2),
        policy_of(name),
        frames_per_batch=4,
        total_frames=8,
        use_buffers=False,
        auto_register_policy_transforms=False,
    )
    batches = list(collector)
    assert [batch.batch_size for batch in batches] == [(2, 2), (2, 2)]
    assert {answer_of(row) for row in batches[0].reshape(-1).unbind(0)} == {"ok"}
    collector.shutdown()
