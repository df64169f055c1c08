from __future__ import annotations

import asyncio

import pytest

from skyrl_train.data.messages import Message, Prompt
from skyrl_train.engines.base import SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.base import StepOutput
from skyrl_train.errors import EnvironmentFailure, RolloutsFailed
from skyrl_train.metrics import Metrics
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.rollouts.conversation import ConversationGenerator, FailureKind, RolloutSettings
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer


class Dying:
    """Environments of which one in `good` survives its second turn; the others die of `kind`."""

    def __init__(self, good: int, kind: str):
        self.good = good
        self.kind = kind
        self.started = 0

    async def start(self, env_class: str, prompt: Prompt) -> Life:
        self.started += 1
        return Life(list(prompt.messages), None if self.started % self.good == 0 else self.kind)


class Life:
    def __init__(self, messages: list[Message], dies_of: str | None):
        self.messages = messages
        self.dies_of = dies_of
        self.turns = 0

    async def step(self, text: str) -> StepOutput:
        self.turns += 1
        if self.turns == 2 and self.dies_of:
            raise EnvironmentFailure(self.dies_of, "connection refused")
        return StepOutput([{"role": "user", "content": "again"}], 1.0, self.turns == 2)

    async def close(self) -> None: ...


def collect(good: int, max_failed_fraction: float, kind: str = "ToolServerDied") -> tuple[int, dict[str, float]]:
    """Groups of a step of 10 prompts with 2 samples each, and its metrics."""
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(lambda request: [tokenizer.eos_token_id])
    settings = RolloutSettings(SamplingParams(9), 2, 3, max_input_length=500, rollout_s=60.0, max_turns=3)
    generator = ConversationGenerator(EngineClient([engine], deadline_s=60.0), Dying(good, kind), tokenizer, settings)  # type: ignore[arg-type]
    metrics = Metrics()

    async def run() -> int:
        collector = RolloutCollector(
            generator.rollout,
            lambda position: Prompt(str(position), [{"role": "user", "content": "go"}], "toy"),
            lambda step: 10,
            max_staleness_steps=0,
            max_failed_fraction=max_failed_fraction,
        )
        collector.start(0)
        try:
            return len(await collector.next_groups(0, metrics))
        finally:
            await collector.close()

    return asyncio.run(run()), metrics.flush()


@pytest.mark.fault("F16")
def test_step_with_too_many_failures_raises():
    with pytest.raises(RolloutsFailed) as stopped:
        collect(good=20, max_failed_fraction=0.5)
    message = str(stopped.value)
    assert message.startswith("19 of 20 trajectories of this step failed (ToolServerDied x 19)")
    assert "trainer.max_failed_fraction=0.5" in message and "Nothing was trained on them" in message


def test_below_the_bound_they_are_counted_by_kind():
    groups, values = collect(good=2, max_failed_fraction=0.5)
    assert groups == 10
    assert values["rollouts/failed"] == values["rollouts/failed/ToolServerDied"] == 10


@pytest.mark.parametrize("kind", [FailureKind.DEADLINE, "ToolServerDied"])
def test_episodes_beyond_deadline_are_a_warning(kind: str, caplog: pytest.LogCaptureFixture):
    _, values = collect(good=2, max_failed_fraction=0.5, kind=kind)
    assert values[f"rollouts/failed/{kind}"] == 10
    said = (
        "10 of 20 episodes exceeded trainer.timeouts.rollout_s and are masked" if kind == FailureKind.DEADLINE else kind
    )
    assert [said in record.message for record in caplog.records] == [True]
