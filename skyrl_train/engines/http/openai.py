"""Translates OpenAI's chat and text completions to SampleRequests, and Completions to answers."""

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
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.http.json_body import InvalidBodyError, parse_body
from skyrl_train.engines.http.openai_protocol import ChatCompletionRequest, ChatMessage, CompletionRequest
from skyrl_train.engines.http.protocol import Limits, check_ids, check_range, parse_sampling
from skyrl_train.engines.sampling_params import request_seed, with_stop_token
from skyrl_train.errors import EngineError

_SAMPLING_FIELDS = [field.name for field in fields(SamplingParams) if field.name != "max_tokens"]


@dataclass(frozen=True)
class CompletionCall:
    """One call of a client: the requests to sample, and the data needed for the answer."""

    id: str
    created: int
    body: ChatCompletionRequest | CompletionRequest
    prompts: list[list[int]]
    requests: list[SampleRequest]
    """n requests for each prompt, in order."""

    @property
    def chat(self) -> bool:
        return isinstance(self.body, ChatCompletionRequest)

    @property
    def usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    @property
    def has_logprobs(self) -> bool:
        """True if the answer holds log-probs."""
        return self.body.logprobs if isinstance(self.body, ChatCompletionRequest) else self.body.logprobs is not None

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if the answer holds the log-probs of the prompts' tokens, too."""
        return isinstance(self.body, CompletionRequest) and self.body.echo and self.has_logprobs


