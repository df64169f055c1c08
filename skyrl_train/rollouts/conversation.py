"""Episodes: conversations between an environment and an engine, recorded as tokens.

`ConversationGenerator.rollout` generates the group of a prompt. `TrajectoryBuilder` records an episode's tokens exactly
as the model read and sampled them, and `EpisodeLimiter` limits the number of concurrent episodes.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from skyrl_train.aio import EventLoopThrottle
from skyrl_train.clock import now
from skyrl_train.data.chat import (
    RenderedPrefix,
    decode_with_calls,
    detect_tool_format,
    encode_text,
    get_message_text,
    get_reasoning_opening,
    is_control_token,
    message_content,
    render_continuation,
    render_prompt,
)
from skyrl_train.data.dataset import parse_max_turns
from skyrl_train.data.messages import (
    Message,
    Prompt,
    append_assistant_text,
    continues_last_message,
    get_chat_template_kwargs,
)
from skyrl_train.data.reasoning import find_unclosed_marker
from skyrl_train.data.token_arrays import Tokens, append_array, to_logprob_array, to_token_array
from skyrl_train.data.tokenizer_executor import tokenizer_executor
from skyrl_train.data.trajectory import OK, Restart, Trajectory, TrajectoryGroup, Turn
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import BatchedEngineClient, EngineClient
from skyrl_train.engines.sampling_params import request_seed
from skyrl_train.environments.base import BAD_ROW
from skyrl_train.environments.pool import EnvironmentPool, Episode
from skyrl_train.errors import (
    DataError,
    DeadlineExceeded,
    EngineError,
    EnginesLost,
    EnvironmentFailure,
    UnsupportedParameter,
)
from skyrl_train.metrics import MetricNameLimit
from skyrl_train.terminal import escape_control_chars


class FailureKind(StrEnum):
    """Kinds of failed episodes that are no failure of an environment. Environments add other kinds.

    The values are part of metric names and of saved rollouts.
    """

    DEADLINE = "deadline"
    """An engine ended the episode at its deadline."""
    ENGINE = "engine"
    """The engine failed."""
    PROMPT_TOO_LONG = "prompt_too_long"
    HISTORY_REWRITTEN = "history_rewritten"
    """The chat template changed earlier turns."""
    CHAT_TEMPLATE = "chat_template"
    """The chat template cannot render the messages."""


_MIN_DEADLINE_S = 1e-3
MAX_METRICS, MAX_METRIC_LENGTH = 256, 128
"""Number of different metrics that environments may report in one run, and characters of a name."""
log = logging.getLogger(__name__)
GenerationClient = EngineClient | BatchedEngineClient


@dataclass(frozen=True)
class RolloutSettings:
    """The settings of rollouts for training or for evaluation."""

    sampling_params: SamplingParams
    n_samples_per_prompt: int
    seed: int
    max_input_length: int
    """Maximum number of tokens of the conversation before a turn is sampled."""
    rollout_s: float
    """Seconds that the turns of an episode may run in an engine's batch. Environment steps have separate limits."""
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    max_turns: int = 1
    use_conversation_multi_turn: bool = True
    """True if each turn is a separate message. Otherwise all turns form one assistant message, in which the
    environment's text is embedded without a chat template."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """True to append an end-of-turn token to a turn that ended at a stop string."""
    step_wise_trajectories: bool = False
    """True if the chat template may rewrite earlier turns. Each rewrite starts a new sequence."""
    retokenize_chat_history: bool = False
    """True to render and tokenize the full conversation again before each turn; needs `step_wise_trajectories`."""
    namespace: str = ""
    """Prefix of request ids, for rollouts that run concurrently with others of the same prompts."""
    n_samples_by_data_source: Mapping[str, int] = field(default_factory=dict)
    """Number of samples of prompts with these values of `data_source`, instead of `n_samples_per_prompt`."""

    def num_samples(self, prompt: Prompt) -> int:
        """Return the number of episodes of a prompt."""
        return self.n_samples_by_data_source.get(prompt.data_source, self.n_samples_per_prompt)


class ConversationGenerator:
    """Generates the trajectories of a prompt. A failed episode becomes a failed trajectory, not an exception."""

    def __init__(
        self,
        client: GenerationClient,
        environments: EnvironmentPool,
        tokenizer: Any,
        settings: RolloutSettings,
        *,
        later_turn_client: GenerationClient | None = None,
        limiter: EpisodeLimiter | None = None,
    ):
        """Create the generator.

        Args:
            client: Samples the first turns of a group in one call.
            environments: Runs the environments.
            tokenizer: The policy's tokenizer.
            settings: The settings of the rollouts.
            later_turn_client: Samples all other turns; None for `client`.
            limiter: Limits the number of concurrent episodes; None for no limit.
        """
        self._client = client
        self._later_turn_client = later_turn_client or client
        self._environments = environments
        self._tokenizer = tokenizer
        self._tokenizer_executor = tokenizer_executor(tokenizer)
        self._settings = settings
        self._limiter = limiter or EpisodeLimiter()
        self._metrics = EnvironmentMetrics()

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """Generate and score the group of a prompt.

        When the call ends, also by an error or cancellation, its environments are closed and its requests are aborted.

        Args:
            prompt: The prompt.
            position: Its position in the run's order of prompts, which makes seeds differ between epochs.

        Returns:
            The group with `num_samples(prompt)` trajectories. Episodes that failed have status `failed`.

        Raises:
            UnsupportedParameter: The engine does not support a sampling parameter.
            EnginesLost: No engine is left.
        """
        temperature = self._settings.sampling_params.temperature
        samples, states = self._settings.num_samples(prompt), list[_EpisodeState]()
        admitted = 0
        tasks: list[asyncio.Task[None]] = []
        try:
            async with self._client.episode():  # entered first: BatchedEngineClient waits for episodes that will start
                await self._limiter.admit(samples)
                admitted = samples
                states += [_EpisodeState.empty(prompt, sample, temperature) for sample in range(samples)]
                rendered: list[_RenderedPrompt] = []
                tasks += [asyncio.create_task(self._start(state, rendered)) for state in states]
                await asyncio.gather(*tasks)
                started = [state for state in states if state.session is not None]
                tasks += [
                    asyncio.create_task(self._run_episode(state, [completion], position))
                    for state, completion in await self._sample(started, position)
                ]
                await asyncio.sleep(0)  # lets every task enter its own `episode()`, in this order
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            try:  # if one episode has raised, others may still be starting or stepping their environments
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                for state in states:
                    await state.close()
                self._limiter.release(admitted)
        return TrajectoryGroup(prompt, [state.trajectory for state in states])

    async def _start(self, state: _EpisodeState, rendered: list[_RenderedPrompt]) -> None:
        """Start the environment of an episode and render its prompt. A failure is recorded in the trajectory.

        Args:
            state: The episode.
            rendered: The rendered prompts of this group so far, to which a new one is added. Most samples share one.
        """
        prompt = state.trajectory.prompt
        try:
            row_max_turns = parse_max_turns(f"row {prompt.uid}", prompt.env_extras)
            state.max_turns = min(row_max_turns or self._settings.max_turns, self._settings.max_turns)
            extras = {**prompt.env_extras, "max_turns": state.max_turns}
            state.session = await self._environments.start(prompt.env_class, replace(prompt, env_extras=extras))
        except DataError as error:  # rows of files are checked when they are loaded
            state.trajectory.fail(BAD_ROW, str(error))
            return
        except EnvironmentFailure as failure:
            state.trajectory.fail(failure.kind, failure.detail)
            return
        opening = state.session.messages
        state.trajectory.messages = list(opening)
        try:
            state.template_kwargs = get_chat_template_kwargs(prompt.env_extras, self._settings.chat_template_kwargs)
            shared = next((candidate for candidate in rendered if candidate.messages == opening), None)
            if shared is None:
                last = RenderedPrefix()
                ids = render_prompt(self._tokenizer, opening, state.template_kwargs, prefix=last)
                reasoning = "" if continues_last_message(opening) else get_reasoning_opening(self._tokenizer, ids)
                shared = _RenderedPrompt(opening, to_token_array(ids), last, reasoning)
                rendered.append(shared)
            state.builder.start_episode(shared.ids)
            state.last_rendered, state.reasoning_opening = copy.copy(shared.last), shared.reasoning_opening
        except DataError as error:  # from messages of the environment: those of the row are checked when it is loaded
            state.trajectory.fail(FailureKind.CHAT_TEMPLATE.value, str(error))
            await state.close()
            return
        if len(state.trajectory.prompt_ids) > self._settings.max_input_length:
            state.trajectory.fail(FailureKind.PROMPT_TOO_LONG.value, f"{len(state.trajectory.prompt_ids)} tokens")
            await state.close()

    async def _run_episode(self, state: _EpisodeState, sampled: list[Completion], position: int) -> None:
        """Run one episode from its first completion to its end, independently of the others.

        Args:
            state: The episode.
            sampled: A list with the completion. It is emptied, so that the completion's large arrays are freed early.
            position: The position of the prompt in the run's order.
        """
        item = state.trajectory
        async with self._later_turn_client.episode():
            try:
                while (
                    sampled
                    and await self._process_completion(state, sampled.pop())
                    and await self._append_next_prompt(state)
                ):
                    sampled = [completion for _, completion in await self._sample([state], position)]
            except EnvironmentFailure as failure:
                item.fail(failure.kind, failure.detail)
            finally:
                await state.close()
        item.text = state.response_text() or item.text  # a failure without a response has its detail in `text`
        if item.status == OK:
            item.reward = math.fsum(turn.reward for turn in item.turns)

    async def _process_completion(self, state: _EpisodeState, completion: Completion) -> bool:
        """Record a turn and step the environment with it. Return True if the episode continues."""
        assert state.session is not None
        item = state.trajectory
        state.builder.append_sample(completion)
        decoded, action = await self._tokenizer_executor.run(
            len(completion.token_ids), _decode_turn, completion.token_ids, state.template_kwargs
        )
        text = state.reasoning_opening + decoded  # shows readers of the text that it begins inside of reasoning
        state.reasoning_openings.append(state.reasoning_opening)
        if state.assistant_indices:
            item.messages.append({"role": "assistant", "content": text})
        else:  # continues the prompt if its last message is from the assistant
            item.messages = append_assistant_text(item.messages, text)
            text = str(item.messages[-1]["content"])
        state.assistant_indices.append(len(item.messages) - 1)
        state.running_s += completion.running_s
        state.ended_by_stop_string = completion.stop_text in self._settings.sampling_params.stop
        if completion.stop_reason == "abort":
            raise EnvironmentFailure(
                FailureKind.DEADLINE.value,
                f"its turns ran for {state.running_s:.3g} s in the engine and were not finished",
            )
        del completion  # frees it before the environment's step, which may take long
        started_at = now()
        try:
            output = await state.session.step(text.removesuffix(decoded) + action)
        finally:
            state.builder.update_last_turn(environment_s=now() - started_at)
        state.builder.update_last_turn(reward=output.reward, tool_calls=tuple(output.tool_calls))
        item.env_metrics |= self._metrics.select(output.metadata, item.prompt.env_class)
        item.messages += output.observations
        return not output.done and len(item.turns) < state.max_turns

    async def _append_next_prompt(self, state: _EpisodeState) -> bool:
        """Append the tokens before the model's next turn. Return False if the conversation becomes too long."""
        item, builder = state.trajectory, state.builder
        try:
            render = self._render_turn if self._settings.use_conversation_multi_turn else self._render_in_message
            rendered = await self._tokenizer_executor.run(self._size(state), render, state)
        except DataError as error:
            raise EnvironmentFailure(FailureKind.CHAT_TEMPLATE.value, str(error)) from error
        state.reasoning_opening = rendered.reasoning_opening
        context = builder.context
        num_kept = 0 if rendered.replaces_context else len(context) - rendered.drops_last_token
        if num_kept + len(rendered.ids) > self._settings.max_input_length:
            item.stop_reason = "length"
            return False
        if rendered.drops_last_token:
            builder.rollback()
        if rendered.replaces_context:
            builder.restart(rendered.ids)
        else:
            builder.append_prompt(rendered.ids)
        return True

    def _size(self, state: _EpisodeState) -> int:
        """Return an upper bound of the characters that are tokenized before the next turn."""
        renders_all = self._settings.retokenize_chat_history or self._settings.step_wise_trajectories
        start = 0 if renders_all else state.assistant_indices[-1] + 1
        return sum(len(get_message_text(message)) for message in state.trajectory.messages[start:])

    def _render_turn(self, tokenizer: Any, state: _EpisodeState) -> _RenderedTurn:
        """Render the next messages with the chat template, each turn as a separate message."""
        settings, item, builder = self._settings, state.trajectory, state.builder
        kwargs, ids = state.template_kwargs, None
        messages = _as_rendered(tokenizer, state) if settings.step_wise_trajectories else item.messages
        if not settings.retokenize_chat_history:
            ids = render_continuation(
                tokenizer,
                messages,
                state.assistant_indices,
                kwargs,
                verbatim=settings.step_wise_trajectories,
                prefix=state.last_rendered,
            )
        if ids is None and not settings.step_wise_trajectories:
            detail = "the chat template changed earlier turns: set generator.step_wise_trajectories=true"
            raise EnvironmentFailure(FailureKind.HISTORY_REWRITTEN.value, detail)
        if ids is None:
            ids = render_prompt(tokenizer, messages, kwargs, continue_final_message=False)
            return _RenderedTurn(ids, get_reasoning_opening(tokenizer, ids), replaces_context=True)
        if ids and is_control_token(tokenizer, ids[0]):  # the end-of-turn token, which the model may have sampled
            omits_end = state.ended_by_stop_string and not settings.append_eos_token_after_stop_str_in_multi_turn
            ids = ids[1:] if omits_end or builder.last_sampled == ids[0] else ids
        return _RenderedTurn(ids, get_reasoning_opening(tokenizer, ids))

    def _render_in_message(self, tokenizer: Any, state: _EpisodeState) -> _RenderedTurn:
        """Tokenize the environment's text without the chat template. The model's end-of-turn token is dropped."""
        item, last = state.trajectory, state.builder.last_sampled
        texts = [get_message_text(message) for message in item.messages[state.assistant_indices[-1] + 1 :]]
        ended = item.turns[-1].stop_reason == "stop" and last is not None and is_control_token(tokenizer, last)
        ids = [id for text in texts for id in encode_text(tokenizer, text)]
        return _RenderedTurn(
            ids, find_unclosed_marker(item.messages[state.assistant_indices[-1]]["content"]), drops_last_token=ended
        )

    async def _sample(self, states: list[_EpisodeState], position: int) -> list[tuple[_EpisodeState, Completion]]:
        """Sample the next turn of each episode and return the episodes with their completions.

        If the engine fails, marks all of them as failed and returns an empty list.
        """
        if not states:
            return []
        client = self._later_turn_client if states[0].assistant_indices else self._client
        try:
            completions = await client.generate([self._request(state, position) for state in states])
            return list(zip(states, completions, strict=True))
        except (UnsupportedParameter, EnginesLost):
            raise  # every later request would fail in the same way
        except (EngineError, DeadlineExceeded) as error:
            log.warning("Rollouts of prompt %s are lost: %s", states[0].trajectory.prompt.uid, error)
            for state in states:
                state.trajectory.fail(FailureKind.ENGINE.value, str(error))
            return []

    def _request(self, state: _EpisodeState, position: int) -> SampleRequest:
        item, uid, turn = state.trajectory, state.trajectory.prompt.uid, len(state.assistant_indices)
        namespace = self._settings.namespace
        session = f"{namespace}{position}.{uid}.{item.sample}"
        return SampleRequest(
            request_id=f"{session}.{turn}" if turn else session,
            token_ids=state.builder.context,
            sampling=self._settings.sampling_params,
            seed=request_seed(self._settings.seed, uid, item.sample, turn, position),
            session=session,
            group=f"{namespace}{position}.{uid}",
            deadline_s=max(self._settings.rollout_s - state.running_s, _MIN_DEADLINE_S),
            known_routing=state.builder.known_routing,
        )


