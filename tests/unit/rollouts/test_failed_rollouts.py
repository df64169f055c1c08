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


class FailingEnvironments:
    """Environments whose episodes fail with `kind` in their second turn, except every `success_interval`-th."""

    def __init__(self, success_interval: int, kind: str):
        self.success_interval = success_interval
        self.kind = kind
        self.started = 0

    async def start(self, env_class: str, prompt: Prompt) -> FailingEpisode:
        self.started += 1
        succeeds = self.started % self.success_interval == 0
        return FailingEpisode(list(prompt.messages), None if succeeds else self.kind)


class FailingEpisode:
    def __init__(self, messages: list[Message], failure: str | None):
        self.messages = messages
        self.failure = failure
        self.turns = 0

    async def step(self, text: str) -> StepOutput:
        self.turns += 1
        if self.turns == 2 and self.failure:
            raise EnvironmentFailure(self.failure, "connection refused")
        return StepOutput([{"role": "user", "content": "again"}], 1.0, self.turns == 2)

    async def close(self) -> None: ...


def collect(
    success_interval: int, max_failed_fraction: float, kind: str = "ToolServerDied"
) -> tuple[int, dict[str, float]]:
    """Run a step of 10 prompts with 2 samples each; return the number of groups and the metrics."""
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(lambda request: [tokenizer.eos_token_id])
    settings = RolloutSettings(SamplingParams(9), 2, 3, max_input_length=500, rollout_s=60.0, max_turns=3)
    client, environments = EngineClient([engine], deadline_s=60.0), FailingEnvironments(success_interval, kind)
    generator = ConversationGenerator(client, environments, tokenizer, settings)  # type: ignore[arg-type]
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
    with pytest.raises(RolloutsFailed) as error_info:
        collect(success_interval=20, max_failed_fraction=0.5)
    message = str(error_info.value)
    assert message.startswith("19 of 20 trajectories of this step failed (ToolServerDied x 19)")
    assert "trainer.max_failed_fraction=0.5" in message and "Nothing was trained on them" in message


def test_tolerated_failures_are_counted_by_kind():
    groups, values = collect(success_interval=2, max_failed_fraction=0.5)
    assert groups == 10
    assert values["rollouts/failed"] == values["rollouts/failed/ToolServerDied"] == 10


@pytest.mark.parametrize("kind", [FailureKind.DEADLINE, "ToolServerDied"])
def test_episodes_beyond_deadline_are_a_warning(kind: str, caplog: pytest.LogCaptureFixture):
    _, values = collect(success_interval=2, max_failed_fraction=0.5, kind=kind)
    assert values[f"rollouts/failed/{kind}"] == 10
    warning = (
        "10 of 20 episodes exceeded trainer.timeouts.rollout_s and are masked" if kind == FailureKind.DEADLINE else kind
    )
    assert [warning in record.message for record in caplog.records] == [True]
