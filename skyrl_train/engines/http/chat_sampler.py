"""Sampling of chat requests: rendering, forced tool calls, and parsing of what the model wrote."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np

from skyrl_train.aio import deadline
from skyrl_train.data.chat import (
    adapt_reasoning,
    decode_answer,
    decode_completion,
    detect_tool_format,
    encode_forced_call,
    encode_text,
    get_reasoning_opening,
    get_undecoded_tokens,
    render_prompt,
)
from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.data.token_arrays import Tokens, to_token_array
from skyrl_train.data.token_texts import TokenAligner, TokenPart, get_token_parts
from skyrl_train.data.tokenizer_executor import tokenizer_executor
from skyrl_train.data.tool_formats import AnswerStream, ModelAnswer, ToolFormat, parse_answer
from skyrl_train.engines.base import (
    MAX_TOP_LOGPROBS,
    Capabilities,
    Completion,
    SampleRequest,
    SamplingParams,
    StopReason,
    TopLogProbs,
)
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest, OnProgress, TokenLogprob
from skyrl_train.engines.http.json_body import InvalidBodyError
from skyrl_train.engines.http.protocol import Limits, check_ids, check_range, parse_sampling
from skyrl_train.engines.sampling_params import request_seed, with_stop_token
from skyrl_train.errors import EngineError, SkyRLError, UnsupportedParameter

T = TypeVar("T")
Generate = Callable[[Sequence[SampleRequest]], Awaitable[list[Completion]]]
PartialTokens = Callable[[Sequence[str]], Awaitable[Mapping[str, Tokens]]]
"""A function like `InferenceEngine.partial_tokens`."""
Render = Callable[[ChatRequest], Awaitable[Sequence[int] | Tokens]]
"""A function that returns the token ids of a request's prompt, including the header of the answer."""
POLL_INTERVAL_S, _TOKENS_PER_INTERVAL, _STREAMS_PER_INTERVAL = 0.05, 512, 16
"""Seconds between two polls for sampled tokens, and the tokens of a response and the number of open streams by which
this interval grows once more: each poll decodes the whole response."""
_CALL_ID_CHARS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_CALL_ID_LENGTH = 9
"""Characters of a call's id. Mistral's templates accept only ids of this length."""


class UnsupportedFeature(UnsupportedParameter):
    """A chat request asks for something that the engine cannot do. `feature` is the name of the ChatRequest's field."""

    def __init__(self, feature: str, message: str):
        super().__init__(message)
        self.feature = feature