@dataclass(frozen=True, slots=True)
class _RenderedPrompt:
    """The first messages of episodes of a group, and their rendered tokens."""

    messages: list[Message]
    ids: Tokens
    last: RenderedPrefix
    reasoning_opening: str
    """Start of the reasoning that the prompt already contains; see `_EpisodeState.reasoning_opening`."""


@dataclass(slots=True)
class _EpisodeState:
    """A running episode and its trajectory."""

    trajectory: Trajectory
    builder: TrajectoryBuilder
    session: Episode | None = None
    max_turns: int = 1
    assistant_indices: list[int] = field(default_factory=list)
    """Indices of the model's messages in the trajectory's messages."""
    reasoning_opening: str = ""
    """The end of the next prompt if it opens a block of reasoning, such as "<think>" and a line break; else ""."""
    reasoning_openings: list[str] = field(default_factory=list)
    """The `reasoning_opening` before each message in `assistant_indices`. The message's text begins with it."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    last_rendered: RenderedPrefix = field(default_factory=RenderedPrefix)
    ended_by_stop_string: bool = False
    """True if a stop string ended the last turn."""
    running_s: float = 0.0
    """Seconds that its turns have run in an engine's batch."""

    def response_text(self) -> str:
        """Return the model's response, or the conversation from its first to its last response if there are several."""
        messages, first, last = self.trajectory.messages, self.assistant_indices[0], self.assistant_indices[-1]
        if first == last:
            return str(messages[first]["content"])
        return "\n".join(f"{message['role']}: {get_message_text(message)}" for message in messages[first : last + 1])

    @classmethod
    def empty(cls, prompt: Prompt, sample: int, temperature: float) -> _EpisodeState:
        # Log-probs are undefined at temperature 0, so those of greedy rollouts are computed at temperature 1.
        trajectory = Trajectory.empty(prompt, sample, temperature or 1.0)
        return cls(trajectory, TrajectoryBuilder(trajectory))

    async def close(self) -> None:
        """Close the environment session. Does nothing if it is closed already."""
        session, self.session = self.session, None
        if session is not None:
            await session.close()


