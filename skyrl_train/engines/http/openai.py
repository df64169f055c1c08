"""Translation of OpenAI's chat and text completions to SampleRequests, and of Completions to responses."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from skyrl_train.data.chat import (
    decode_completion,
    decode_response,
    encode_prompt,
    get_reasoning_opening,
    get_undecoded_tokens,
    message_content,
    render_prompt,
)
from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.data.messages import Message, continues_last_message
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.token_texts import TokenAligner, TokenPart
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams, StopReason
from skyrl_train.engines.http.json_body import InvalidBodyError, parse_body
from skyrl_train.engines.http.openai_protocol import ChatCompletionRequest, ChatMessage, CompletionRequest
from skyrl_train.engines.http.protocol import Limits, check_ids, check_range, parse_sampling
from skyrl_train.engines.sampling_params import request_seed, with_stop_token
from skyrl_train.errors import EngineError

_SAMPLING_FIELDS = [field.name for field in fields(SamplingParams) if field.name != "max_tokens"]


@dataclass(frozen=True)
class CompletionCall:
    """A client's call: the requests to sample, and the data that the response needs."""

    id: str
    created: int
    """Unix time of the call."""
    body: ChatCompletionRequest | CompletionRequest
    prompts: list[list[int]]
    """Token ids of each prompt."""
    requests: list[SampleRequest]
    """`n` requests for each prompt, in order."""

    @property
    def chat(self) -> bool:
        """True for a chat completion, False for a text completion."""
        return isinstance(self.body, ChatCompletionRequest)

    @property
    def usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    @property
    def has_logprobs(self) -> bool:
        """True if the response contains log-probs."""
        return self.body.logprobs if isinstance(self.body, ChatCompletionRequest) else self.body.logprobs is not None

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if the response also contains the log-probs of the prompts' tokens."""
        return isinstance(self.body, CompletionRequest) and self.body.echo and self.has_logprobs


