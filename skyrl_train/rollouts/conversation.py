"""Episodes: conversations between an environment and an engine, recorded as tokens.

`ConversationGenerator.rollout` makes the group of a prompt. `Ledger` records an episode's tokens exactly as the model
read and sampled them, `EpisodeLimiter` bounds how many run at a time, and `Tokenizing` keeps the tokenizer's work from
holding up the event loop.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import math
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary, ref

import numpy as np
from numpy.typing import ArrayLike

from skyrl_train.aio import EventLoopThrottle, mark_exception_retrieved
from skyrl_train.clock import now
from skyrl_train.data.chat import (
    RenderedPrefix,
    decode_response,
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
from skyrl_train.data.trajectory import OK, Restart, Trajectory, TrajectoryGroup, Turn
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import BatchedEngineClient, EngineClient
from skyrl_train.engines.sampling_params import request_seed
from skyrl_train.environments.base import BAD_ROW, StepOutput
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

DEADLINE_KIND = "deadline"
"""The kind of failure of an episode that an engine ended at its deadline."""
_MIN_DEADLINE_S = 1e-3
MAX_METRICS, MAX_METRIC_LENGTH = 256, 128
"""Names of numbers that environments may report in one run, and characters of a name."""
log = logging.getLogger(__name__)
GenerationClient = EngineClient | BatchedEngineClient


@dataclass(frozen=True)
class RolloutSettings:
    """The settings of one kind of rollouts: those for training, or those for evaluation."""

    sampling_params: SamplingParams
    n_samples_per_prompt: int
    seed: int
    max_input_length: int
    """Limit for the whole conversation before each turn is sampled."""
    rollout_s: float
    """For all turns of an episode while they run in an engine's batch. Environment steps have their own."""
    chat_template_kwargs: dict[str, object] = field(default_factory=dict)
    max_turns: int = 1
    use_conversation_multi_turn: bool = True
    """Whether every turn is a message of its own; else all turns form one message of the assistant, in which the
    environment's text is embedded as it is."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """Whether an end-of-turn token is appended to a turn that ended at a stop string."""
    step_wise_trajectories: bool = False
    """Whether the chat template may rewrite earlier turns, which begins a new sequence."""
    retokenize_chat_history: bool = False
    """With step_wise_trajectories: before every turn the whole conversation is rendered and tokenised again."""
    namespace: str = ""
    """What the ids of its requests begin with, where others of the same prompts may be under way."""


class ConversationGenerator:
    """Makes the n trajectories of one prompt. A failed episode is data (masked and counted), not an exception."""

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
        """`sampler` gets the first turns of a group in one call; `later_turns` (None: the same) all other turns."""
        self._client = client
        self._later_turn_client = later_turn_client or client
        self._environments = environments
        self._tokenizer = tokenizer
        self._tokenizer_executor = tokenizer_executor(tokenizer)
        self._settings = settings
        self._limiter = limiter or EpisodeLimiter()
        self._metric_names = MetricNameLimit(MAX_METRICS, MAX_METRIC_LENGTH)
        self._refused_metric = False

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """Make the group of `prompt`; its `position` in the run's order makes seeds differ between epochs.

        When this returns, raises or is cancelled, its environments are closed, and the engines abort its requests.
        """
        temperature = self._settings.sampling_params.temperature
        samples, states = self._settings.n_samples_per_prompt, list[_EpisodeState]()
        admitted = 0
        tasks: list[asyncio.Task[None]] = []
        try:
            async with self._client.episode():  # first, so that a Lockstep waits for those that have not begun yet
                await self._limiter.admit(samples)
                admitted = samples
                states += [_EpisodeState.empty(prompt, sample, temperature) for sample in range(samples)]
                rendered: list[_RenderedPrompt] = []
                tasks += [asyncio.create_task(self._start(state, rendered)) for state in states]
                await asyncio.gather(*tasks)
                opened = [state for state in states if state.session is not None]
                tasks += [
                    asyncio.create_task(self._run_episode(state, [done], position))
                    for state, done in await self._sample(opened, position)
                ]
                await asyncio.sleep(0)  # lets every task enter its own `episode()`, in this order
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            try:  # if one has raised, others may still be starting environments or be in a step of theirs
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                for state in states:
                    await state.close()
                self._limiter.release(admitted)
        return TrajectoryGroup(prompt, [state.trajectory for state in states])

    async def _start(self, state: _EpisodeState, rendered: list[_RenderedPrompt]) -> None:
        """`rendered`: the openings of this group so far, and their tokens; most samples have the same one."""
        prompt = state.trajectory.prompt
        try:
            own = parse_max_turns(f"row {prompt.uid}", prompt.env_extras)
            state.max_turns = self._settings.max_turns if own is None else min(own, self._settings.max_turns)
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
            same = next((one for one in rendered if one.messages == opening), None)
            if same is None:
                last = RenderedPrefix()
                ids = render_prompt(self._tokenizer, opening, state.template_kwargs, prefix=last)
                opened = "" if continues_last_message(opening) else get_reasoning_opening(self._tokenizer, ids)
                same = _RenderedPrompt(opening, to_token_array(ids), last, opened)
                rendered.append(same)
            state.builder.start_episode(same.ids)
            state.last_rendered, state.reasoning_opening = copy.copy(same.last), same.reasoning_opening
        except DataError as error:  # the row's own messages were rendered when it was loaded
            state.trajectory.fail("chat_template", str(error))
            await state.close()
            return
        if len(state.trajectory.prompt_ids) > self._settings.max_input_length:
            state.trajectory.fail("prompt_too_long", f"{len(state.trajectory.prompt_ids)} tokens")
            await state.close()

    async def _run_episode(self, state: _EpisodeState, sampled: list[Completion], position: int) -> None:
        """Run one episode from its first completion to its end, independently of the others.

        `sampled` has one completion, which is let go of as soon as the ledger has it: its arrays are as large.
        """
        item = state.trajectory
        async with self._later_turn_client.episode():
            try:
                while (
                    sampled
                    and await self._process_completion(state, sampled.pop())
                    and await self._append_next_prompt(state)
                ):
                    sampled = [done for _, done in await self._sample([state], position)]
            except EnvironmentFailure as failure:
                item.fail(failure.kind, failure.detail)
            finally:
                await state.close()
        item.text = state.response_text() or item.text  # a failure that answered with nothing has its detail there
        if item.status == OK:
            item.reward = math.fsum(turn.reward for turn in item.turns)

    async def _process_completion(self, state: _EpisodeState, completion: Completion) -> bool:
        """Record a turn and give it to the environment; returns whether the episode continues."""
        assert state.session is not None
        item = state.trajectory
        state.builder.append_sample(completion)
        text = await self._tokenizer_executor.run(len(completion.token_ids), decode_response, completion.token_ids)
        text = state.reasoning_opening + text  # so that who reads the text alone knows that it begins within reasoning
        state.reasoning_openings.append(state.reasoning_opening)
        if state.assistant_indices:
            item.messages.append({"role": "assistant", "content": text})
        else:  # an opening that ends with a message of the assistant is continued
            item.messages = append_assistant_text(item.messages, text)
            text = str(item.messages[-1]["content"])
        state.assistant_indices.append(len(item.messages) - 1)
        state.running_s += completion.running_s
        state.ended_by_stop_string = completion.stop_text in self._settings.sampling_params.stop
        if completion.stop_reason == "abort":
            raise EnvironmentFailure(
                DEADLINE_KIND, f"its turns ran for {state.running_s:.3g} s in the engine without an end"
            )
        del completion  # the environment may take its time
        begun = now()
        try:
            output = await state.session.step(text)
        finally:
            state.builder.update_last_turn(environment_s=now() - begun)
        state.builder.update_last_turn(reward=output.reward, tool_calls=tuple(output.tool_calls))
        item.env_metrics |= self._metrics(output, item.prompt.env_class)
        item.messages += output.observations
        return not output.done and len(item.turns) < state.max_turns

    def _metrics(self, output: StepOutput, env_class: str) -> dict[str, float]:
        """Return the numbers of a step that become metrics; warn once about a name beyond the limits."""
        numbers = _numbers(output.metadata)
        found = {name: value for name, value in numbers.items() if self._metric_names.admits(name)}
        if len(found) < len(numbers) and not self._refused_metric:
            self._refused_metric = True
            refused = next(name for name in numbers if name not in found)
            log.warning(
                "environment %s: its number %s is not recorded, nor others like it: a run records at most %d names of "
                "environments' numbers, of at most %d characters. Use fixed names in `metadata`, and text for ids.",
                env_class,
                escape_control_chars(f"{refused:.{MAX_METRIC_LENGTH}}"),
                MAX_METRICS,
                MAX_METRIC_LENGTH,
            )
        return found

    async def _append_next_prompt(self, state: _EpisodeState) -> bool:
        """Append what the model reads before its next turn; False if that makes the conversation too long."""
        item, ledger = state.trajectory, state.builder
        try:
            render = self._render_turn if self._settings.use_conversation_multi_turn else self._render_in_message
            rendered = await self._tokenizer_executor.run(self._size(state), render, state)
        except DataError as error:
            raise EnvironmentFailure("chat_template", str(error)) from error
        state.reasoning_opening = rendered.reasoning_opening
        context = ledger.context
        kept = 0 if rendered.replaces_context else len(context) - rendered.drops_last_token
        if kept + len(rendered.ids) > self._settings.max_input_length:
            item.stop_reason = "length"
            return False
        if rendered.drops_last_token:
            ledger.rollback()
        if rendered.replaces_context:
            ledger.restart(rendered.ids)
        else:
            ledger.append_prompt(rendered.ids)
        return True

    def _size(self, state: _EpisodeState) -> int:
        """How many characters are encoded before the next turn, at most."""
        whole = self._settings.retokenize_chat_history or self._settings.step_wise_trajectories
        begin = 0 if whole else state.assistant_indices[-1] + 1
        return sum(len(get_message_text(message)) for message in state.trajectory.messages[begin:])

    def _render_turn(self, tokenizer: Any, state: _EpisodeState) -> _RenderedTurn:
        """Render every turn as a message of its own, with the chat template."""
        settings, item, ledger = self._settings, state.trajectory, state.builder
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
            detail = "the chat template wrote earlier turns anew: set generator.step_wise_trajectories=true"
            raise EnvironmentFailure("history_rewritten", detail)
        if ids is None:
            ids = render_prompt(tokenizer, messages, kwargs, continue_final_message=False)
            return _RenderedTurn(ids, get_reasoning_opening(tokenizer, ids), replaces_context=True)
        if ids and is_control_token(tokenizer, ids[0]):  # the end of the turn, which the model may have written itself
            stays_open = state.ended_by_stop_string and not settings.append_eos_token_after_stop_str_in_multi_turn
            ids = ids[1:] if stays_open or ledger.last_sampled == ids[0] else ids
        return _RenderedTurn(ids, get_reasoning_opening(tokenizer, ids))

    def _render_in_message(self, tokenizer: Any, state: _EpisodeState) -> _RenderedTurn:
        """Render the environment's text as it is; an end-of-turn token of the model is dropped, as the turn goes on."""
        item, last = state.trajectory, state.builder.last_sampled
        texts = [get_message_text(message) for message in item.messages[state.assistant_indices[-1] + 1 :]]
        ended = item.turns[-1].stop_reason == "stop" and last is not None and is_control_token(tokenizer, last)
        ids = [id for text in texts for id in encode_text(tokenizer, text)]
        return _RenderedTurn(
            ids, find_unclosed_marker(item.messages[state.assistant_indices[-1]]["content"]), drops_last_token=ended
        )

    async def _sample(self, states: list[_EpisodeState], position: int) -> list[tuple[_EpisodeState, Completion]]:
        """The episodes with their completions: all of them, or none if the engine failed."""
        if not states:
            return []
        sampler = self._later_turn_client if states[0].assistant_indices else self._client
        try:
            completions = await sampler.generate([self._request(state, position) for state in states])
            return list(zip(states, completions, strict=True))
        except (UnsupportedParameter, EnginesLost):
            raise  # every later request would fail in the same way
        except (EngineError, DeadlineExceeded) as error:
            log.warning("Rollouts of prompt %s are lost: %s", states[0].trajectory.prompt.uid, error)
            for state in states:
                state.trajectory.fail("engine", str(error))
            return []

    def _request(self, state: _EpisodeState, position: int) -> SampleRequest:
        item, uid, turn = state.trajectory, state.trajectory.prompt.uid, len(state.assistant_indices)
        space = self._settings.namespace
        session = f"{space}{position}.{uid}.{item.sample}"
        return SampleRequest(
            request_id=f"{session}.{turn}" if turn else session,
            token_ids=state.builder.context,
            sampling=self._settings.sampling_params,
            seed=request_seed(self._settings.seed, uid, item.sample, turn, position),
            session=session,
            group=f"{space}{position}.{uid}",
            deadline_s=max(self._settings.rollout_s - state.running_s, _MIN_DEADLINE_S),
        )


