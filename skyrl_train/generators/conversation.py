"""Episodes: a prompt's environment and an engine in conversation, kept as tokens."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Protocol

from skyrl_train.data.chat import render_prompt
from skyrl_train.data.trajectory import Message, Prompt, Trajectory, TrajectoryGroup, Turn
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.sampling import request_seed
from skyrl_train.environments.base import StepOutput
from skyrl_train.errors import DeadlineExceeded, EngineError, EnginesLost, EnvironmentFailure, UnsupportedParameter

log = logging.getLogger(__name__)


class Sampler(Protocol):
    """What a generator needs of the engines: an EngineClient, or the lockstep view of one."""

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]: ...

    def episode(self) -> AbstractAsyncContextManager[object]:
        """Entered for as long as an episode may still ask for tokens."""


class Episode(Protocol):
    """One environment instance, wherever it runs."""

    messages: list[Message]

    async def step(self, text: str) -> StepOutput: ...

    async def close(self) -> None: ...


class Environments(Protocol):
    """`environments.host.EnvironmentHost`."""

    async def start(self, env_class: str, prompt: Prompt) -> Episode: ...


@dataclass(frozen=True)
class RolloutSettings:
    """How one kind of rollout (training or evaluation) is made."""

    sampling: SamplingParams
    num_samples: int
    seed: int
    max_prompt_tokens: int
    deadline_s: float
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)


class ConversationGenerator:
    """`rollout` makes the n trajectories of one prompt. A failed episode is data (masked, counted), no exception."""

    def __init__(self, sampler: Sampler, environments: Environments, tokenizer: object, settings: RolloutSettings):
        self._sampler = sampler
        self._environments = environments
        self._tokenizer = tokenizer
        self._settings = settings

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """The group of `prompt`; `position` in the run's order makes its seeds differ from epoch to epoch.

        Its environments are closed when this returns, raises or is cancelled; the engines abort what they still sample.
        """
        temperature = self._settings.sampling.temperature
        rows = [_Row.empty(prompt, sample, temperature) for sample in range(self._settings.num_samples)]
        try:
            async with self._sampler.episode():
                await asyncio.gather(*(self._start(row) for row in rows))
                open_rows, completions = await self._sample([row for row in rows if row.episode is not None], position)
            await asyncio.gather(*(self._finish(row, done) for row, done in zip(open_rows, completions, strict=True)))
        finally:
            for row in rows:
                await row.close()
        return TrajectoryGroup(prompt, [row.trajectory for row in rows])

    async def _start(self, row: _Row) -> None:
        prompt = row.trajectory.prompt
        try:
            row.episode = await self._environments.start(prompt.env_class, prompt)
        except EnvironmentFailure as failure:
            row.fail(failure.kind, failure.detail)
            return
        kwargs = self._settings.chat_template_kwargs
        row.trajectory.prompt_ids = render_prompt(self._tokenizer, row.episode.messages, kwargs)
        if len(row.trajectory.prompt_ids) > self._settings.max_prompt_tokens:
            row.fail("prompt_too_long", f"{len(row.trajectory.prompt_ids)} tokens")
            await row.close()

    async def _sample(self, rows: list[_Row], position: int) -> tuple[list[_Row], list[Completion]]:
        """The rows that were answered, and their answers: all of them, or none where the engine lost them."""
        try:
            return rows, await self._sampler.generate([self._request(row, position) for row in rows]) if rows else []
        except (UnsupportedParameter, EnginesLost):
            raise  # the same for every request to come, not an accident of these
        except (EngineError, DeadlineExceeded) as error:
            log.warning("Rollouts of prompt %s are lost: %s", rows[0].trajectory.prompt.uid, error)
            for row in rows:
                row.fail("engine", str(error))
            return [], []

    def _request(self, row: _Row, position: int) -> SampleRequest:
        item, uid = row.trajectory, row.trajectory.prompt.uid
        return SampleRequest(
            request_id=f"{position}.{uid}.{item.sample}",
            token_ids=tuple(item.prompt_ids),
            sampling=self._settings.sampling,
            seed=request_seed(self._settings.seed, uid, item.sample, 0, position),
            session=f"{position}.{uid}.{item.sample}",
            group=f"{position}.{uid}",
            deadline_s=self._settings.deadline_s,
        )

    async def _finish(self, row: _Row, completion: Completion) -> None:
        assert row.episode is not None
        item = row.trajectory
        item.response_ids = list(completion.token_ids)
        item.loss_mask = [1] * len(completion.token_ids)
        item.logprobs = list(completion.full_logprobs)
        item.stop_reason = completion.stop_reason
        item.text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)  # type: ignore[attr-defined]
        item.messages = [*row.episode.messages, {"role": "assistant", "content": item.text}]
        versions = [span.version for span in completion.versions] or [0]
        reward = 0.0
        try:
            if completion.stop_reason == "abort":
                raise EnvironmentFailure("timeout", "the engine did not finish it in time")
            output = await row.episode.step(item.text)
            reward = item.reward = output.reward
            item.env_metrics = _numbers(output.metadata)
        except EnvironmentFailure as failure:
            row.fail(failure.kind, failure.detail)
        finally:
            await row.close()
        length = len(completion.token_ids)
        item.turns = [Turn(0, length, reward, completion.stop_reason, min(versions), max(versions))]


@dataclass(slots=True)
class _Row:
    """An episode under way and the trajectory it becomes."""

    trajectory: Trajectory
    episode: Episode | None = None

    @classmethod
    def empty(cls, prompt: Prompt, sample: int, temperature: float) -> _Row:
        # Greedy rollouts are scored at temperature 1: there is no such thing as a log-prob at 0.
        return cls(Trajectory(prompt, sample, [], [], [], [], [], 0.0, "abort", temperature or 1.0))

    async def close(self) -> None:
        """Once, whoever asks."""
        episode, self.episode = self.episode, None
        if episode is not None:
            await episode.close()

    def fail(self, kind: str, detail: str) -> None:
        self.trajectory.fail(kind, detail)


def _numbers(metadata: dict[str, object]) -> dict[str, float]:
    """What of an environment's metadata can be averaged."""
    return {key: float(value) for key, value in metadata.items() if isinstance(value, int | float)}