@dataclass(frozen=True, slots=True)
class _RenderedTurn:
    """The tokens that the model reads before its next turn."""

    ids: list[int]
    reasoning_opening: str
    """Start of the reasoning that the prompt already contains; see `_EpisodeState.reasoning_opening`."""
    replaces_context: bool = False
    """True if `ids` replace the full context instead of being appended to it."""
    drops_last_token: bool = False
    """True if the last sampled token is removed first."""


def _as_rendered(tokenizer: Any, state: _EpisodeState) -> list[Message]:
    """Return the conversation for the chat template, without the reasoning openings that its prompts contain."""
    messages = list(state.trajectory.messages)
    for index, opening in zip(state.assistant_indices, state.reasoning_openings, strict=True):
        content = message_content(tokenizer, str(messages[index]["content"]).removeprefix(opening), opening)
        messages[index] = {**messages[index], "content": content}
    return messages


def _decode_turn(tokenizer: Any, ids: Tokens, template_kwargs: dict[str, Any]) -> tuple[str, str]:
    """Return the text of a turn without control tokens, and the same text with those that mark tool calls."""
    return decode_with_calls(tokenizer, ids, detect_tool_format(tokenizer, template_kwargs))


class EnvironmentMetrics:
    """The metrics that environments report, of which a run records a limited number of names."""

    def __init__(self) -> None:
        self._names = MetricNameLimit(MAX_METRICS, MAX_METRIC_LENGTH)
        self._has_warned = False

    def select(self, metadata: Mapping[str, object], env_class: str) -> dict[str, float]:
        """Return the numbers in a step's metadata that become metrics; warn once about a name beyond the limits.

        Args:
            metadata: The metadata.
            env_class: Name of the environment, for the warning.
        """
        numbers = finite_numbers(metadata)
        metrics = {name: value for name, value in numbers.items() if self._names.admits(name)}
        if len(metrics) < len(numbers) and not self._has_warned:
            self._has_warned = True
            rejected = next(name for name in numbers if name not in metrics)
            log.warning(
                "environment %s: the metric %s is not recorded. A run records at most %d different names of metrics of "
                "environments, with at most %d characters. Use fixed names in `metadata`, and text for ids.",
                env_class,
                escape_control_chars(f"{rejected:.{MAX_METRIC_LENGTH}}"),
                MAX_METRICS,
                MAX_METRIC_LENGTH,
            )
        return metrics