class ChatSampler:
    """Samples the answers to chat requests. It keeps no state between requests.

    Example:
        sampler = ChatSampler(tokenizer, engine.generate, limits=Limits(), defaults=SamplingParams(max_tokens=64),
                              deadline_s=60)
        (answer,) = await sampler.sample(ChatRequest(messages=[{"role": "user", "content": "6 * 7 = ?"}]))
        answer.answer.content  # "42"
    """

    def __init__(
        self,
        tokenizer: Any,
        generate: Generate,
        *,
        limits: Limits,
        defaults: SamplingParams,
        deadline_s: float,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        partial_tokens: PartialTokens | None = None,
        capabilities: Capabilities | None = None,
    ):
        """Create a sampler.

        Args:
            tokenizer: The model's tokenizer.
            generate: Samples completions, such as `EngineClient.generate`.
            limits: Limits of a request.
            defaults: Sampling parameters that a request does not give.
            deadline_s: Deadline of every sample, and of converting texts, in seconds.
            chat_template_kwargs: Variables of the chat template. A request may replace them.
            partial_tokens: Returns the tokens that running requests have sampled, for streams. None if that is not
                possible; streams then have all text at the end.
            capabilities: Capabilities of the engine, for errors that name the parameter. With None, the engine reports
                what it does not support.
        """
        self.tokenizer = tokenizer
        self.limits = limits
        self.deadline_s = deadline_s
        self._generate, self._partial_tokens = generate, partial_tokens
        self._defaults = defaults
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._capabilities = capabilities
        self._end_of_turn = find_end_of_turn_token(tokenizer, self._chat_template_kwargs)
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token, which bounds the number of tokens of a text from below."""
        self._aligners: WeakKeyDictionary[Any, TokenAligner] = WeakKeyDictionary()
        self._num_streams = 0
        """Number of requests whose beginnings are reported."""

    async def sample(
        self,
        request: ChatRequest,
        *,
        render: Render | None = None,
        on_progress: OnProgress | None = None,
        session: str = "",
        deadline_s: float | None = None,
    ) -> list[ChatAnswer]:
        """Return the answers to a request, `request.n` of them.

        Args:
            request: The request.
            render: Returns the prompt; None renders the whole history. A forced tool call is appended to it.
            on_progress: Receives the beginnings of the answers while they are sampled; None receives nothing.
            session: Name of the conversation, which stays with one engine; "" for none.
            deadline_s: Deadline of every sample, in seconds; None for that of the sampler.

        Raises:
            InvalidBodyError: A parameter is invalid or exceeds the limits.
            DataError: The chat template rejects the messages.
            UnsupportedParameter: The engine does not support a parameter.
            EngineError: The engine failed or ended an answer early.
        """
        sampling = self._check(request)
        prompt = to_token_array(await (render or self.render)(request))
        turn = await self._run(len(prompt), self._begin_turn, request, prompt, sampling)
        requests = self._sample_requests(turn, session, deadline_s or self.deadline_s)
        if on_progress is None or self._partial_tokens is None:
            completions = await self._generate(requests)
        else:
            completions = await self._generate_with_progress(turn, requests, on_progress)
        size = sum(len(completion.token_ids) for completion in completions)
        return await self._run(size, self._read_answers, turn, requests, completions)

    async def _generate_with_progress(
        self, turn: _Turn, requests: Sequence[SampleRequest], on_progress: OnProgress
    ) -> list[Completion]:
        """Sample completions, and meanwhile report the beginnings of the answers.

        Raises:
            EngineError: A request was sampled again from its start, and its tokens are not those that were reported.
        """
        assert self._partial_tokens is not None
        streams = [turn.open_stream() for _ in requests]
        indices = {request.request_id: index for index, request in enumerate(requests)}
        reported = [to_token_array([])] * len(requests)
        work = asyncio.ensure_future(self._generate(requests))
        self._num_streams += 1
        try:
            while not work.done():
                interval_s = POLL_INTERVAL_S * (1 + sum(map(len, reported)) / _TOKENS_PER_INTERVAL)
                interval_s *= 1 + self._num_streams / _STREAMS_PER_INTERVAL
                await asyncio.wait({work}, timeout=interval_s)
                partial: Mapping[str, Tokens] = {}
                if not work.done():
                    with suppress(SkyRLError):  # the work raises the error
                        partial = await self._partial_tokens(list(indices))
                for id, tokens in partial.items():
                    index = indices[id]
                    is_longer = len(tokens) > len(reported[index])
                    if is_longer and _have_same_start(tokens, reported[index]) and not work.done():
                        reported[index] = tokens
                        text = await self._run(len(tokens), self._partial_text, turn, tokens)
                        on_progress(index, turn.parse_partial(streams[index], text))
            completions = await work
        finally:
            self._num_streams -= 1
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        for tokens, completion in zip(reported, completions, strict=True):
            if not _have_same_start(tokens, completion.token_ids):
                raise EngineError(
                    "The answer was sampled again from its start, because its engine died or a weight sync aborted it. "
                    "It differs from the beginning that the client has received, so the client must ask again."
                )
        return completions

    def _partial_text(self, tokenizer: Any, turn: _Turn, tokens: Tokens) -> str:
        """Return the text of a beginning of an answer, without what may become a stop string."""
        text = self._decode(tokenizer, turn, tokens)
        for stop in turn.sampling.stop:
            text = text.partition(stop)[0]
            held_back = (size for size in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:size]))
            text = text[: len(text) - next(held_back, 0)]
        return text

    async def render(self, request: ChatRequest) -> list[int]:
        """Return the token ids of the prompt of a request, rendered from its whole history.

        Raises:
            InvalidBodyError: The prompt is too long.
            DataError: The chat template rejects the messages.
        """
        characters = count_characters([*request.messages, *request.tools])
        max_characters = self.limits.prompt_tokens * self._max_token_chars
        unit = (
            f"characters (at most {self.limits.prompt_tokens} tokens per prompt and {self._max_token_chars} characters "
            "per token)"
        )
        check_range(characters, max_characters, "messages", unit, min_value=0)
        return await self._run(characters, self._render, request)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt, without the beginning of a forced tool call.

        Raises:
            InvalidBodyError: The prompt is too long.
            DataError: The chat template rejects the messages.
        """
        return len(await self.render(request))

    def _check(self, request: ChatRequest) -> SamplingParams:
        """Return the sampling parameters of a request."""
        check_range(request.n, self.limits.samples, "n", "samples")
        check_range(request.seed or 0, 2**63 - 1, "seed", "as a seed", min_value=-(2**63))
        check_range(request.top_logprobs, MAX_TOP_LOGPROBS, "top_logprobs", "tokens", min_value=0)
        if self._capabilities is not None:
            _check_features(request, self._capabilities)
        if request.json_schema is not None and request.tools and request.tool_choice != "none":
            raise UnsupportedFeature(
                "json_schema",
                "JSON of a schema is not supported together with tools: the answer could not call them. Leave out the "
                "schema or the tools, or forbid calls with tool_choice.",
            )
        settings = {name: getattr(self._defaults, name) for name in self._defaults.__dataclass_fields__}
        sampling = parse_sampling(settings | dict(request.sampling), "", self.limits)
        return with_stop_token(sampling, self._end_of_turn)

    async def _run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        async with deadline("converting text to tokens or tokens to text", self.deadline_s):
            return await tokenizer_executor(self.tokenizer).run(size, function, *args)

    # -- requests ----------------------------------------------------------------------------------------------------

    def _template_kwargs(self, request: ChatRequest) -> dict[str, Any]:
        tools = {"tools": request.tools} if request.tools else {}
        return {**self._chat_template_kwargs, **request.chat_template_kwargs, **tools}

    def _render(self, tokenizer: Any, request: ChatRequest) -> list[int]:
        kwargs = self._template_kwargs(request)
        return render_prompt(
            tokenizer,
            adapt_reasoning(tokenizer, request.messages, kwargs),
            kwargs,
            continue_final_message=request.continue_final_message,
        )

    def _begin_turn(self, tokenizer: Any, request: ChatRequest, prompt: Tokens, sampling: SamplingParams) -> _Turn:
        """Return the turn that follows a prompt, with the beginning of a forced tool call in the prompt."""
        opening, forced = get_reasoning_opening(tokenizer, prompt), list[int]()
        tool_format = None
        if request.tools and request.tool_choice != "none":
            tool_format = detect_tool_format(tokenizer, self._template_kwargs(request))
        if request.tool_choice == "required":
            if tool_format is None:
                text = "cannot force a call: the format of this chat template's tool calls is not known."
                raise InvalidBodyError("tool_choice", text)
            forced = encode_forced_call(tokenizer, tool_format, request.forced_tool, opening)
        if forced:
            prompt = np.concatenate((prompt, to_token_array(forced)))
        check_ids(prompt, "messages", self.limits)
        total_tokens = len(prompt) * request.n
        check_range(total_tokens, self.limits.prompt_tokens_in_all, "messages", "prompt tokens times n")
        return _Turn(request, prompt, sampling, opening, to_token_array(forced), tool_format)

    def _sample_requests(self, turn: _Turn, session: str, deadline_s: float) -> list[SampleRequest]:
        id = uuid.uuid4().hex
        schema = None if turn.request.json_schema is None else json.dumps(turn.request.json_schema)
        return [
            SampleRequest(
                request_id=f"chat-{id}.{sample}",
                token_ids=turn.prompt,  # all samples share one array
                sampling=turn.sampling,
                seed=_seed(turn.request.seed, sample),
                session=session,
                group=f"chat-{id}",
                deadline_s=deadline_s,
                adapter=turn.request.adapter,
                top_logprobs=turn.request.top_logprobs,
                json_schema=schema,
            )
            for sample in range(turn.request.n)
        ]

    # -- answers -----------------------------------------------------------------------------------------------------

    def _read_answers(
        self, tokenizer: Any, turn: _Turn, requests: Sequence[SampleRequest], completions: Sequence[Completion]
    ) -> list[ChatAnswer]:
        return [
            self._read_answer(tokenizer, turn, request, completion)
            for request, completion in zip(requests, completions, strict=True)
        ]

    def _read_answer(self, tokenizer: Any, turn: _Turn, request: SampleRequest, completion: Completion) -> ChatAnswer:
        if completion.stop_reason not in (StopReason.STOP, StopReason.LENGTH):
            raise EngineError(
                f"The completion ended with stop_reason={completion.stop_reason!r} after {len(completion.token_ids)} "
                f"tokens: its deadline of {request.deadline_s:g} s passed, or the engine was paused or put to sleep."
            )
        ids = completion.token_ids
        text = self._decode(tokenizer, turn, ids)
        parts: Sequence[TokenPart] = []
        if turn.request.logprobs:
            aligner = self._aligners.get(tokenizer)
            if aligner is None:
                aligner = self._aligners[tokenizer] = TokenAligner(tokenizer)
            tokens = [*turn.forced.tolist(), *ids.tolist()]
            parts = aligner.align(text, tokens, get_undecoded_tokens(tokenizer, turn.tool_format))
        stop = completion.stop_text if completion.stop_text in request.sampling.stop else None
        if stop is not None:  # the last token completes the stop string
            text, parts = cut_at_stop(text, parts, stop, self._decode(tokenizer, turn, ids[:-1]))
        answer = turn.parse(text)
        calls = answer.tool_calls if turn.request.parallel_tool_calls else answer.tool_calls[:1]
        answer = replace(
            answer,
            tool_calls=tuple(
                replace(call, id=call.id or _call_id(request.seed, index)) for index, call in enumerate(calls)
            ),
        )
        reason = completion.stop_reason
        logprobs = completion.full_logprobs if request.sampling.temperature == 0 else completion.logprobs
        content_parts = _content_parts(parts, text, answer.content)[len(turn.forced) :]
        return ChatAnswer(
            answer=answer,
            finish_reason="length" if reason == StopReason.LENGTH else "tool_calls" if calls else "stop",
            prompt_ids=turn.prompt,
            completion=completion,
            stop_sequence=stop,
            num_reasoning_tokens=len(encode_text(tokenizer, answer.reasoning)) if answer.reasoning else 0,
            token_logprobs=self._token_logprobs(tokenizer, turn, completion, content_parts, logprobs.tolist()),
        )

    def _token_logprobs(
        self,
        tokenizer: Any,
        turn: _Turn,
        completion: Completion,
        parts: Sequence[TokenPart],
        logprobs: Sequence[float],
    ) -> tuple[TokenLogprob, ...]:
        """Return the log-probs of sampled tokens, with the most likely tokens; nothing if they were not requested."""
        if not turn.request.logprobs:
            return ()
        top = completion.top_logprobs
        alternatives: list[tuple[tuple[TokenPart, float], ...]] = [()] * len(parts)
        if top is not None:
            alternatives = _alternatives(tokenizer, top)
        return tuple(
            TokenLogprob(part, logprob, others)
            for part, logprob, others in zip(parts, logprobs, alternatives, strict=True)
        )

    def _decode(self, tokenizer: Any, turn: _Turn, ids: Tokens) -> str:
        if turn.request.continue_final_message:
            return decode_completion(tokenizer, ids, turn.prompt)
        tokens = np.concatenate((turn.forced, ids)) if len(turn.forced) else ids
        return decode_answer(tokenizer, tokens, turn.tool_format)