@dataclass(frozen=True, slots=True)
class _RenderedPrompt:
    """The messages with which episodes of a group begin, as rendered."""

    messages: list[Message]
    ids: Tokens
    last: RenderedPrefix
    reasoning_opening: str
    """See `_EpisodeState.opened`."""


@dataclass(slots=True)
class _EpisodeState:
    """A running episode and the trajectory that it becomes."""

    trajectory: Trajectory
    builder: TrajectoryBuilder
    session: Episode | None = None
    max_turns: int = 1
    assistant_indices: list[int] = field(default_factory=list)
    """Indices of the model's messages in the trajectory's messages."""
    reasoning_opening: str = ""
    """The end of what the model reads next if it opens a block of reasoning, such as "<think>" and a line break."""
    reasoning_openings: list[str] = field(default_factory=list)
    """For each of `answers`: `opened` before it, with which its text begins."""
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    last_rendered: RenderedPrefix = field(default_factory=RenderedPrefix)
    ended_by_stop_string: bool = False
    """Whether a stop string ended the last turn."""
    running_s: float = 0.0
    """Seconds that its turns have run in an engine's batch."""

    def response_text(self) -> str:
        """What the model said: its answer, or the conversation from its first answer to its last."""
        messages, first, last = self.trajectory.messages, self.assistant_indices[0], self.assistant_indices[-1]
        if first == last:
            return str(messages[first]["content"])
        return "\n".join(f"{message['role']}: {get_message_text(message)}" for message in messages[first : last + 1])

    @classmethod
    def empty(cls, prompt: Prompt, sample: int, temperature: float) -> _EpisodeState:
        # Greedy rollouts are scored at temperature 1: there is no such thing as a log-prob at 0.
        trajectory = Trajectory.empty(prompt, sample, temperature or 1.0)
        return cls(trajectory, TrajectoryBuilder(trajectory))

    async def close(self) -> None:
        """Close the environment session, if that has not been done yet."""
        session, self.session = self.session, None
        if session is not None:
            await session.close()


