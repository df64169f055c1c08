"""Translation of OpenAI's text completions to SampleRequests, and of Completions to responses."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any

from skyrl_train.data.chat import (
    decode_completion,
    encode_prompt,
    get_undecoded_tokens,
)
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.token_texts import TokenAligner, TokenPart
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams, StopReason
from skyrl_train.engines.http.chat_sampler import cut_at_stop
from skyrl_train.engines.http.json_body import InvalidBodyError, parse_body
from skyrl_train.engines.http.openai_protocol import CompletionRequest
from skyrl_train.engines.http.protocol import Limits, check_ids, check_range, parse_sampling
from skyrl_train.engines.sampling_params import request_seed
from skyrl_train.errors import EngineError

_SAMPLING_FIELDS = [field.name for field in fields(SamplingParams) if field.name != "max_tokens"]


@dataclass(frozen=True)
class CompletionCall:
    """A client's call: the requests to sample, and the data that the response needs."""

    id: str
    created: int
    """Unix time of the call."""
    body: CompletionRequest
    prompts: list[list[int]]
    """Token ids of each prompt."""
    requests: list[SampleRequest]
    """`n` requests for each prompt, in order."""

    @property
    def usage(self) -> bool:
        """True if a stream ends with the token counts."""
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    @property
    def has_logprobs(self) -> bool:
        """True if the response contains log-probs."""
        return self.body.logprobs is not None

    @property
    def has_prompt_logprobs(self) -> bool:
        """True if the response also contains the log-probs of the prompts' tokens."""
        return self.body.echo and self.has_logprobs


class Translator:
    """A translator of bodies to requests, and of completions to responses. It keeps no state between calls."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        limits: Limits,
        default_max_tokens: int,
        deadline_s: float,
    ):
        """Create a translator.

        Args:
            tokenizer: The model's tokenizer. The translator calls it in the calling thread.
            limits: Limits of a call.
            default_max_tokens: max_tokens of calls without it.
            deadline_s: Deadline of every request.
        """
        self._tokenizer = tokenizer
        self._aligner = TokenAligner(tokenizer)
        self._limits = limits
        self._max_token_chars = max(map(len, tokenizer.get_vocab()))
        """Characters of the longest token, which bounds the number of tokens of a text from below."""
        self._default_max_tokens = default_max_tokens
        self._deadline_s = deadline_s

    # -- requests ----------------------------------------------------------------------------------------------------

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
        self._check_size(body, len(raw_prompts), characters)
        prompts = [
            encode_prompt(self._tokenizer, prompt, add_special_tokens=body.add_special_tokens)
            if isinstance(prompt, str)
            else prompt
            for prompt in raw_prompts
        ]
        return self._completion_call(body, prompts, adapter)

    def _check_size(self, body: CompletionRequest, prompts: int, characters: int) -> None:
        """Reject a call that is certainly too large before the tokenizer spends time on it."""
        limits = self._limits
        check_range(body.n, limits.samples, "n", "samples")
        check_range(prompts * body.n, limits.requests, "prompt", "prompts times n")
        max_characters = limits.prompt_tokens * self._max_token_chars
        unit = (
            f"characters (at most {limits.prompt_tokens} tokens per prompt and {self._max_token_chars} characters per "
            "token)"
        )
        check_range(characters, max_characters, "prompt", unit, min_value=0)

    def _completion_call(
        self, body: CompletionRequest, prompts: list[list[int]], adapter: str | None
    ) -> CompletionCall:
        limits = self._limits
        for prompt in prompts:
            check_ids(prompt, "prompt", limits)
        total_tokens = sum(map(len, prompts)) * body.n
        check_range(total_tokens, limits.prompt_tokens_in_all, "prompt", "prompt tokens times n, over all prompts")
        check_range(body.seed or 0, 2**63 - 1, "seed", "as a seed", min_value=-(2**63))
        if body.stream_options is not None and not body.stream:
            raise InvalidBodyError("stream_options", "requires stream=true.")
        settings: dict[str, Any] = {name: getattr(body, name) for name in _SAMPLING_FIELDS}
        settings["max_tokens"] = self._default_max_tokens if body.max_tokens is None else body.max_tokens
        sampling = parse_sampling(settings, "", limits)
        id = f"cmpl-{uuid.uuid4().hex}"
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
        if call.body.echo:
            self._prepend_prompts(call, choices, prompt_logprobs)
        return _head(call) | {"choices": choices, "usage": _usage(call, completions)}

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
        head = _head(call)
        for choice in self.to_response(call, completions, prompt_logprobs)["choices"]:
            yield head | {"choices": [choice | {"finish_reason": None}]}
            end = {"index": choice["index"], "text": "", "logprobs": None, "finish_reason": choice["finish_reason"]}
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
        choice: dict[str, Any] = {
            "index": index,
            "text": text,
            "finish_reason": completion.stop_reason,
            "logprobs": _text_logprobs(parts, _logprobs(request, completion)) if call.has_logprobs else None,
        }
        if call.body.return_token_ids:
            choice["token_ids"] = completion.token_ids.tolist()
            choice["weight_versions"] = [[span.start, span.stop, span.version] for span in completion.versions]
            choice["prompt_token_ids"] = request.token_ids.tolist()
        return choice

    def _text(
        self, call: CompletionCall, request: SampleRequest, completion: Completion
    ) -> tuple[str, Sequence[TokenPart]]:
        """Return a completion's text before its stop string, and the text parts of its tokens if log-probs are
        needed."""
        ids = completion.token_ids

        def decode(length: int) -> str:
            return decode_completion(self._tokenizer, ids[:length], request.token_ids)

        text = decode(len(ids))
        parts: Sequence[TokenPart] = []
        if call.has_logprobs:
            parts = self._aligner.align(text, ids.tolist(), get_undecoded_tokens(self._tokenizer))
        stop = completion.stop_text
        if stop is not None and stop in request.sampling.stop:  # the last token completes the stop string
            text, parts = cut_at_stop(text, parts, stop, decode(len(ids) - 1))
        return text, parts

    def _prepend_prompts(
        self, call: CompletionCall, choices: Sequence[dict[str, Any]], prompt_logprobs: Sequence[Sequence[float]]
    ) -> None:
        """Put each prompt before the texts of its choices, and its tokens before their tokens."""
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


def _text_logprobs(parts: Sequence[TokenPart], logprobs: Sequence[float | None]) -> dict[str, Any]:
    tokens = [part.text for part in parts]
    return {
        "tokens": tokens,
        "token_logprobs": list(logprobs),
        "top_logprobs": None,
        "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
    }


def _seed(seed: int | None, prompt: int, sample: int) -> int:
    return secrets.randbits(64) if seed is None else request_seed(seed, str(prompt), sample, 0, 0)


def _head(call: CompletionCall) -> dict[str, Any]:
    return {"id": call.id, "object": "text_completion", "created": call.created, "model": call.body.model}


def _usage(call: CompletionCall, completions: Sequence[Completion]) -> dict[str, int]:
    prompt = sum(map(len, call.prompts))
    sampled = sum(len(completion.token_ids) for completion in completions)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}
