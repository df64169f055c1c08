from __future__ import annotations

import asyncio
import gc
from collections import Counter
from typing import Any

import numpy as np
import pytest

from skyrl_train.data.messages import Message, Prompt
from skyrl_train.data.trajectory import FAILED, OK, Trajectory
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams, VersionSpan
from skyrl_train.engines.client import BatchedEngineClient, EngineClient
from skyrl_train.environments.base import StepOutput
from skyrl_train.errors import EngineError, EnvironmentFailure
from skyrl_train.rollouts.conversation import (
    MAX_METRIC_LENGTH,
    MAX_METRICS,
    ConversationGenerator,
    RolloutSettings,
    TrajectoryBuilder,
)
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

TOKENIZER = byte_tokenizer()
PROMPT = Prompt("7", [{"role": "user", "content": "2 + 2?"}], "toy")


class ToyEpisode:
    """An episode whose reward is the length of the text, or that fails with the given kind."""

    def __init__(self, messages: list[Message], failure: str | None):
        self.messages = messages
        self.failure = failure
        self.closed = False

    async def step(self, text: str) -> StepOutput:
        if self.failure:
            raise EnvironmentFailure(self.failure)
        return StepOutput([], float(len(text)), True, {"length": len(text), "note": "not a number"})

    async def close(self) -> None:
        self.closed = True


class ToyEnvironments:
    def __init__(self, failures: list[str | None]):
        self.failures = iter(failures)
        self.episodes: list[ToyEpisode] = []

    async def start(self, env_class: str, prompt: Prompt) -> ToyEpisode:
        failure = next(self.failures, None)
        if failure == "start":
            raise EnvironmentFailure("ValueError", "no")
        self.episodes.append(ToyEpisode(prompt.messages, failure))
        return self.episodes[-1]


def generate(engine: ScriptedEngine, environments: ToyEnvironments, samples: int = 3, **options: Any):  # type: ignore[no-untyped-def]
    position = options.pop("position", 11)
    settings = RolloutSettings(
        sampling_params=SamplingParams(max_tokens=5, temperature=options.pop("temperature", 0.7)),
        n_samples_per_prompt=samples,
        seed=3,
        max_input_length=options.pop("max_input_length", 100),
        rollout_s=10.0,
        n_samples_by_data_source=options.pop("by_source", {}),
    )
    client = EngineClient([engine], deadline_s=10.0)
    generator = ConversationGenerator(BatchedEngineClient(client), environments, TOKENIZER, settings)  # type: ignore[arg-type]
    return asyncio.run(generator.rollout(PROMPT, position=position))


def answer(request: SampleRequest) -> list[int]:
    return [*TOKENIZER("ab")["input_ids"], TOKENIZER.eos_token_id]


def test_trained_ids_are_the_sampled_ids():
    environments = ToyEnvironments([])
    group = generate(ScriptedEngine(answer), environments)
    rendered = TOKENIZER.apply_chat_template(PROMPT.messages, add_generation_prompt=True, return_dict=False)
    for number, row in enumerate(group.trajectories):
        assert (row.status, row.sample, row.text) == (OK, number, "ab")
        assert row.prompt_ids.tolist() == rendered
        assert row.response_ids.tolist() == answer(None)  # type: ignore[arg-type]
        assert row.loss_mask.tolist() == [1, 1, 1]
        assert row.logprobs.tolist() == [-1.0, -1.0, -1.0]
        assert row.reward == 2.0
        assert row.env_metrics == {"length": 2.0}
        assert row.temperature == 0.7
    assert all(episode.closed for episode in environments.episodes)


def test_data_source_decides_number_of_samples():
    by_source = {PROMPT.data_source: 2, "other": 7}
    group = generate(ScriptedEngine(answer), ToyEnvironments([]), samples=3, by_source=by_source)
    assert [row.sample for row in group.trajectories] == [0, 1]


@pytest.mark.defect("unbounded-environment-metrics")
def test_names_of_environment_metrics_are_limited(caplog: pytest.LogCaptureFixture):
    class NamingEpisode(ToyEpisode):
        async def step(self, text: str) -> StepOutput:
            names = ["turns", "x" * (MAX_METRIC_LENGTH + 1), *(f"{id(self)}/{number}" for number in range(100))]
            return StepOutput([], 1.0, True, dict.fromkeys(names, 1))

    class NamingEnvironments(ToyEnvironments):
        async def start(self, env_class: str, prompt: Prompt) -> ToyEpisode:
            self.episodes.append(NamingEpisode(prompt.messages, None))
            return self.episodes[-1]

    rows = generate(ScriptedEngine(answer), NamingEnvironments([]), samples=5).trajectories
    names = {name for row in rows for name in row.env_metrics}
    assert len(names) == MAX_METRICS and max(map(len, names)) <= MAX_METRIC_LENGTH
    assert all(row.env_metrics["turns"] == 1.0 and row.status == OK for row in rows)
    assert caplog.text.count("is not recorded. A run records at most") == 1


def test_messages_are_opening_and_answer():
    class SystemMessageEnvironments(ToyEnvironments):
        async def start(self, env_class: str, prompt: Prompt) -> ToyEpisode:
            episode = await super().start(env_class, prompt)
            episode.messages = [{"role": "system", "content": "be brief"}, *prompt.messages]
            return episode

    (row,) = generate(ScriptedEngine(answer), SystemMessageEnvironments([]), samples=1).trajectories
    assert [message["content"] for message in row.messages] == ["be brief", "2 + 2?", "ab"]
    assert row.messages[-1]["role"] == "assistant"