@dataclass(frozen=True, slots=True)
class _RenderedTurn:
    """The tokens that the model reads before its next turn."""

    ids: list[int]
    reasoning_opening: str
    """See `_EpisodeState.opened`."""
    replaces_context: bool = False
    """Whether `ids` replace the whole context instead of being appended to it."""
    drops_last_token: bool = False
    """Whether the last token that the model sampled is removed first."""


def _as_rendered(tokenizer: Any, state: _EpisodeState) -> list[Message]:
    """The conversation as a chat template takes it: the model's messages without what their prompts opened."""
    messages = list(state.trajectory.messages)
    for place, opened in zip(state.assistant_indices, state.reasoning_openings, strict=True):
        content = message_content(tokenizer, str(messages[place]["content"]).removeprefix(opened), opened)
        messages[place] = {**messages[place], "content": content}
    return messages


def _numbers(metadata: dict[str, object]) -> dict[str, float]:
    """The numbers in an environment's metadata that can be averaged: not NaN, nor integers too large for a float."""
    found = {key: value for key, value in metadata.items() if isinstance(value, int | float)}
    return {key: float(value) for key, value in found.items() if abs(value) <= sys.float_info.max}


# -- an episode as tokens ----------------------------------------------------------------------------------------------


class TrajectoryBuilder:
    """Writes a trajectory's tokens: sampled tokens are in the loss, the environment's tokens are not.

    `context` is what the model reads next. Sampled tokens stay as they were sampled: nothing is tokenised again.

    Example: open([5, 6]), sampled 7 2, tell([9, 8]), sampled 3 2: response_ids [7, 2, 9, 8, 3, 2], loss_spans and turns
    [0, 2) and [4, 6).
    """

    def __init__(self, trajectory: Trajectory):
        self._item = trajectory
        self._prompt_ids = trajectory.prompt_ids
        """The prompt of the current sequence ..."""
        self._start = 0
        """... and the index of the first response token that follows it."""

    def start_episode(self, prompt_ids: ArrayLike) -> None:
        """Begin the episode with its prompt."""
        self._item.prompt_ids = self._prompt_ids = to_token_array(prompt_ids)

    @property
    def context(self) -> Tokens:
        """All tokens of the current sequence: what the model reads next."""
        return np.concatenate((self._prompt_ids, self._item.response_ids[self._start :]))

    def append_sample(self, completion: Completion) -> None:
        """Append a turn of the model; what comes of it is told later, by `note`."""
        item, start = self._item, len(self._item.response_ids)
        self._append(completion.token_ids, completion.full_logprobs)
        item.stop_reason = completion.stop_reason
        self._route(completion.routing)
        versions = [span.version for span in completion.versions] or [0]
        counted = sum((span.stop - span.start) * span.version for span in completion.versions)
        mean = counted / max(1, len(completion.token_ids))
        stop, reason = len(item.response_ids), completion.stop_reason
        if start < stop:
            item.loss_spans.append((start, stop))
        item.turns.append(Turn(start, stop, 0.0, reason, min(versions), max(versions), mean, completion.running_s))

    def _route(self, routing: Any) -> None:
        """Note where tokens went: those of earlier turns stay as they were when they were sampled."""
        if routing is None:
            return
        sequences = self._item.routing
        while len(sequences) <= len(self._item.restarts):
            sequences.append(routing[:0])
        known = len(sequences[-1])
        sequences[-1] = np.concatenate([sequences[-1], routing[known:]])

    def update_last_turn(self, **known: Any) -> None:
        """Set fields of the last turn: what the environment made of it."""
        self._item.turns[-1] = replace(self._item.turns[-1], **known)

    @property
    def last_sampled(self) -> int | None:
        """The last token of the last turn, if nothing was appended since; else None."""
        last = self._item.turns[-1]
        return int(self._item.response_ids[-1]) if last.start < last.stop == len(self._item.response_ids) else None

    def append_prompt(self, ids: ArrayLike) -> None:
        """Append tokens that the model reads but did not sample."""
        told = to_token_array(ids)
        self._append(told, np.zeros(len(told), np.float32))

    def _append(self, ids: ArrayLike, logprobs: ArrayLike) -> None:
        item = self._item
        item.response_ids = append_array(item.response_ids, to_token_array(ids))
        item.logprobs = append_array(item.logprobs, to_logprob_array(logprobs))

    def rollback(self) -> None:
        """Remove the last sampled token: an end of message, where the message continues after all."""
        item, last = self._item, self._item.turns[-1]
        assert last.start < last.stop == len(item.response_ids), "nothing was said after it"
        item.response_ids, item.logprobs = item.response_ids[:-1], item.logprobs[:-1]
        item.turns[-1] = last = replace(last, stop=last.stop - 1)
        item.loss_spans[-1:] = [(last.start, last.stop)] if last.start < last.stop else []

    def restart(self, prompt_ids: ArrayLike) -> None:
        """Let the model read `prompt_ids` next.

        If they begin with the current context, they extend the current sequence; otherwise a new sequence begins.
        """
        context, ids = self.context, to_token_array(prompt_ids)
        if np.array_equal(ids[: len(context)], context):
            self.append_prompt(ids[len(context) :])
            return
        self._prompt_ids, self._start = ids, len(self._item.response_ids)
        self._item.restarts.append(Restart(self._start, ids))


