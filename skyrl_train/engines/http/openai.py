"""Translates OpenAI's chat and text completions to SampleRequests, and Completions to answers."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from skyrl_train.data.arrays import token_array
from skyrl_train.data.chat import decode_answer, decode_response, opened_reasoning, render_prompt
from skyrl_train.data.end_of_turn import end_of_turn_token
from skyrl_train.data.messages import continues_message
from skyrl_train.data.trajectory import Message
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.http.bodies import ChatBody, ChatMessage, TextBody, read_body
from skyrl_train.engines.http.codec import Malformed
from skyrl_train.engines.http.wire import Limits, check_ids, checked_sampling, within
from skyrl_train.engines.sampling import request_seed, with_stop_token
from skyrl_train.errors import EngineError

SAMPLED = [field.name for field in fields(SamplingParams) if field.name != "max_tokens"]


@dataclass(frozen=True)
class CompletionCall:
    """One call of a client: the requests to sample, and the data needed for the answer."""

    id: str
    created: int
    body: ChatBody | TextBody
    prompts: list[list[int]]
    requests: list[SampleRequest]
    """n requests for each prompt, in order."""

    @property
    def chat(self) -> bool:
        return isinstance(self.body, ChatBody)

    @property
    def usage(self) -> bool:
        """Whether a stream ends with the token counts."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage


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
        self._limits = limits
        self._longest = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token: more of them for each token, and a prompt has too many tokens."""
        self._default_max_tokens = default_max_tokens
        self._deadline_s = deadline_s
        self._chat_template_kwargs = dict(chat_template_kwargs or {})
        self._end_of_turn = end_of_turn_token(tokenizer, self._chat_template_kwargs)

    # -- in ----------------------------------------------------------------------------------------------------------

    def chat(self, raw: Any, adapter: str | None) -> CompletionCall:
        """Read a chat completion. Raises Malformed naming the parameter, DataError if the chat template refuses."""
        body = read_body(ChatBody, raw)
        if not body.messages:
            raise Malformed("messages", "must hold at least one message.")
        messages = [_message(message) for message in body.messages]
        if body.continue_final_message and not continues_message(messages):
            raise Malformed("continue_final_message", "needs a last message of the assistant.")
        if body.add_generation_prompt is body.continue_final_message:
            raise Malformed("add_generation_prompt", "must be the opposite of continue_final_message; leave it out.")
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
            raise Malformed("max_completion_tokens", "and max_tokens differ; give one of them.")
        return self._completion_call("chatcmpl", body, [prompt], next(iter(lengths), None), adapter)

    def text(self, raw: Any, adapter: str | None) -> CompletionCall:
        """Read a text completion; text is tokenised as it is, control tokens included. Raises Malformed."""
        body = read_body(TextBody, raw)
        if body.logprobs:
            raise Malformed("logprobs", f"must be 0 (the sampled tokens' own) or null, got {body.logprobs}.")
        prompt: Any = body.prompt
        several = bool(prompt) and not isinstance(prompt, str) and not isinstance(prompt[0], int)
        given = prompt if several else [prompt]
        characters = max((len(one) for one in given if isinstance(one, str)), default=0)
        self._check_size(body, len(given), characters, "prompt")
        prompts = [self._tokenizer(one)["input_ids"] if isinstance(one, str) else one for one in given]
        return self._completion_call("cmpl", body, prompts, body.max_tokens, adapter)

    def _check_size(self, body: ChatBody | TextBody, prompts: int, characters: int, param: str) -> None:
        """Refuse what is too much in any case before a template or the tokenizer sees it. Raises Malformed."""
        limits = self._limits
        within(body.n, limits.samples, "n", "samples")
        within(prompts * body.n, limits.requests, "prompt", "prompts times n")
        most = limits.prompt_tokens * self._longest
        what = f"characters: a prompt has at most {limits.prompt_tokens} tokens, and a token {self._longest} characters"
        within(characters, most, param, what, least=0)

    def _completion_call(
        self,
        kind: str,
        body: ChatBody | TextBody,
        prompts: list[list[int]],
        max_tokens: int | None,
        adapter: str | None,
    ) -> CompletionCall:
        limits = self._limits
        param = "messages" if kind == "chatcmpl" else "prompt"
        for prompt in prompts:
            check_ids(prompt, param, limits)
        in_all = sum(map(len, prompts)) * body.n
        within(in_all, limits.prompt_tokens_in_all, param, "prompt tokens times n, all prompts together")
        within(body.seed or 0, 2**63 - 1, "seed", "as a seed", least=-(2**63))
        if body.stream_options is not None and not body.stream:
            raise Malformed("stream_options", "belongs to stream=true.")
        given: dict[str, Any] = {name: getattr(body, name) for name in SAMPLED}
        given["max_tokens"] = self._default_max_tokens if max_tokens is None else max_tokens
        sampling = checked_sampling(given, "", limits)
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
            for index, ids in enumerate(map(token_array, prompts))  # one copy for all samples
            for sample in range(body.n)
        ]
        return CompletionCall(id, int(time.time()), body, prompts, requests)

    # -- out ---------------------------------------------------------------------------------------------------------

    def answer(self, call: CompletionCall, completions: Sequence[Completion]) -> dict[str, Any]:
        """The complete answer. Raises EngineError if a completion was aborted."""
        choices = [self._choice(call, index, done) for index, done in enumerate(completions)]
        kind = "chat.completion" if call.chat else "text_completion"
        answer = _head(call, kind) | {"choices": choices, "usage": _usage(call, completions)}
        if call.body.return_token_ids and call.chat:
            answer["prompt_token_ids"] = call.prompts[0]
        return answer

    def chunks(self, call: CompletionCall, completions: Sequence[Completion]) -> Iterator[dict[str, Any]]:
        """The answer as a stream: for every choice a chunk and its end, then the token counts if requested."""
        head = _head(call, "chat.completion.chunk" if call.chat else "text_completion")
        for choice in self.answer(call, completions)["choices"]:
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
        if isinstance(call.body, ChatBody) and not call.body.continue_final_message:
            opened = opened_reasoning(self._tokenizer, request.token_ids.tolist())
            text = decode_answer(self._tokenizer, completion.token_ids, opened)
        else:  # the rest of a message, whose beginning may have opened reasoning, is not a message itself
            text = decode_response(self._tokenizer, completion.token_ids)
        if completion.stop_text in request.sampling.stop:
            at = text.rfind(completion.stop_text)
            text = text[:at] if at >= 0 else text
        choice: dict[str, Any] = {"index": index, "finish_reason": completion.stop_reason, "logprobs": None}
        choice |= {"message": {"role": "assistant", "content": text}} if call.chat else {"text": text}
        if isinstance(call.body, ChatBody) and call.body.logprobs:
            choice["logprobs"] = {"content": self._chat_logprobs(completion), "refusal": None}
        if isinstance(call.body, TextBody) and call.body.logprobs is not None:
            choice["logprobs"] = self._text_logprobs(completion)
        if call.body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
            choice["weight_versions"] = [[span.start, span.stop, span.version] for span in completion.versions]
            if not call.chat:
                choice["prompt_token_ids"] = request.token_ids.tolist()
        return choice

    def _chat_logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        return [
            {"token": token, "logprob": logprob, "bytes": _bytes(token), "top_logprobs": []}
            for token, logprob in zip(self._tokens(completion), completion.logprobs.tolist(), strict=True)
        ]

    def _text_logprobs(self, completion: Completion) -> dict[str, Any]:
        tokens = self._tokens(completion)
        offsets = list(accumulate(map(len, tokens), initial=0))[:-1]
        return {
            "tokens": tokens,
            "token_logprobs": completion.logprobs.tolist(),
            "top_logprobs": None,
            "text_offset": offsets,
        }

    def _tokens(self, completion: Completion) -> list[str]:
        return [self._tokenizer.decode([token], skip_special_tokens=False) for token in completion.token_ids.tolist()]


def _message(message: ChatMessage) -> Message:
    content = message.content
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    rendered: Message = {"role": "system" if message.role == "developer" else message.role, "content": text}
    extras = {"name": message.name, "tool_call_id": message.tool_call_id}
    return rendered | {name: value for name, value in extras.items() if value is not None}


def _bytes(token: str) -> list[int] | None:
    """The bytes of a token's text; None if it is only a part of a character."""
    return None if "\ufffd" in token else list(token.encode())


def _seed(seed: int | None, prompt: int, sample: int) -> int:
    return secrets.randbits(64) if seed is None else request_seed(seed, str(prompt), sample, 0, 0)


def _head(call: CompletionCall, kind: str) -> dict[str, Any]:
    return {"id": call.id, "object": kind, "created": call.created, "model": call.body.model}


def _usage(call: CompletionCall, completions: Sequence[Completion]) -> dict[str, int]:
    prompt = sum(map(len, call.prompts))
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