def finite_numbers(metadata: Mapping[str, object]) -> dict[str, float]:
    """Return the numbers in an environment's metadata that can be averaged: finite ones within the range of float."""
    numbers = {key: value for key, value in metadata.items() if isinstance(value, int | float)}
    return {key: float(value) for key, value in numbers.items() if abs(value) <= sys.float_info.max}


# -- an episode as tokens ----------------------------------------------------------------------------------------------


class TrajectoryBuilder:
    """Builds a trajectory from tokens. Sampled tokens are in the loss, the environment's tokens are not.

    Sampled tokens are stored as they were sampled and never tokenized again.

    Example:
        start_episode([5, 6]), append_sample of [7, 2], append_prompt([9, 8]), append_sample of [3, 2] give response_ids
        [7, 2, 9, 8, 3, 2], with loss_spans and turns at [0, 2) and [4, 6).
    """

    def __init__(self, trajectory: Trajectory):
        """Write to `trajectory`, which has no response yet."""
        self._item = trajectory
        self._prompt_ids = trajectory.prompt_ids
        """The prompt of the current sequence."""
        self._start = 0
        """The index of the first response token of the current sequence."""

    def start_episode(self, prompt_ids: ArrayLike) -> None:
        """Set the prompt of the trajectory. Call it once, before anything is appended."""
        self._item.prompt_ids = self._prompt_ids = to_token_array(prompt_ids)

    @property
    def context(self) -> Tokens:
        """All tokens of the current sequence, which the model reads before its next turn."""
        return np.concatenate((self._prompt_ids, self._item.response_ids[self._start :]))

    def append_sample(self, completion: Completion) -> None:
        """Append a turn that the model sampled, with its log-probs, routing and weight versions, and reward 0.

        `update_last_turn` adds the reward and other results of the environment.
        """
        item, start = self._item, len(self._item.response_ids)
        self._append(completion.token_ids, completion.full_logprobs)
        item.stop_reason = completion.stop_reason
        self._append_routing(completion.routing)
        versions = [span.version for span in completion.versions] or [0]
        version_sum = sum((span.stop - span.start) * span.version for span in completion.versions)
        mean = version_sum / max(1, len(completion.token_ids))
        stop, reason = len(item.response_ids), completion.stop_reason
        if start < stop:
            item.loss_spans.append((start, stop))
        item.turns.append(Turn(start, stop, 0.0, reason, min(versions), max(versions), mean, completion.running_s))

    def _append_routing(self, routing: Any) -> None:
        """Append the experts of new tokens. Tokens of earlier turns keep the experts with which they were sampled."""
        if routing is None:
            return
        sequences, known = self._item.routing, self.known_routing
        while len(sequences) <= len(self._item.restarts):
            sequences.append(routing[:0])
        new = len(self.context) - 1 - known  # The last token has no experts yet.
        sequences[-1] = np.concatenate([sequences[-1], routing[max(0, len(routing) - new) :]])

    @property
    def known_routing(self) -> int:
        """Number of tokens at the start of the current sequence whose experts the trajectory has."""
        sequences = self._item.routing
        return len(sequences[-1]) if len(sequences) == len(self._item.restarts) + 1 else 0

    def update_last_turn(self, **fields: Any) -> None:
        """Set fields of the last `Turn`, such as the reward that the environment gave for it. A turn must exist."""
        self._item.turns[-1] = replace(self._item.turns[-1], **fields)

    @property
    def last_sampled(self) -> int | None:
        """The last token of the last turn; None if the turn is empty or something was appended to it."""
        last = self._item.turns[-1]
        return int(self._item.response_ids[-1]) if last.start < last.stop == len(self._item.response_ids) else None

    def append_prompt(self, ids: ArrayLike) -> None:
        """Append tokens that the model reads but did not sample. They are not in the loss."""
        tokens = to_token_array(ids)
        self._append(tokens, np.zeros(len(tokens), np.float32))

    def _append(self, ids: ArrayLike, logprobs: ArrayLike) -> None:
        item = self._item
        item.response_ids = append_array(item.response_ids, to_token_array(ids))
        item.logprobs = append_array(item.logprobs, to_logprob_array(logprobs))

    def rollback(self) -> None:
        """Remove the last sampled token, so that the message continues after an end-of-turn token.

        Call this before anything is appended after that token.
        """
        item, last = self._item, self._item.turns[-1]
        assert last.start < last.stop == len(item.response_ids), "something was appended after the last sampled token"
        item.response_ids, item.logprobs = item.response_ids[:-1], item.logprobs[:-1]
        item.turns[-1] = last = replace(last, stop=last.stop - 1)
        item.loss_spans[-1:] = [(last.start, last.stop)] if last.start < last.stop else []

    def restart(self, prompt_ids: ArrayLike) -> None:
        """Replace the context by `prompt_ids`.

        If they begin with the current context, they extend the current sequence; otherwise they start a new sequence.
        """
        context, ids = self.context, to_token_array(prompt_ids)
        if np.array_equal(ids[: len(context)], context):
            self.append_prompt(ids[len(context) :])
            return
        self._prompt_ids, self._start = ids, len(self._item.response_ids)
        self._item.restarts.append(Restart(self._start, ids))