class Translator:
    """Translates bodies to requests, and completions to answers; has no state between calls."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        limits: Limits,
        default_max_tokens: int,
        deadline_s: float,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ):
        """`default_max_tokens`: for calls that name none. `deadline_s`: of every request."""
        self._tokenizer = tokenizer
        self._aligner = TokenAligner(tokenizer)
        self._limits = limits
        self._longest = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token: more of them for each token, and a prompt has too many tokens."""
        self._default_max_tokens = default_max_tokens
        self._deadline_s = deadline_s
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._end_of_turn = find_end_of_turn_token(tokenizer, self._chat_template_kwargs)

    # -- in ----------------------------------------------------------------------------------------------------------

    def chat(self, raw: Any, adapter: str | None) -> CompletionCall:
        """Read a chat completion. Raises Malformed naming the parameter, DataError if the chat template refuses."""
        body: ChatCompletionRequest = parse_body(ChatCompletionRequest, raw)
        if not body.messages:
            raise InvalidBodyError("messages", "must hold at least one message.")
        messages = [_message(message) for message in body.messages]
        if body.continue_final_message and not continues_last_message(messages):
            raise InvalidBodyError("continue_final_message", "needs a last message of the assistant.")
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
        """Read a text completion; text may spell control tokens. Raises Malformed."""
        body: CompletionRequest = parse_body(CompletionRequest, raw)
        if body.logprobs:
            raise InvalidBodyError("logprobs", f"must be 0 (the sampled tokens' own) or null, got {body.logprobs}.")
        if body.echo and body.logprobs is not None and adapter is not None:
            raise InvalidBodyError("echo", "with logprobs is not supported for adapters; leave out one of them.")
        given = _prompts(body)
        characters = max((len(one) for one in given if isinstance(one, str)), default=0)
        self._check_size(body, len(given), characters, "prompt")
        prompts = [
            encode_prompt(self._tokenizer, one, add_special_tokens=body.add_special_tokens)
            if isinstance(one, str)
            else one
            for one in given
        ]
        return self._completion_call("cmpl", body, prompts, body.max_tokens, adapter)

    def _check_size(
        self, body: ChatCompletionRequest | CompletionRequest, prompts: int, characters: int, param: str
    ) -> None:
        """Refuse what is too much in any case before a template or the tokenizer sees it. Raises Malformed."""
        limits = self._limits
        check_range(body.n, limits.samples, "n", "samples")
        check_range(prompts * body.n, limits.requests, "prompt", "prompts times n")
        most = limits.prompt_tokens * self._longest
        what = f"characters: a prompt has at most {limits.prompt_tokens} tokens, and a token {self._longest} characters"
        check_range(characters, most, param, what, min_value=0)

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
        in_all = sum(map(len, prompts)) * body.n
        check_range(in_all, limits.prompt_tokens_in_all, param, "prompt tokens times n, all prompts together")
        check_range(body.seed or 0, 2**63 - 1, "seed", "as a seed", min_value=-(2**63))
        if body.stream_options is not None and not body.stream:
            raise InvalidBodyError("stream_options", "belongs to stream=true.")
        given: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
        given["max_tokens"] = self._default_max_tokens if max_tokens is None else max_tokens
        sampling = parse_sampling(given, "", limits)
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
            for index, ids in enumerate(map(to_token_array, prompts))  # one copy for all samples
            for sample in range(body.n)
        ]
        return CompletionCall(id, int(time.time()), body, prompts, requests)

    # -- out ---------------------------------------------------------------------------------------------------------

    def answer(
        self, call: CompletionCall, completions: Sequence[Completion], prompt_logprobs: Sequence[Sequence[float]] = ()
    ) -> dict[str, Any]:
        """Return the complete answer. Raises EngineError if a completion was aborted.

        Args:
            prompt_logprobs: For each prompt, the log-probs of all tokens but the first, if the call needs them.
        """
        choices = [self._choice(call, index, done) for index, done in enumerate(completions)]
        if isinstance(call.body, CompletionRequest) and call.body.echo:
            self._put_prompts(call, choices, prompt_logprobs)
        kind = "chat.completion" if call.chat else "text_completion"
        answer = _head(call, kind) | {"choices": choices, "usage": _usage(call, completions)}
        if call.body.return_token_ids and call.chat:
            answer["prompt_token_ids"] = call.prompts[0]
        return answer

    def chunks(
        self, call: CompletionCall, completions: Sequence[Completion], prompt_logprobs: Sequence[Sequence[float]] = ()
    ) -> Iterator[dict[str, Any]]:
        """The answer as a stream: for every choice a chunk and its end, then the token counts if requested."""
        head = _head(call, "chat.completion.chunk" if call.chat else "text_completion")
        for choice in self.answer(call, completions, prompt_logprobs)["choices"]:
            reason = choice["finish_reason"]
            piece = {name: value for name, value in choice.items() if name != "message"} | {"finish_reason": None}
            end: dict[str, Any] = {"index": choice["index"], "logprobs": None, "finish_reason": reason}
            if call.chat:
                piece["delta"], end["delta"] = choice["message"], {}
            else:
                end["text"] = ""
            yield head | {"choices": [piece]}
            yield head | {"choices": [end]}
        if call.usage:
            yield head | {"choices": [], "usage": _usage(call, completions)}

    def _choice(self, call: CompletionCall, index: int, completion: Completion) -> dict[str, Any]:
        request = call.requests[index]
        if completion.stop_reason not in ("stop", "length"):
            raise EngineError(
                f"The completion ended as {completion.stop_reason!r} after {len(completion.token_ids)} tokens: its "
                f"deadline of {self._deadline_s:g} s passed, or the engine was paused or put to sleep."
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
        """Return a completion's text before its stop string, and its tokens' parts if the call wants log-probs."""
        ids = completion.token_ids
        is_message = isinstance(call.body, ChatCompletionRequest) and not call.body.continue_final_message

        def decoded(length: int) -> str:
            if is_message:
                return decode_response(self._tokenizer, ids[:length])
            return decode_completion(self._tokenizer, ids[:length], request.token_ids)

        text = decoded(len(ids))
        parts = []
        if call.has_logprobs:
            parts = self._aligner.align(text, ids.tolist(), get_undecoded_tokens(self._tokenizer))
        stop = completion.stop_text
        if stop is not None and stop in request.sampling.stop:  # the last token completes it
            before = decoded(len(ids) - 1).rstrip("\ufffd")
            at = text.find(stop, max(0, len(before) - len(stop) + 1))
            if at >= 0:
                text, parts = text[:at], _between(parts, 0, at)
        if is_message:  # reasoning between control tokens is not in the message; a client has the start of others
            opened = get_reasoning_opening(self._tokenizer, request.token_ids.tolist())
            content = message_content(self._tokenizer, text, opened)
            if content != text:
                start = max(0, text.rfind(content))
                text, parts = content, _between(parts, start, start + len(content))
        return text, parts

    def _put_prompts(
        self, call: CompletionCall, choices: Sequence[dict[str, Any]], prompt_logprobs: Sequence[Sequence[float]]
    ) -> None:
        """Put each prompt before its choices' texts, and its tokens before theirs."""
        assert isinstance(call.body, CompletionRequest)
        for index, (given, ids) in enumerate(zip(_prompts(call.body), call.prompts, strict=True)):
            text = given if isinstance(given, str) else str(self._tokenizer.decode(ids, skip_special_tokens=False))
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
    """Return the prompts of a completion, each as text or ids."""
    prompt: Any = body.prompt
    several = bool(prompt) and not isinstance(prompt, str) and not isinstance(prompt[0], int)
    return prompt if several else [prompt]


def _logprobs(request: SampleRequest, completion: Completion) -> list[float]:
    """Return the log-probs of the distribution sampled from; if greedy, where those are all 0, the model's own."""
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
    """Return what each part has of the characters [start, stop) of all parts; empty parts for tokens outside."""
    kept = []
    at = 0
    for part in parts:
        end = at + len(part.text)
        first, last = max(start - at, 0), stop - at
        if at >= stop or end < start or (end == start and part.text):  # bytes without text belong to what follows
            part = TokenPart("", b"")
        elif first or end > stop:
            dropped = len(part.text[:first].encode()), len(part.text[last:].encode())
            part = TokenPart(part.text[first:last], part.data[dropped[0] : len(part.data) - dropped[1]])
        kept.append(part)
        at = end
    return kept


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
