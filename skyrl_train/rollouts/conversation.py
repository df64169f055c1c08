"""Episodes: a prompt's environment and an engine in conversation, kept as tokens."""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from skyrl_train.data.chat import encode_text, is_control, plain_text, render_continuation, render_prompt
from skyrl_train.data.trajectory import OK, Message, Prompt, Trajectory, TrajectoryGroup
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.sampling import request_seed
from skyrl_train.environments.base import StepOutput
from skyrl_train.errors import (
    DataError,
    DeadlineExceeded,
    EngineError,
    EnginesLost,
    EnvironmentFailure,
    UnsupportedParameter,
)
from skyrl_train.rollouts.ledger import Ledger
from skyrl_train.rollouts.rate_limit import RateLimiter

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
    """Of a whole conversation, before a turn of it is sampled."""
    deadline_s: float
    """For all turns of a group, from when its environments are open; a step of theirs has one of its own too."""
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    max_turns: int = 1
    one_message: bool = False
    """All turns are one message of the assistant, with the environment's words in it as plain text."""
    ends_stopped_turns: bool = True
    """Whether a turn that a stop string ended gets the token that ends a turn."""
    step_wise: bool = False
    """Whether the history may be rewritten between turns, which begins another sequence."""
    retokenize: bool = False
    """With step_wise: every turn reads the whole conversation rendered anew."""


class ConversationGenerator:
    """`rollout` makes the n trajectories of one prompt. A failed episode is data (masked, counted), no exception."""

    def __init__(
        self,
        sampler: Sampler,
        environments: Environments,
        tokenizer: object,
        settings: RolloutSettings,
        *,
        later_turns: Sampler | None = None,
        limiter: RateLimiter | None = None,
    ):
        """`sampler` has the first turn of a group in one call; `later_turns` (None: the same) every other turn."""
        self._sampler = sampler
        self._later_turns = later_turns or sampler
        self._environments = environments
        self._tokenizer: Any = tokenizer
        self._settings = settings
        self._limiter = limiter or RateLimiter()

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """The group of `prompt`; `position` in the run's order makes its seeds differ from epoch to epoch.

        Its environments are closed when this returns, raises or is cancelled; the engines abort what they still sample.
        """
        temperature = self._settings.sampling.temperature
        rows = [_Row.empty(prompt, sample, temperature) for sample in range(self._settings.num_samples)]
        await self._limiter.admit(len(rows))
        tasks: list[asyncio.Task[None]] = []
        try:
            async with self._sampler.episode():
                tasks += [asyncio.create_task(self._start(row)) for row in rows]
                await asyncio.gather(*tasks)
                began = asyncio.get_running_loop().time()
                first = await self._sample([row for row in rows if row.episode is not None], position, began)
                tasks += [asyncio.create_task(self._play(row, done, position, began)) for row, done in first]
                await asyncio.sleep(0)  # in this order each has become an episode of its own
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            try:  # where one has raised, others may still open environments or talk to them
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                for row in rows:
                    await row.close()
                self._limiter.release(len(rows))
        return TrajectoryGroup(prompt, [row.trajectory for row in rows])

    async def _start(self, row: _Row) -> None:
        prompt = row.trajectory.prompt
        row.max_turns = _max_turns(prompt, self._settings.max_turns)
        extras = {**prompt.env_extras, "max_turns": row.max_turns}
        try:
            row.episode = await self._environments.start(prompt.env_class, replace(prompt, env_extras=extras))
        except EnvironmentFailure as failure:
            row.trajectory.fail(failure.kind, failure.detail)
            return
        row.trajectory.messages = list(row.episode.messages)
        kwargs = self._settings.chat_template_kwargs
        row.ledger.open(render_prompt(self._tokenizer, row.episode.messages, kwargs))
        if len(row.trajectory.prompt_ids) > self._settings.max_prompt_tokens:
            row.trajectory.fail("prompt_too_long", f"{len(row.trajectory.prompt_ids)} tokens")
            await row.close()

    async def _play(self, row: _Row, completion: Completion, position: int, began: float) -> None:
        """From the first answer to the end of the episode, alone."""
        item = row.trajectory
        async with self._later_turns.episode():
            try:
                while await self._answered(row, completion) and self._goes_on(row):
                    sampled = await self._sample([row], position, began)
                    if not sampled:
                        break
                    completion = sampled[0][1]
            except EnvironmentFailure as failure:
                item.fail(failure.kind, failure.detail)
            finally:
                await row.close()
        if item.status == OK:
            item.reward = math.fsum(turn.reward for turn in item.turns)

    async def _answered(self, row: _Row, completion: Completion) -> bool:
        """Write a turn down and show it to the environment; whether that has more to say."""
        assert row.episode is not None
        item = row.trajectory
        row.ledger.sample(completion)
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        row.answers.append(len(item.messages))
        item.messages.append({"role": "assistant", "content": text})
        item.text = text if len(row.answers) == 1 else _transcript(item.messages[row.answers[0] :])
        if completion.stop_reason == "abort":
            raise EnvironmentFailure("timeout", "the engine did not finish it in time")
        output = await row.episode.step(text)
        row.ledger.reward(output.reward)
        item.env_metrics |= _numbers(output.metadata)
        row.by_stop_string = completion.stop_text in self._settings.sampling.stop
        item.messages += output.observations
        return not output.done and len(item.turns) < row.max_turns

    def _goes_on(self, row: _Row) -> bool:
        """Append what the model reads before its next turn; False where that makes the conversation too long."""
        item, ledger = row.trajectory, row.ledger
        try:
            told = self._told_in_message(row) if self._settings.one_message else self._told(row)
        except DataError as error:
            raise EnvironmentFailure("chat_template", str(error)) from error
        context = ledger.context
        kept = 0 if told.anew else len(context) - told.takes_back
        if kept + len(told.ids) > self._settings.max_prompt_tokens:
            item.stop_reason = "length"
            return False
        if told.takes_back:
            ledger.take_back()
        if told.anew:
            ledger.restart(told.ids)
        else:
            ledger.tell(told.ids)
        return True

    def _told(self, row: _Row) -> _Told:
        """A message a turn, as the chat template writes them."""
        settings, item, ledger = self._settings, row.trajectory, row.ledger
        kwargs, ids = settings.chat_template_kwargs, None
        if not settings.retokenize:
            ids = render_continuation(self._tokenizer, item.messages, row.answers, kwargs, verbatim=settings.step_wise)
        if ids is None and not settings.step_wise:
            detail = "the chat template wrote earlier turns anew: set generator.step_wise_trajectories=true"
            raise EnvironmentFailure("history_rewritten", detail)
        if ids is None:
            return _Told(render_prompt(self._tokenizer, item.messages, kwargs), anew=True)
        if ids and is_control(self._tokenizer, ids[0]):  # the end of the turn, which the model may have written itself
            stays_open = row.by_stop_string and not settings.ends_stopped_turns
            ids = ids[1:] if stays_open or ledger.last_sampled == ids[0] else ids
        return _Told(ids)

    def _told_in_message(self, row: _Row) -> _Told:
        """The environment's words as they are; an end that the model wrote would not be one any more."""
        item, last = row.trajectory, row.ledger.last_sampled
        texts = [plain_text(message) for message in item.messages[row.answers[-1] + 1 :]]
        ended = item.turns[-1].stop_reason == "stop" and last is not None and is_control(self._tokenizer, last)
        return _Told([id for text in texts for id in encode_text(self._tokenizer, text)], takes_back=ended)

    async def _sample(self, rows: list[_Row], position: int, began: float) -> list[tuple[_Row, Completion]]:
        """The rows and their answers: all of them, or none where the engine lost them."""
        if not rows:
            return []
        sampler = self._later_turns if rows[0].answers else self._sampler
        left = self._settings.deadline_s - (asyncio.get_running_loop().time() - began)
        try:
            if left <= 0:
                raise EnvironmentFailure("timeout", f"not done after {self._settings.deadline_s:g} s")
            completions = await sampler.generate([self._request(row, position, left) for row in rows])
            return list(zip(rows, completions, strict=True))
        except (UnsupportedParameter, EnginesLost):
            raise  # the same for every request to come, not an accident of these
        except (EngineError, DeadlineExceeded) as error:
            log.warning("Rollouts of prompt %s are lost: %s", rows[0].trajectory.prompt.uid, error)
            for row in rows:
                row.trajectory.fail("engine", str(error))
            return []

    def _request(self, row: _Row, position: int, deadline_s: float) -> SampleRequest:
        item, uid, turn = row.trajectory, row.trajectory.prompt.uid, len(row.answers)
        session = f"{position}.{uid}.{item.sample}"
        return SampleRequest(
            request_id=f"{session}.{turn}" if turn else session,
            token_ids=tuple(row.ledger.context),
            sampling=self._settings.sampling,
            seed=request_seed(self._settings.seed, uid, item.sample, turn, position),
            session=session,
            group=f"{position}.{uid}",
            deadline_s=deadline_s,
        )