# -- limits of concurrency ---------------------------------------------------------------------------------------------

_EPISODES_PER_ITERATION = 32
"""Episodes that start in one iteration of the event loop. Thousands would block everything else for too long."""


class EpisodeLimiter:
    """The limits of generator.rate_limit. Admits complete groups of episodes in the order of their calls."""

    def __init__(self, trajectories_per_second: float | None = None, max_concurrency: int | None = None):
        """Create a limiter. Without limits, admission does not depend on the clock.

        Args:
            trajectories_per_second: Maximum number of episodes that start per second; None for no limit.
            max_concurrency: Maximum number of running episodes, which only a single larger group may exceed; None for
                no limit.
        """
        self._seconds_each = 0.0 if trajectories_per_second is None else 1.0 / trajectories_per_second
        self._max_concurrency = max_concurrency
        self._running = 0
        self._next_start = 0.0
        self._admission_lock = asyncio.Lock()
        """Held by the next group to be admitted. Waiters are served in order, so a large group is never starved."""
        self._released = asyncio.Event()
        self._throttle = EventLoopThrottle(_EPISODES_PER_ITERATION)

    async def admit(self, episodes: int) -> None:
        """Wait until this many episodes may start. Each call that returns needs a matching `release`."""
        if self._max_concurrency is None and not self._seconds_each:
            await self._throttle(episodes)
            return
        async with self._admission_lock:
            while (
                self._max_concurrency is not None and self._running and self._running + episodes > self._max_concurrency
            ):
                self._released.clear()
                await self._released.wait()
            clock = asyncio.get_running_loop()
            await asyncio.sleep(self._next_start - clock.time())
            self._next_start = max(clock.time(), self._next_start) + episodes * self._seconds_each
            self._running += episodes

    def release(self, episodes: int) -> None:
        """Report that this many admitted episodes have ended."""
        self._running -= episodes
        self._released.set()