@dataclass(frozen=True)
class _Turn:
    """A request whose prompt has been rendered."""

    request: ChatRequest
    prompt: Tokens
    sampling: SamplingParams
    reasoning_opening: str
    """End of the prompt that opens reasoning; "" if it opens none."""
    forced: Tokens
    """Tokens at the end of the prompt that begin a forced tool call."""
    tool_format: ToolFormat | None
    """Format of the calls in the answer; None if it has none."""

    def parse(self, text: str) -> ModelAnswer:
        """Return the answer with a text."""
        if self._is_plain:
            return ModelAnswer(text)
        return parse_answer(text, self.tool_format, self.reasoning_opening, self.request.tools)

    def parse_partial(self, stream: AnswerStream, text: str) -> ModelAnswer:
        """Return the beginning of an answer, given the text so far and the stream of the text before."""
        if self._is_plain:
            return ModelAnswer(text.rstrip("\ufffd"))  # a part of a character
        stream.update(text)
        return stream.answer()

    @property
    def _is_plain(self) -> bool:
        """True if all text is content: JSON of a schema, or the rest of a message, whose parts begin elsewhere."""
        return self.request.continue_final_message or self.request.json_schema is not None

    def open_stream(self) -> AnswerStream:
        """Return the parser of an answer that is being sampled."""
        return AnswerStream(self.tool_format, self.reasoning_opening, self.request.tools)


