"""The calls of one rollout to a chat API, recorded as a tree of token sequences."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np

from skyrl_train.agents.call_tree import Call, CallTree, Match, Order, answer_to_message, digest
from skyrl_train.agents.records import build_trajectory
from skyrl_train.data.chat import adapt_reasoning, decode_response, encode_text, get_message_text
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.data.sampled_history import RenderedHistory, SampledAnswer, render_sampled_history
from skyrl_train.data.token_arrays import Tokens, to_token_array
from skyrl_train.data.tokenizer_executor import tokenizer_executor
from skyrl_train.data.trajectory import Trajectory
from skyrl_train.engines.base import SAMPLING_PARAM_NAMES, Completion, SamplingParams, StopReason
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest, OnProgress
from skyrl_train.engines.http.chat_sampler import ChatSampler, count_characters
from skyrl_train.engines.http.exchange import ApiError
from skyrl_train.engines.http.protocol import check_range
from skyrl_train.engines.sampling_params import request_seed
from skyrl_train.errors import DeadlineExceeded, EngineError, EnginesLost, UnsupportedParameter
from skyrl_train.rollouts.conversation import FailureKind
from skyrl_train.terminal import escape_control_chars

log = logging.getLogger(__name__)
_MIN_DEADLINE_S = 1e-3
_LIMIT_CODE = "context_length_exceeded"
"""OpenAI's code for prompts that are too long, which agents handle by ending or by shortening their history."""
_SHOWN_CHARS = 200


@dataclass(frozen=True, kw_only=True)
class SessionSettings:
    """The settings of the sessions of a run, for training or for evaluation."""

    sampling_params: SamplingParams
    """Sampling parameters of all calls. A client can lower max_tokens and add stop strings; its other parameters are
    ignored and counted, because training assumes log-probs of this distribution."""
    seed: int
    max_input_length: int
    """Maximum number of tokens that a call reads."""
    rollout_s: float
    """Seconds that the calls of a session may run in an engine's batch, in total."""
    max_calls: int | None = None
    """Maximum number of calls of a session; None for no limit."""
    max_sampled_tokens: int | None = None
    """Maximum number of tokens that a session samples in total; None for no limit."""
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class SessionStatistics:
    """Counters of a session."""

    calls: int = 0
    """Answered calls. A call for n answers counts n times."""
    branches: int = 0
    """Calls that did not continue an earlier call, except the first one."""
    retokenized_messages: int = 0
    """Messages of the assistant whose tokens are not those that the session sampled. Messages that it never sampled
    count once, except those that precede its first answer."""
    sampled_tokens: int = 0
    read_tokens: int = 0
    """Tokens that calls read in addition to those of the call that they continue."""
    malformed_calls: int = 0
    """Tool calls in answers that could not be parsed."""
    overridden_parameters: int = 0
    """Sampling parameters of clients that were ignored."""


@dataclass(frozen=True, slots=True)
class SessionFailure:
    """The reason why a session cannot be trained on."""

    kind: str
    """Name under which the failure is counted: "engine" or "deadline"."""
    detail: str
    error: Exception | None = None
    """The engine's error. The caller raises it again if it is EnginesLost."""


@dataclass(kw_only=True)
class SessionBackend:
    """The objects that all sessions of a server share."""

    tokenizer: Any
    sampler: ChatSampler
    model_name: str
    has_reported_retokenized: bool = False
    """True after the log has shown the first message that was tokenized from its text."""