# -- how many episodes run ---------------------------------------------------------------------------------------------

_EPISODES_PER_ITERATION = 32
"""Episodes that begin in one turn of the event loop: thousands at once would hold up everything else."""


class EpisodeLimiter:
    """`generator.rate_limit`: groups of episodes are admitted in the order in which they ask, each as a whole.

    trajectories_per_second: at most this many episodes begin per second. max_concurrency: at most this many episodes
    run at a time, unless a single group is larger. None is no limit; without both, admission depends on no clock.
    """

    def __init__(self, trajectories_per_second: float | None = None, max_concurrency: int | None = None):
        self._seconds_each = 0.0 if trajectories_per_second is None else 1.0 / trajectories_per_second
        self._max_concurrency = max_concurrency
        self._running = 0
        self._next_start = 0.0
        self._admission_lock = asyncio.Lock()
        """Held by the next group to be admitted: waiters are served in order, so a large group is never starved."""
        self._released = asyncio.Event()
        self._throttle = EventLoopThrottle(_EPISODES_PER_ITERATION)

    async def admit(self, episodes: int) -> None:
        """Wait until this many episodes may begin; each admission needs a matching `release`."""
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
        """Note that this many admitted episodes have ended."""
        self._running -= episodes
        self._released.set()


# -- the tokenizer of thousands of conversations -----------------------------------------------------------------------