class Translator:
    """A translator of bodies to requests, and of completions to responses. It keeps no state between calls."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        limits: Limits,
        default_max_tokens: int,
        deadline_s: float,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        """Create a translator.

        Args:
            tokenizer: The model's tokenizer. The translator calls it in the calling thread.
            limits: Limits of a call.
            default_max_tokens: max_tokens of calls without it.
            deadline_s: Deadline of every request.
            chat_template_kwargs: Keyword arguments of the chat template.
        """
        self._tokenizer = tokenizer
        self._aligner = TokenAligner(tokenizer)
        self._limits = limits
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token, which bounds the number of tokens of a text from below."""
        self._default_max_tokens = default_max_tokens
        self._deadline_s = deadline_s
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._end_of_turn = find_end_of_turn_token(tokenizer, self._chat_template_kwargs)

    # -- requests ----------------------------------------------------------------------------------------------------

    def chat(self, raw: Any, adapter: str | None) -> CompletionCall:
        """Convert the body of a chat completion to requests.

        Args:
            raw: Parsed JSON.
            adapter: Name of the adapter to use, or None.

        Raises:
            InvalidBodyError: A parameter is invalid or exceeds the limits.
            DataError: The chat template rejects the messages.
        """
        body: ChatCompletionRequest = parse_body(ChatCompletionRequest, raw)
        if not body.messages:
            raise InvalidBodyError("messages", "must contain at least one message.")
        messages = [_message(message) for message in body.messages]
        if body.continue_final_message and not continues_last_message(messages):
            raise InvalidBodyError("continue_final_message", "requires that the last message is the assistant's.")
        if body.add_generation_prompt is body.continue_final_message:
            raise InvalidBodyError(
                "add_generation_prompt", "must be the opposite of continue_final_message; leave it out."
            )
        characters = sum(len(text) for message in messages for text in message.values())
        self._check_size(body, 1, characters, "messages")
        prompt = render_prompt(
            self._tokenizer,
            messages,
            self._chat_template_kwargs,
            continue_final_message=body.continue_final_message,
        )
        lengths = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
        if len(lengths) > 1:
            raise InvalidBodyError("max_completion_tokens", "and max_tokens differ; give one of them.")
        return self._completion_call("chatcmpl", body, [prompt], next(iter(lengths), None), adapter)

    def text(self, raw: Any, adapter: str | None) -> CompletionCall:
        """Convert the body of a text completion to requests. Control tokens that the text spells are encoded as such.

        Args:
            raw: Parsed JSON.
            adapter: Name of the adapter to use, or None.

        Raises:
            InvalidBodyError: A parameter is invalid or exceeds the limits.
        """
        body: CompletionRequest = parse_body(CompletionRequest, raw)
        if body.logprobs:
            raise InvalidBodyError(
                "logprobs", f"must be 0 (log-probs of the sampled tokens only) or null, got {body.logprobs}."
            )
        if body.echo and body.logprobs is not None and adapter is not None:
            raise InvalidBodyError("echo", "with logprobs is not supported for adapters; leave out one of them.")
        raw_prompts = _prompts(body)
        characters = max((len(prompt) for prompt in raw_prompts if isinstance(prompt, str)), default=0)
        self._check_size(body, len(raw_prompts), characters, "prompt")
        prompts = [
            encode_prompt(self._tokenizer, prompt, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in raw_prompts
        ]
        return self._completion_call("cmpl", body, prompts, body.max_tokens, adapter)

    def _check_size(
        self, body: ChatCompletionRequest | CompletionRequest, prompts: int, characters: int, param: str
    ) -> None:
        """Reject a call that is certainly too large before a template or the tokenizer spends time on it."""
        limits = self._limits
        check_range(body.n, limits.samples, "n", "samples")
        check_range(prompts * body.n, limits.requests, "prompt", "prompts times n")
        max_characters = limits.prompt_tokens * self._max_token_chars
        unit = (
            f"characters (at most {limits.prompt_tokens} tokens per prompt and {self._max_token_chars} characters per "
            "token)"
        )
        check_range(characters, max_characters, param, unit, min_value=0)

    def _completion_call(
        self,
        kind: str,
        body: ChatCompletionRequest | CompletionRequest,
        prompts: list[list[int]],
        max_tokens: int | None,
        adapter: str | None,
    ) -> CompletionCall:
        limits = self._limits
        param = "messages" if kind == "chatcmpl" else "prompt"
        for prompt in prompts:
            check_ids(prompt, param, limits)
        total_tokens = sum(map(len, prompts)) * body.n
        check_range(total_tokens, limits.prompt_tokens_in_all, param, "prompt tokens times n, over all prompts")
        check_range(body.seed or 0, 2**63 - 1, "seed", "as a seed", min_value=-(2**63))
        if body.stream_options is not None and not body.stream:
            raise InvalidBodyError("stream_options", "requires stream=true.")
        settings: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
        settings["max_tokens"] = self._default_max_tokens if max_tokens is None else max_tokens
        sampling = parse_sampling(settings, "", limits)
        if kind == "chatcmpl":
            sampling = with_stop_token(sampling, self._end_of_turn)
        id = f"{kind}-{uuid.uuid4().hex}"
        requests = [
            SampleRequest(
                request_id=f"{id}.{index}.{sample}",
                token_ids=ids,
                sampling=sampling,
                seed=_seed(body.seed, index, sample),
                group=f"{id}.{index}",
                deadline_s=self._deadline_s,
                adapter=adapter,
            )
            for index, ids in enumerate(map(to_token_array, prompts))  # all samples share one array
            for sample in range(body.n)
        ]
        return CompletionCall(id, int(time.time()), body, prompts, requests)

    # -- responses ---------------------------------------------------------------------------------------------------

    def to_response(
        self, call: CompletionCall, completions: Sequence[Completion], prompt_logprobs: Sequence[Sequence[float]] = ()
    ) -> dict[str, Any]:
        """Return the complete response of a call, as JSON-like values.

        Args:
            call: The call.
            completions: Completions of its requests, in the order of the requests.
            prompt_logprobs: For each prompt, the log-probs of all tokens but the first. Required if
                `call.has_prompt_logprobs`.

        Raises:
            EngineError: A completion was aborted.
        """
        choices = [self._choice(call, index, completion) for index, completion in enumerate(completions)]
        if isinstance(call.body, CompletionRequest) and call.body.echo:
            self._prepend_prompts(call, choices, prompt_logprobs)
        kind = "chat.completion" if call.chat else "text_completion"
        response = _head(call, kind) | {"choices": choices, "usage": _usage(call, completions)}
        if call.body.return_token_ids and call.chat:
            response["prompt_token_ids"] = call.prompts[0]
        return response

    def chunks(
        self, call: CompletionCall, completions: Sequence[Completion], prompt_logprobs: Sequence[Sequence[float]] = ()
    ) -> Iterator[dict[str, Any]]:
        """Yield the response as the chunks of a stream: two for each choice, then the token counts if requested.

        The first chunk of a choice contains its whole text, the second one its finish_reason.

        Args:
            call: The call.
            completions: Completions of its requests, in the order of the requests.
            prompt_logprobs: For each prompt, the log-probs of all tokens but the first. Required if
                `call.has_prompt_logprobs`.

        Raises:
            EngineError: A completion was aborted.
        """
        head = _head(call, "chat.completion.chunk" if call.chat else "text_completion")
        for choice in self.to_response(call, completions, prompt_logprobs)["choices"]:
            reason = choice["finish_reason"]
            content = {name: value for name, value in choice.items() if name != "message"} | {"finish_reason": None}
            end: dict[str, Any] = {"index": choice["index"], "logprobs": None, "finish_reason": reason}
            if call.chat:
                content["delta"], end["delta"] = choice["message"], {}
            else:
                end["text"] = ""
            yield head | {"choices": [content]}
            yield head | {"choices": [end]}
        if call.usage:
            yield head | {"choices": [], "usage": _usage(call, completions)}

    def _choice(self, call: CompletionCall, index: int, completion: Completion) -> dict[str, Any]:
        request = call.requests[index]
        if completion.stop_reason not in (StopReason.STOP, StopReason.LENGTH):
            raise EngineError(
                f"The completion ended with stop_reason={completion.stop_reason!r} after {len(completion.token_ids)} "
                f"tokens: its deadline of {self._deadline_s:g} s passed, or the engine was paused or put to sleep."
            )
        text, parts = self._text(call, request, completion)
        choice: dict[str, Any] = {"index": index, "finish_reason": completion.stop_reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
        if call.has_logprobs:
            logprobs = _logprobs(request, completion)
            choice["logprobs"] = _chat_logprobs(parts, logprobs) if call.chat else _text_logprobs(parts, logprobs)
        if call.body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
            choice["weight_versions"] = [[span.start, span.stop, span.version] for span in completion.versions]
            if not call.chat:
                choice["prompt_token_ids"] = request.token_ids.tolist()
        return choice

    def _text(
        self, call: CompletionCall, request: SampleRequest, completion: Completion
    ) -> tuple[str, list[TokenPart]]:
        """Return a completion's text before its stop string, and the text parts of its tokens if log-probs are
        needed."""
        ids = completion.token_ids
        is_message = isinstance(call.body, ChatCompletionRequest) and not call.body.continue_final_message

        def decode(length: int) -> str:
            if is_message:
                return decode_response(self._tokenizer, ids[:length])
            return decode_completion(self._tokenizer, ids[:length], request.token_ids)

        text = decode(len(ids))
        parts = []
        if call.has_logprobs:
            parts = self._aligner.align(text, ids.tolist(), get_undecoded_tokens(self._tokenizer))
        stop = completion.stop_text
        if stop is not None and stop in request.sampling.stop:  # the last token completes the stop string
            before = decode(len(ids) - 1).rstrip("\ufffd")
            at = text.find(stop, max(0, len(before) - len(stop) + 1))
            if at >= 0:
                text, parts = text[:at], _between(parts, 0, at)
        if is_message:  # a message excludes reasoning between control tokens; a continued message has begun elsewhere
            opened = get_reasoning_opening(self._tokenizer, request.token_ids.tolist())
            content = message_content(self._tokenizer, text, opened)
            if content != text:
                start = max(0, text.rfind(content))
                text, parts = content, _between(parts, start, start + len(content))
        return text, parts

    def _prepend_prompts(
        self, call: CompletionCall, choices: Sequence[dict[str, Any]], prompt_logprobs: Sequence[Sequence[float]]
    ) -> None:
        """Put each prompt before the texts of its choices, and its tokens before their tokens."""
        assert isinstance(call.body, CompletionRequest)
        for index, (raw_prompt, ids) in enumerate(zip(_prompts(call.body), call.prompts, strict=True)):
            if isinstance(raw_prompt, str):
                text = raw_prompt
            else:
                text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
            prompt: dict[str, Any] = {}
            if call.has_prompt_logprobs:
                prompt = _text_logprobs(self._aligner.align(text, ids), [None, *prompt_logprobs[index]])
            for choice in choices[index * call.body.n : (index + 1) * call.body.n]:
                choice["text"] = text + choice["text"]
                if prompt:
                    sampled = choice["logprobs"]
                    sampled["text_offset"] = [len(text) + offset for offset in sampled["text_offset"]]
                    for name in ("tokens", "token_logprobs", "text_offset"):
                        sampled[name] = prompt[name] + sampled[name]


def _prompts(body: CompletionRequest) -> Sequence[str | list[int]]:
    """Return the prompts of a text completion, each as text or token ids."""
    prompt: Any = body.prompt
    is_list_of_prompts = bool(prompt) and not isinstance(prompt, str) and not isinstance(prompt[0], int)
    return prompt if is_list_of_prompts else [prompt]


def _logprobs(request: SampleRequest, completion: Completion) -> list[float]:
    """Return the log-probs under the distribution sampled from, or under the model if greedy sampling makes them all
    0."""
    greedy = request.sampling.temperature == 0
    return (completion.full_logprobs if greedy else completion.logprobs).tolist()


def _chat_logprobs(parts: Sequence[TokenPart], logprobs: Sequence[float]) -> dict[str, Any]:
    content = [
        {"token": part.text, "logprob": logprob, "bytes": list(part.data), "top_logprobs": []}
        for part, logprob in zip(parts, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _text_logprobs(parts: Sequence[TokenPart], logprobs: Sequence[float | None]) -> dict[str, Any]:
    tokens = [part.text for part in parts]
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
    }


def _between(parts: Sequence[TokenPart], start: int, stop: int) -> list[TokenPart]:
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


def _message(message: ChatMessage) -> Message:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    rendered: Message = {"role": "system" if message.role == "developer" else message.role, "content": text}
    extras = {"name": message.name, "tool_call_id": message.tool_call_id}
    return rendered | {name: value for name, value in extras.items() if value is not None}


def _seed(seed: int | None, prompt: int, sample: int) -> int:
    return secrets.randbits(64) if seed is None else request_seed(seed, str(prompt), sample, 0, 0)


def _head(call: CompletionCall, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": call.body.model}


def _usage(call: CompletionCall, completions: Sequence[Completion]) -> dict[str, int]:
    prompt = sum(map(len, call.prompts))
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