def test_group_is_one_call_with_distinct_seeds():
    engine = ScriptedEngine(answer)
    generate(engine, ToyEnvironments([]))
    (requests,) = engine.batches
    assert len({request.seed for request in requests}) == 3
    assert len({request.group for request in requests}) == 1
    assert len({tuple(request.token_ids) for request in requests}) == 1


@pytest.mark.fault("F11")
def test_failed_episode_is_masked_alone():
    group = generate(ScriptedEngine(answer), ToyEnvironments([None, "bad_reward", "start"]))
    assert [(row.status, row.error) for row in group.trajectories] == [
        (OK, None),
        (FAILED, "bad_reward"),
        (FAILED, "ValueError"),
    ]
    assert group.trajectories[1].reward == 0.0
    assert group.trajectories[1].response_ids.tolist() == answer(None)  # type: ignore[arg-type]


def test_dead_engine_fails_only_the_group():
    engine = ScriptedEngine(answer, failures={"generate": EngineError("gone")})
    group = generate(engine, ToyEnvironments([]))
    assert {(row.status, row.error) for row in group.trajectories} == {(FAILED, "engine")}


def test_dead_engine_closes_the_environments():
    environments = ToyEnvironments([])
    generate(ScriptedEngine(answer, failures={"generate": EngineError("gone")}), environments)
    assert [episode.closed for episode in environments.episodes] == [True] * 3


def test_canceled_rollout_aborts_requests_and_closes_environments():
    engine, environments = ScriptedEngine(answer, delay_s=3600), ToyEnvironments([])

    async def cancel() -> None:
        client = EngineClient([engine], deadline_s=10.0)
        settings = RolloutSettings(SamplingParams(max_tokens=5), 3, seed=3, max_input_length=100, rollout_s=10.0)
        task = asyncio.create_task(ConversationGenerator(client, environments, TOKENIZER, settings).rollout(PROMPT, 11))  # type: ignore[arg-type]
        while not engine.batches:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(0)
        assert (await engine.health()).running == 0

    asyncio.run(cancel())
    assert "abort" in engine.calls
    assert [episode.closed for episode in environments.episodes] == [True] * 3


def test_too_long_prompt_is_not_sampled():
    engine = ScriptedEngine(answer)
    group = generate(engine, ToyEnvironments([]), max_input_length=5)
    assert {row.error for row in group.trajectories} == {"prompt_too_long"}
    assert engine.batches == []


def test_greedy_rollouts_have_temperature_one():
    group = generate(ScriptedEngine(answer), ToyEnvironments([]), temperature=0.0)
    assert group.trajectories[0].temperature == 1.0


@pytest.mark.fault("F15")
def test_empty_completion_has_no_loss_tokens():
    group = generate(ScriptedEngine(lambda request: []), ToyEnvironments([]))
    assert group.trajectories[0].loss_mask.tolist() == []
    assert group.trajectories[0].status == OK


def test_many_groups_start_over_several_loop_iterations():
    started: Counter[int] = Counter()

    class CountingEnvironments(ToyEnvironments):
        async def start(self, env_class: str, prompt: Prompt) -> ToyEpisode:
            started[iteration] += 1
            return await super().start(env_class, prompt)

    iteration = 0

    async def run() -> None:
        nonlocal iteration
        client = EngineClient([ScriptedEngine(answer)], deadline_s=10.0)
        settings = RolloutSettings(SamplingParams(max_tokens=5), 3, seed=3, max_input_length=100, rollout_s=10.0)
        generator = ConversationGenerator(client, CountingEnvironments([]), TOKENIZER, settings)  # type: ignore[arg-type]
        rollouts = [asyncio.ensure_future(generator.rollout(PROMPT, position)) for position in range(200)]
        while not all(rollout.done() for rollout in rollouts):
            iteration += 1
            await asyncio.sleep(0)
        assert [rollout.result().prompt for rollout in rollouts] == [PROMPT] * 200

    asyncio.run(run())
    assert started.total() == 600 and max(started.values()) <= 32


def test_completion_is_freed_before_the_environment_step():
    num_completions: list[int] = []

    class CountingEpisode(ToyEpisode):
        async def step(self, text: str) -> StepOutput:
            await asyncio.sleep(0.01)  # all episodes of the group are in their step by then
            num_completions.append(sum(type(item) is Completion for item in gc.get_objects()))
            return await super().step(text)

    class Environments(ToyEnvironments):
        async def start(self, env_class: str, prompt: Prompt) -> ToyEpisode:
            return CountingEpisode(prompt.messages, None)

    gc.collect()
    before = sum(type(item) is Completion for item in gc.get_objects())
    group = generate(ScriptedEngine(answer), Environments([]))
    assert [item.reward for item in group.trajectories] == [2.0] * 3
    assert num_completions == [before] * 3


def test_turn_across_sync_reports_both_versions():
    item = Trajectory.empty(PROMPT, 0, 1.0)
    builder = TrajectoryBuilder(item)
    builder.start_episode([1, 2])
    logprobs = np.zeros(5, dtype=np.float32)
    spans = [VersionSpan(0, 2, 3), VersionSpan(2, 5, 4)]
    builder.append_sample(Completion("r", np.arange(5, dtype=np.int32), logprobs, logprobs, "stop", spans))
    (turn,) = item.turns
    assert (turn.min_version, turn.max_version, turn.mean_version) == (3, 4, (2 * 3 + 3 * 4) / 5)


def test_seeds_differ_between_epochs():
    seeds = []
    for position in (11, 12):
        engine = ScriptedEngine(answer)
        generate(engine, ToyEnvironments([]), position=position)
        seeds.append({request.seed for request in engine.batches[0]})
    assert len(seeds[0] | seeds[1]) == 6