T = TypeVar("T")
_Asked = tuple[int, Callable[[Any], Any], "asyncio.Future[Any]"]
MIN_THREAD_CHARS = 1 << 14
"""Characters or tokens from which on a text is not for the event loop: some milliseconds."""
_CHARS_PER_ITERATION, _CALL_OVERHEAD_CHARS = 1 << 16, 1 << 10
"""Characters in one turn of the event loop, and what a call counts beside its own: some ten milliseconds in all."""
_EXECUTORS: WeakKeyDictionary[Any, TokenizerExecutor] = WeakKeyDictionary()


def tokenizer_executor(tokenizer: Any) -> TokenizerExecutor:
    """The one of this tokenizer."""
    found = _EXECUTORS.get(tokenizer)
    if found is None:
        found = _EXECUTORS[tokenizer] = TokenizerExecutor(tokenizer)
    return found


class TokenizerExecutor:
    """A tokenizer as thousands of conversations use it at a time: what they ask is done in the order in which it came,
    as much in one turn of the event loop as leaves time for what else there is.

    Short texts are not for a thread: one that lets go of the interpreter's lock for microseconds, again and again, as a
    tokenizer does, keeps it from the event loop, which waits for it after every array and every pipe.

    The thread has a copy of its own, made anew where template or tokens have changed: whoever else has the tokenizer
    may set its padding or truncation, which would hold for what is being encoded there.
    """

    def __init__(self, tokenizer: Any):
        self._original = ref(tokenizer)
        self._asked: WeakKeyDictionary[asyncio.AbstractEventLoop, deque[_Asked]] = WeakKeyDictionary()
        self._thread = ThreadPoolExecutor(1, "tokenizer")
        self._copied, self._state = _copied(tokenizer), _state(tokenizer)

    async def run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """`function(tokenizer, *args)`, or what it raises. `size`: how many characters or tokens go through it."""
        # Not in this frame, which an error's traceback keeps: the future keeps the error.
        return await self._answer(size, partial(_called, function, args))  # type: ignore[no-any-return]

    def _answer(self, size: int, work: Callable[[Any], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        if size >= MIN_THREAD_CHARS:
            return loop.run_in_executor(self._thread, work, self._own())
        asked = self._asked.setdefault(loop, deque())
        if not asked:
            loop.call_soon(self._work, loop)
        answer = mark_exception_retrieved(loop.create_future())
        asked.append((_CALL_OVERHEAD_CHARS + size, work, answer))
        return answer

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        asked, done, tokenizer = self._asked[loop], 0, self._original()
        while asked and done < _CHARS_PER_ITERATION:
            size, work, answer = asked.popleft()
            if not answer.done():  # whoever asked was cancelled
                done += size
                try:
                    answer.set_result(work(tokenizer))
                except BaseException as error:
                    answer.set_exception(error)
            del work, answer  # an error's traceback keeps this frame, which would keep the error
        if asked:
            loop.call_soon(self._work, loop)

    def _own(self) -> Any:
        """The thread's copy."""
        original = self._original()
        if original is not None and (state := _state(original)) != self._state:
            self._copied, self._state = _copied(original), state
        return self._copied


def _copied(tokenizer: Any) -> Any:
    try:
        return copy.deepcopy(tokenizer)
    except Exception:  # one of a user's own, with a lock or a file
        return tokenizer


def _state(tokenizer: Any) -> Any:
    return getattr(tokenizer, "chat_template", None), len(tokenizer), dict(tokenizer.special_tokens_map)


def _called(function: Callable[..., T], args: Any, tokenizer: Any) -> T:
    """What it returns or raises, but for StopIteration, which no future takes."""
    try:
        return function(tokenizer, *args)
    except StopIteration as error:
        raise RuntimeError(f"StopIteration: {error}") from error