def _check_features(request: ChatRequest, capabilities: Capabilities) -> None:
    """Raise UnsupportedFeature if a request needs a feature that the engine lacks."""
    for feature, needs, what in (
        ("top_logprobs", request.top_logprobs > capabilities.max_top_logprobs, f"top_logprobs={request.top_logprobs}"),
        ("json_schema", request.json_schema is not None and not capabilities.json_schema, "structured output"),
    ):
        if needs:
            reason = capabilities.refusals.get(feature, "leave it out, or serve another engine.")
            raise UnsupportedFeature(feature, f"Engine {capabilities.name!r} does not support {what}: {reason}")


def _have_same_start(tokens: Tokens, others: Tokens) -> bool:
    """True if one of two sequences begins with the other."""
    length = min(len(tokens), len(others))
    return np.array_equal(tokens[:length], others[:length])


def count_characters(value: Any) -> int:
    """Return the number of characters of all texts in JSON-like values. Names of members do not count."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        value = value.values()
    return sum(map(count_characters, value)) if isinstance(value, Sequence) or hasattr(value, "__iter__") else 0


def cut_at_stop(text: str, parts: Sequence[TokenPart], stop: str, text_before: str) -> tuple[str, Sequence[TokenPart]]:
    """Return a text before its stop string, and the parts of that text.

    Args:
        text: Text of all tokens.
        parts: Parts of the text.
        stop: The stop string, which the last token completes.
        text_before: Text of all tokens but the last.
    """
    at = text.find(stop, max(0, len(text_before.rstrip("\ufffd")) - len(stop) + 1))
    return (text, parts) if at < 0 else (text[:at], restrict_parts(parts, 0, at))


def restrict_parts(parts: Sequence[TokenPart], start: int, stop: int) -> list[TokenPart]:
    """Restrict each part to the characters [start, stop) of the joined text; tokens outside get empty parts."""
    restricted = []
    at = 0
    for part in parts:
        end = at + len(part.text)
        first, last = max(start - at, 0), stop - at
        if at >= stop or end < start or (end == start and part.text):  # bytes without text belong to the next character
            part = TokenPart("", b"")
        elif first or end > stop:
            bytes_before, bytes_after = len(part.text[:first].encode()), len(part.text[last:].encode())
            part = TokenPart(part.text[first:last], part.data[bytes_before : len(part.data) - bytes_after])
        restricted.append(part)
        at = end
    return restricted


def _content_parts(parts: Sequence[TokenPart], text: str, content: str) -> Sequence[TokenPart]:
    """Return the parts of an answer's content, given the parts of the whole text.

    Content from two places of the text belongs to the last token.
    """
    if not parts or content == text:
        return parts
    start = text.rfind(content)
    if start >= 0:
        return restrict_parts(parts, start, start + len(content))
    return [*[TokenPart("", b"")] * (len(parts) - 1), TokenPart(content, content.encode())]


def _alternatives(tokenizer: Any, top: TopLogProbs) -> list[tuple[tuple[TokenPart, float], ...]]:
    """Return the most likely tokens at each position, each as a text of its own."""
    tokens, columns = np.unique(top.token_ids, return_inverse=True)
    parts = get_token_parts(tokenizer, tokens.tolist())
    rows: Any = columns.reshape(top.token_ids.shape).tolist()
    return [
        tuple((parts[column], logprob) for column, logprob in zip(row, logprobs, strict=True))
        for row, logprobs in zip(rows, top.logprobs.tolist(), strict=True)
    ]


def _call_id(seed: int, index: int) -> str:
    """Return the id of a call: a hash, so that a run that is resumed repeats it."""
    number = int.from_bytes(hashlib.blake2b(f"{seed}\0{index}".encode(), digest_size=8).digest(), "little")
    characters = []
    for _ in range(_CALL_ID_LENGTH):
        number, position = divmod(number, len(_CALL_ID_CHARS))
        characters.append(_CALL_ID_CHARS[position])
    return "".join(characters)


def _seed(seed: int | None, sample: int) -> int:
    return secrets.randbits(64) if seed is None else request_seed(seed, "0", sample, 0, 0)