class Session:
    """The calls of one rollout to a chat API. Calls may run concurrently.

    Attributes:
        id: Unguessable name of the session. It is the secret that gives access to the session.
        base_url: Base URL for clients of OpenAI's API, http://HOST:PORT/sessions/ID/v1. Clients of Anthropic's API use
            `anthropic_base_url`, which has no /v1.
        reward: Reward that the program reported with `POST /sessions/ID/reward`, or None.
        failure: The first failure of an engine, or None.
        is_over_limit: True if a call was refused because it exceeds the limits of the settings ("too many tokens"). A
            call that was too long no longer counts once a later, shorter one is answered.
        is_closed: True after `close`.
        statistics: Counters.
    """

    def __init__(
        self,
        backend: SessionBackend,
        settings: SessionSettings,
        *,
        id: str,
        url: str,
        uid: str,
        sample: int,
        position: int,
    ):
        """Create a session. `SessionServer.open` does this.

        Args:
            backend: Shared objects.
            settings: Settings.
            id: Name of the session.
            url: URL of the session, without /v1.
            uid: Id of the prompt.
            sample: Index of the sample in the prompt's group.
            position: Position of the prompt in the run's order.
        """
        self.id, self.base_url, self.anthropic_base_url = id, f"{url}/v1", url
        self.reward: float | None = None
        self.failure: SessionFailure | None = None
        self.is_closed = False
        self.statistics = SessionStatistics()
        self._backend, self._settings = backend, settings
        self._uid, self._sample_index, self._position = uid, sample, position
        self._tree = CallTree()
        self._contexts: Counter[bytes] = Counter()
        """Number of calls with the same tokens and options, by the hash of these."""
        self._foreign: set[bytes] = set()
        """Messages of the assistant that were not sampled in the session."""
        self._num_requests = 0
        self._running: set[asyncio.Task[Any]] = set()
        self._num_running = 0
        """Number of answers that are being sampled, or that wait for tokens of the budget."""
        self._reserved_tokens = 0
        """Tokens of `max_sampled_tokens` that running calls may still sample."""
        self._tokens_released = asyncio.Event()
        """Set for a moment when a running call gives back its reserved tokens."""
        self._is_out_of_budget = False
        """True after a call was refused because of `max_calls` or `max_sampled_tokens`."""
        self._num_too_long = 0
        """Calls that were refused because of `max_input_length`."""
        self._num_shortened = 0
        """Value of `_num_too_long` when the newest of the answered calls arrived."""
        self._running_s = 0.0
        """Seconds that its calls have run in an engine's batch."""

    @property
    def is_over_limit(self) -> bool:
        """True if a call exceeded the limits of the settings, and the program did not go on with a shorter one."""
        return self._is_out_of_budget or self._num_shortened < self._num_too_long

    # -- calls of clients --------------------------------------------------------------------------------------------

    def list_models(self) -> Sequence[str]:
        """Return the allowed values of `model`, which is only the policy. Other names are accepted, too."""
        return [self._backend.model_name]

    def find_adapter(self, model: str) -> str | None:
        """Return None: whatever model a program names, the session samples from the policy."""
        return None

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt.

        Raises:
            ApiError: The session is closed.
            DataError: The chat template rejects the messages.
        """
        self._check_open()
        return len((await self._prepare(self._with_settings(request))).context)

    async def sample(self, request: ChatRequest, *, on_progress: OnProgress | None = None) -> list[ChatAnswer]:
        """Sample and record the answers of a call.

        Args:
            request: The request. Its seed and most of its sampling parameters are ignored.
            on_progress: Receives the beginnings of the answers while they are sampled.

        Raises:
            ApiError: The session is closed (410), has failed (503), or the call exceeds its limits (400).
            InvalidBodyError: A parameter is invalid.
            DataError: The chat template rejects the messages.
            UnsupportedParameter: The engine does not support a parameter.
        """
        self._check_open()
        task = asyncio.ensure_future(self._sample(self._with_settings(request), on_progress))
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if self.is_closed and not (current and current.cancelling()):
                self._check_open()
            raise
        finally:
            self._running.discard(task)

    async def close(self) -> None:
        """Cancel running calls and refuse later ones. Does nothing if the session is closed already."""
        self.is_closed = True
        running = [*self._running]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def record_completions(self, completions: Sequence[Completion]) -> None:
        """Count the seconds of sampled completions.

        Raises:
            DeadlineExceeded: A completion was aborted at the deadline of the session.
        """
        self._running_s += sum(completion.running_s for completion in completions)
        if any(completion.stop_reason == StopReason.ABORT for completion in completions):
            raise DeadlineExceeded("sampling the calls of a session", self._settings.rollout_s)

    def trajectory(self, prompt: Prompt, sample: int, temperature: float) -> Trajectory:
        """Return the recorded calls as one episode with reward 0. Each leaf of the tree becomes a sequence.

        The trajectory is failed if the session has a `failure`. Its `stop_reason` is "length" if `is_over_limit`. The
        caller sets rewards; the last turn is the last call.

        Args:
            prompt: The prompt.
            sample: Index of the trajectory in its group.
            temperature: Sampling temperature; 0 becomes 1, at which engines compute log-probs of greedy samples.
        """
        item = build_trajectory(
            self._tree,
            prompt,
            sample,
            temperature,
            statistics=asdict(self.statistics),
            decode=partial(decode_response, self._backend.tokenizer),
        )
        if self.is_over_limit:
            item.stop_reason = StopReason.LENGTH
        if self.failure is not None:
            item.fail(self.failure.kind, self.failure.detail)
        return item

    # -- implementation ----------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.is_closed:
            raise ApiError(410, "This session is closed: its rollout has ended.", "session_closed")
        if self.failure is not None:
            raise ApiError(503, f"This session has failed: {self.failure.detail}", "session_failed")

    def _with_settings(self, request: ChatRequest) -> ChatRequest:
        """Return the request with the sampling parameters and template variables of the session."""
        run = self._settings.sampling_params
        sampling = {name: getattr(run, name) for name in SAMPLING_PARAM_NAMES}
        for name, value in request.sampling.items():
            if name == "max_tokens":
                sampling[name] = min(run.max_tokens, value)
            elif name == "stop":
                sampling[name] = tuple(dict.fromkeys((*run.stop, *([value] if isinstance(value, str) else value))))
            elif value != getattr(run, name):
                self.statistics.overridden_parameters += 1
        kwargs = {**self._settings.chat_template_kwargs, **request.chat_template_kwargs}
        return replace(request, sampling=sampling, chat_template_kwargs=kwargs, seed=None, adapter=None)

    async def _sample(self, request: ChatRequest, on_progress: OnProgress | None) -> list[ChatAnswer]:
        prepared = await self._prepare(request)
        self._check_limits(request, len(prepared.context))
        num_too_long = self._num_too_long
        options = digest(request.tool_choice, request.forced_tool, request.json_schema, request.sampling, request.n)
        context = blake2b(prepared.context.tobytes() + options, digest_size=16).digest()
        occurrence = self._contexts[context]
        self._contexts[context] += 1
        arrival = len(self._tree.calls)
        number = int.from_bytes(blake2b(context + occurrence.to_bytes(8, "little"), digest_size=8).digest(), "little")
        seed = request_seed(self._settings.seed, self._uid, self._sample_index, number, self._position)

        async def render(request: ChatRequest) -> Tokens:
            return prepared.context

        self._num_running += request.n
        try:
            async with self._reserved_budget(request) as max_tokens:
                sampling = {**request.sampling, "max_tokens": max_tokens}
                answers = await self._backend.sampler.sample(
                    replace(request, sampling=sampling, seed=seed >> 1),  # clients' seeds have 63 bits
                    render=render,
                    on_progress=on_progress,
                    session=self.id,
                    deadline_s=max(self._settings.rollout_s - self._running_s, _MIN_DEADLINE_S),
                )
        except UnsupportedParameter:
            raise  # a parameter of the client
        except (EngineError, DeadlineExceeded) as error:
            raise self._fail(error) from error
        finally:
            self._num_running -= request.n
        self._num_shortened = max(self._num_shortened, num_too_long)
        self._count_prompt(prepared, len(answers[0].prompt_ids) - prepared.num_known)
        return [
            self._record(prepared, (arrival, context, occurrence, index), answer)
            for index, answer in enumerate(answers)
        ]

    def _fail(self, error: Exception) -> ApiError:
        """Mark the session as failed, and return the error for the client."""
        kind = FailureKind.DEADLINE if isinstance(error, DeadlineExceeded) else FailureKind.ENGINE
        if self.failure is None or isinstance(error, EnginesLost):
            log.warning("A session of prompt %s is lost: %s", escape_control_chars(self._uid), error)
            self.failure = SessionFailure(kind.value, str(error), error)
        return ApiError(503, f"This session has failed: {error}", "session_failed")

    def _check_limits(self, request: ChatRequest, length: int) -> None:
        """Refuse a call that is invalid, too long, or one too many.

        Raises:
            ApiError: The call exceeds a limit of the session.
            InvalidBodyError: `n` or `max_tokens` is out of range.
        """
        settings, limits = self._settings, self._backend.sampler.limits
        check_range(request.n, limits.samples, "n", "samples")
        check_range(request.sampling["max_tokens"], limits.max_tokens, "max_tokens", "tokens")
        if length > settings.max_input_length:
            self._num_too_long += 1
            raise _limit_error(
                f"This model's maximum context length is {settings.max_input_length} tokens. However, your messages "
                f"have {length} tokens: the prompt is too long. Reduce the length of the messages."
            )
        num_calls = self.statistics.calls + self._num_running + request.n
        if settings.max_calls is not None and num_calls > settings.max_calls:
            self._is_out_of_budget = True
            raise _limit_error(f"This session has reached its limit of {settings.max_calls} calls.")

    @asynccontextmanager
    async def _reserved_budget(self, request: ChatRequest) -> AsyncIterator[int]:
        """Reserve tokens of `max_sampled_tokens` for a call, and yield its `max_tokens`.

        If running calls have reserved so many that the call would get fewer than it asks for, it waits until they give
        back what they did not use. So concurrent calls never exceed the limit together.

        Raises:
            ApiError: Too few tokens are left, or the session has been closed or has failed meanwhile.
        """
        max_tokens: int = request.sampling["max_tokens"]
        limit = self._settings.max_sampled_tokens
        if limit is None:
            yield max_tokens
            return
        while self._reserved_tokens and self._num_free_tokens(limit) < max_tokens * request.n:
            await self._tokens_released.wait()
            self._check_open()
        max_tokens = min(max_tokens, self._num_free_tokens(limit) // request.n)
        if max_tokens < 1:
            self._is_out_of_budget = True
            raise _limit_error(f"This session has reached its limit of {limit} sampled tokens.")
        self._reserved_tokens += max_tokens * request.n
        try:
            yield max_tokens
        finally:  # the caller counts the sampled tokens before another task runs
            self._reserved_tokens -= max_tokens * request.n
            self._tokens_released.set()
            self._tokens_released.clear()

    def _num_free_tokens(self, limit: int) -> int:
        return limit - self.statistics.sampled_tokens - self._reserved_tokens

    # -- rendering ---------------------------------------------------------------------------------------------------

    async def _prepare(self, request: ChatRequest) -> _Prepared:
        """Return the tokens that a call reads, and how they follow those of earlier calls."""
        messages, continued_text = request.messages, ""
        if request.continue_final_message:
            messages, continued_text = messages[:-1], get_message_text(messages[-1])
        kwargs = {**request.chat_template_kwargs, **({"tools": request.tools} if request.tools else {})}
        scope = digest(request.tools, request.chat_template_kwargs)
        continued = self._find_truncated(scope, request) if continued_text else None
        match = self._tree.match(scope, messages)
        new_messages = request.messages[match.num_messages if match.previous else 0 :]
        history, ids = await tokenizer_executor(self._backend.tokenizer).run(
            count_characters([new_messages, () if match.previous else request.tools]),
            _render,
            messages,
            match,
            kwargs,
            continued_text,
        )
        parent = continued or (match.previous if history.continues else None)
        known = parent.read_tokens() if parent is not None else to_token_array([])
        new_ids = [*history.ids, *ids] if continued is None else []
        return _Prepared(
            scope=scope,
            messages=messages,
            continued_text=continued_text,
            match=match,
            history=history,
            parent=parent,
            num_known=len(known),
            num_header=len(known) + (len(history.ids) if continued is None else -len(continued.sampled.ids)),
            context=np.concatenate((known, to_token_array(new_ids))),
        )

    def _find_truncated(self, scope: bytes, request: ChatRequest) -> Call | None:
        """Return the truncated answer that a request continues; None if the text that it continues is another one."""
        match = self._tree.match(scope, request.messages)
        call, message = match.previous, request.messages[-1]
        if call is None or match.num_messages < len(request.messages) or call.answer.tool_calls:
            return None
        is_truncated = call.completion.stop_reason == StopReason.LENGTH
        return call if is_truncated and get_message_text(message) == call.message["content"] else None

    def _record(self, prepared: _Prepared, order: Order, answer: ChatAnswer) -> ChatAnswer:
        """Add an answer to the tree. Return it with the number of tokens that the session already held."""
        completion, statistics, message = answer.completion, self.statistics, answer_to_message(answer.answer)
        if prepared.continued_text:
            message["content"] = prepared.continued_text + message["content"]
        turn = np.concatenate((answer.prompt_ids[prepared.num_header :], completion.token_ids))
        call = Call(
            order=order,
            parent=prepared.parent,
            previous=prepared.match.previous,
            messages=list(prepared.messages[prepared.match.num_messages :]),
            answer_index=len(prepared.messages),
            prompt_ids=answer.prompt_ids[prepared.num_known :],
            completion=completion,
            answer=answer.answer,
            message=message,
            sampled=SampledAnswer(turn, header_end=prepared.history.header_end),
            prefix=prepared.history.prefix,
            num_retokenized=prepared.num_retokenized,
            tokens=np.concatenate((answer.prompt_ids, completion.token_ids)),
        )
        self._tree.add(call, prepared.scope, prepared.messages)
        statistics.calls += 1
        statistics.sampled_tokens += len(completion.token_ids)
        statistics.malformed_calls += len(answer.answer.errors)
        return replace(answer, num_cached_tokens=prepared.num_known)

    def _count_prompt(self, prepared: _Prepared, num_read: int) -> None:
        """Count what a call reads, before its answers are added."""
        statistics = self.statistics
        statistics.read_tokens += num_read
        statistics.branches += prepared.parent is None and self._num_requests > 0
        self._num_requests += 1
        retokenized = [index for index in prepared.unsampled_indices() if self._is_retokenized(prepared, index)]
        prepared.num_retokenized = len(retokenized)
        statistics.retokenized_messages += len(retokenized)
        if retokenized and not self._backend.has_reported_retokenized:
            self._backend.has_reported_retokenized = True
            text = f"{get_message_text(prepared.messages[retokenized[0]]):.{_SHOWN_CHARS}}"
            log.warning(
                "Prompt %s: messages[%d] of a call is an answer that is tokenized from its text, because the program "
                "changed or made it, or because the chat template rewrote it: %s. Further ones are only counted "
                "(agent/retokenized_messages).",
                escape_control_chars(self._uid),
                retokenized[0],
                escape_control_chars(repr(text)),
            )

    def _is_retokenized(self, prepared: _Prepared, index: int) -> bool:
        if index in prepared.match.answers:
            return True
        key = digest(prepared.messages[index])
        is_new = key not in self._foreign
        self._foreign.add(key)
        return is_new and bool(self._tree.calls)


def _limit_error(problem: str) -> ApiError:
    return ApiError(400, problem, _LIMIT_CODE, "messages")


@dataclass(kw_only=True, slots=True)
class _Prepared:
    """The rendered prompt of a call."""

    scope: bytes
    messages: Sequence[Message]
    continued_text: str
    """Text of the assistant's last message, which the answer continues; "" for a new message."""
    match: Match
    history: RenderedHistory
    parent: Call | None
    num_known: int
    """Number of tokens of the parent, including its answer."""
    num_header: int
    """Number of tokens up to the end of the answer's header."""
    context: Tokens
    num_retokenized: int = 0

    def unsampled_indices(self) -> list[int]:
        """Return the indices of the assistant's messages that were tokenized from their text for this call."""
        start = self.match.num_messages if self.parent is not None else 0
        return [
            index
            for index, message in enumerate(self.messages)
            if index >= start and message["role"] == "assistant" and index not in self.history.reused
        ]


def _render(
    tokenizer: Any, messages: Sequence[Message], match: Match, kwargs: Mapping[str, Any], continued_text: str
) -> tuple[RenderedHistory, list[int]]:
    """Render a call, and encode the text that its answer continues."""
    previous = match.previous
    continued = None if previous is None else (previous.answer_index, previous.prefix)
    answers = {index: replace(call.sampled) for index, call in match.answers.items()}
    adapted = adapt_reasoning(tokenizer, messages, kwargs)
    history = render_sampled_history(tokenizer, adapted, answers, kwargs, continued=continued)
    for index, call in match.answers.items():  # only now: a request that the template rejects shows nothing
        call.sampled = answers[index]
    return history, encode_text(tokenizer, continued_text) if continued_text else []