@dataclass(slots=True)
class _Row:
    """An episode under way and the trajectory it becomes."""

    trajectory: Trajectory
    ledger: Ledger
    episode: Episode | None = None
    max_turns: int = 1
    answers: list[int] = field(default_factory=list)
    """Where in the trajectory's messages the model's are."""
    by_stop_string: bool = False
    """Whether one ended the last turn."""

    @classmethod
    def empty(cls, prompt: Prompt, sample: int, temperature: float) -> _Row:
        # Greedy rollouts are scored at temperature 1: there is no such thing as a log-prob at 0.
        trajectory = Trajectory(prompt, sample, [], [], [], [], [], 0.0, "abort", temperature or 1.0)
        return cls(trajectory, Ledger(trajectory))

    async def close(self) -> None:
        """Once, whoever asks."""
        episode, self.episode = self.episode, None
        if episode is not None:
            await episode.close()


@dataclass(frozen=True, slots=True)
class _Told:
    """What the model reads before its next turn."""

    ids: list[int]
    anew: bool = False
    """Instead of all that it has read and written so far."""
    takes_back: bool = False
    """Without the last token it wrote."""


def _max_turns(prompt: Prompt, most: int) -> int:
    """The run's bound, or the row's own where that is lower."""
    own = prompt.env_extras.get("max_turns")
    if own is None or (isinstance(own, float) and math.isnan(own)):  # how tables say that a row has none
        return most
    if isinstance(own, bool) or not isinstance(own, int | float) or own < 1 or own != int(own):
        raise DataError(f"row {prompt.uid}: max_turns={own!r} must be a whole number of at least 1, or null.")
    return min(int(own), most)


def _numbers(metadata: dict[str, object]) -> dict[str, float]:
    """What of an environment's metadata can be averaged: not what a model wrote of a thousand digits, or NaN."""
    found = {key: value for key, value in metadata.items() if isinstance(value, int | float)}
    return {key: float(value) for key, value in found.items() if abs(value) <= sys.float_info.max}


def _transcript(messages: Sequence[Message]) -> str:
    """A conversation for people."""
    return "\n".join(f"{message['role']}: {plain_text(message)}" for message in messages)
