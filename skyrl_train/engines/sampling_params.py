"""Sampling parameters that mean the same for every engine, seeds of requests, and checks of requests."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from typing import Any

import numpy as np

from skyrl_train.config.section import FRACTION, POSITIVE_FRACTION, REPETITION_PENALTY_RANGE, TEMPERATURE_RANGE, Range
from skyrl_train.data.token_arrays import Tokens, to_int_tuple
from skyrl_train.engines.base import Capabilities, SampleRequest, SamplingParams
from skyrl_train.engines.lifecycle import MEMORY_TAGS
from skyrl_train.errors import ConfigError, EngineError, UnsupportedParameter

_MAX_TOKENS_ALIASES = ("max_tokens", "max_generate_length", "max_new_tokens")
_IGNORED = {"logprobs"}
"""Accepted without effect: engines always return the log-probs of sampled tokens."""
_OFF_VALUES = {
    field.name: field.default
    for field in fields(SamplingParams)
    if field.name not in ("max_tokens", "temperature", "ignore_eos")
}


def parse_sampling_params(config: Any, key: str = "sampling_params") -> SamplingParams:
    """Convert a sampling section with SkyRL's or vLLM's names to SamplingParams.

    top_k -1 and 0 both turn top-k off, `stop` may be a string or a list, and None stands for the default.

    Args:
        config: A dataclass or a mapping.
        key: Prefix of the parameter names in error messages, such as "generator.sampling_params".

    Raises:
        ConfigError: A parameter is unknown or its value is not allowed. The message lists every problem with key, value
            and what is allowed.
    """
    settings = asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config)
    values: dict[str, Any] = {}
    lengths = {name: settings.pop(name) for name in _MAX_TOKENS_ALIASES if settings.get(name) is not None}
    problems: list[str] = []
    if len(set(lengths.values())) != 1:
        problems.append(f"{key}: give exactly one of {', '.join(_MAX_TOKENS_ALIASES)}, got {lengths or 'none'}.")
    else:
        values["max_tokens"] = next(iter(lengths.values()))
    known = {field.name for field in fields(SamplingParams)}
    for name, value in settings.items():
        if name in _IGNORED or value is None:
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            problems.append(f"{key}.{name} is not a sampling parameter.{hint}")
        else:
            values[name] = _normalize(name, value)
    for name, value in values.items():
        allowed, is_allowed = SAMPLING_RULES[name]
        if not is_allowed(value):
            problems.append(f"{key}.{name}={value!r} is not allowed: {allowed}.")
    if not problems and values.get("min_tokens", 0) > values["max_tokens"]:
        problems.append(
            f"{key}.min_tokens={values['min_tokens']} is more than max_tokens={values['max_tokens']}. "
            "Lower min_tokens or raise max_tokens."
        )
    if problems:
        raise ConfigError("\n".join(problems))
    return SamplingParams(**values)


def request_seed(run_seed: int, uid: str, sample: int, turn: int, step: int) -> int:
    """Return a 64-bit seed for one request: a hash of the arguments that is the same in every process and on every
    node.

    Args:
        run_seed: The seed of the run.
        uid: Id of the prompt.
        sample: Index of the sample among those of the prompt.
        turn: Index of the turn in the episode.
        step: Training step, or another number that distinguishes requests for the same prompt.
    """
    text = "\0".join((str(run_seed), str(uid), str(sample), str(turn), str(step)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def with_stop_token(params: SamplingParams, token: int | None) -> SamplingParams:
    """Return `params` with `token` as an additional stop token.

    Callers that render prompts with their own chat template add its end-of-turn token this way, because an engine only
    knows the end-of-turn token of its model's template. `params` is returned unchanged if `token` is None or present
    already, or if `params` ignores end-of-sequence tokens.
    """
    if token is None or params.ignore_eos or token in params.stop_token_ids:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, token))


def check_supported(params: SamplingParams, capabilities: Capabilities) -> None:
    """Check that an engine supports these sampling parameters.

    Raises:
        UnsupportedParameter: A value is out of range, or a parameter is on that the engine does not support. The
            message names the engine, the parameter and what is allowed.
    """
    for name, (allowed, is_allowed) in SAMPLING_RULES.items():
        if not is_allowed(value := getattr(params, name)):
            raise UnsupportedParameter(
                f"Engine {capabilities.name!r} does not support {name}={value!r}; allowed: {allowed}."
            )
    for name, value in active_params(params).items():
        if name not in capabilities.sampling:
            supported = ", ".join(sorted(capabilities.sampling)) or "nothing beyond max_tokens"
            raise UnsupportedParameter(
                f"Engine {capabilities.name!r} does not support {name}={value!r}. It supports: {supported}. "
                f"Turn {name} off or choose another engine."
            )


def check_options(request: SampleRequest, capabilities: Capabilities) -> None:
    """Check that an engine supports `top_logprobs` and `json_schema` of a request.

    Raises:
        UnsupportedParameter: The engine does not support an option or its value. The message names both.
    """
    engine, most = f"Engine {capabilities.name!r}", capabilities.max_top_logprobs
    if not 0 <= request.top_logprobs <= most:
        reason = capabilities.refusals.get("top_logprobs", "")
        raise UnsupportedParameter(
            f"{engine} does not support top_logprobs={request.top_logprobs}; allowed: 0 to {most}. {reason}".rstrip()
        )
    if request.json_schema is None:
        return
    if not capabilities.json_schema:
        reason = capabilities.refusals.get("json_schema", "leave it out.")
        raise UnsupportedParameter(f"{engine} does not support json_schema: {reason}")
    for name in ("min_tokens", "ignore_eos"):
        if value := getattr(request.sampling, name):
            raise UnsupportedParameter(
                f"{engine} does not support json_schema together with {name}={value}: the response ends with the JSON. "
                f"Leave {name} out."
            )


def active_params(params: SamplingParams) -> dict[str, Any]:
    """Return the parameters that are on, by name: those that an engine must support.

    max_tokens is never among them, and temperatures 0 and 1 are not either, because every engine supports them.
    """
    values = {name: getattr(params, name) for name, off in _OFF_VALUES.items() if getattr(params, name) != off}
    if params.temperature not in (0.0, 1.0):  # every engine can be greedy
        values["temperature"] = params.temperature
    if params.ignore_eos:
        values["ignore_eos"] = True
    return values


def _normalize(name: str, value: Any) -> Any:
    if name == "top_k":
        return 0 if value == -1 else value
    if name == "stop":
        return (value,) if isinstance(value, str) else tuple(value)
    if name == "stop_token_ids":
        return tuple(value)
    return float(value) if type(value) is int and name in _FLOATS else value


def _number(allowed: Range) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and math.isfinite(value) and value in allowed


def _integer(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= low


_FLOATS = {"temperature", "top_p", "min_p", "repetition_penalty"}
SAMPLING_RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    "max_tokens": ("an integer of at least 1", _integer(1)),
    "temperature": (
        f"0 (greedy) or a finite number of at least {TEMPERATURE_RANGE.low}",
        _number(TEMPERATURE_RANGE),
    ),
    "top_p": ("more than 0 and at most 1; 1 is off", _number(POSITIVE_FRACTION)),
    "top_k": ("an integer of at least 1; -1 or 0 is off", _integer(0)),
    "min_p": ("from 0 to 1; 0 is off", _number(FRACTION)),
    "repetition_penalty": ("from 0.01 to 100; 1 is off", _number(REPETITION_PENALTY_RANGE)),
    "min_tokens": ("an integer of at least 0", _integer(0)),
    "stop": ("non-empty strings", lambda value: all(isinstance(text, str) and text for text in value)),
    "stop_token_ids": ("integers of at least 0", lambda value: all(type(i) is int and i >= 0 for i in value)),
    "ignore_eos": ("true or false", lambda value: isinstance(value, bool)),
}
"""Allowed values of each sampling parameter: a description and a predicate on the normalized value."""


def check_unique_request_ids(engine: str, requests: Iterable[SampleRequest], active_ids: Container[str]) -> None:
    """Check that no two requests of an engine have the same id.

    Args:
        engine: Name of the engine, for the error message.
        requests: The new requests.
        active_ids: Ids of the requests that are queued or running.

    Raises:
        UnsupportedParameter: An id is in `active_ids` or occurs twice in `requests`.
    """
    new_ids: set[str] = set()
    for request in requests:
        if request.request_id in active_ids or request.request_id in new_ids:
            raise UnsupportedParameter(
                f"Engine {engine!r}: request id {request.request_id!r} is in use. Give each request its own id."
            )
        new_ids.add(request.request_id)


def check_logprobs(engine: str, *logprobs: Iterable[float]) -> None:
    """Check that all log-probs are finite. Only broken weights cause other values, never a request's parameters.

    Raises:
        EngineError: A log-prob is not finite; the message names `engine`.
    """
    if not all(math.isfinite(logprob) for values in logprobs for logprob in values):
        raise EngineError(f"Engine {engine!r}: the model's logits are not finite; its weights are broken.")


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """The checks of arguments for one engine.

    Each method raises UnsupportedParameter; the message names the engine, the value, and what is allowed.
    """

    capabilities: Capabilities
    vocab_size: int
    max_model_len: int
    """Maximum number of tokens of a prompt plus its response."""
    max_score_len: int
    """Maximum number of tokens of a sequence to score."""

    def check_request(self, request: SampleRequest, adapters: Collection[str]) -> None:
        """Check a request to sample: sampling parameters, stop tokens, adapter, token ids and prompt length.

        Args:
            request: The request.
            adapters: Names of the loaded adapters.

        Raises:
            UnsupportedParameter: The engine cannot run the request.
        """
        check_supported(request.sampling, self.capabilities)
        if request.top_logprobs or request.json_schema is not None:
            check_options(request, self.capabilities)
        self._check_stop_token_ids(request.sampling)
        if request.adapter is not None and request.adapter not in adapters:
            known = ", ".join(sorted(adapters)) or self.capabilities.refusals.get("adapter", "none")
            raise self._unsupported(f"adapter={request.adapter!r}", f"adapters loaded: {known}")
        what = f"request {request.request_id!r}"
        self._check_token_ids(what, request.token_ids)
        if len(request.token_ids) >= self.max_model_len:
            raise self._unsupported(
                what,
                f"its prompt has {len(request.token_ids)} tokens, max_model_len={self.max_model_len} leaves none to "
                "sample. Shorten the prompt or raise max_model_len",
            )
        if not 0 <= request.known_routing <= len(request.token_ids):
            allowed = f"from 0 to {len(request.token_ids)}, the length of the prompt"
            raise self._unsupported(f"{what}: known_routing={request.known_routing}", f"it must be {allowed}")

    def check_score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[tuple[int, ...]]:
        """Check the arguments of `InferenceEngine.score`.

        Returns:
            `token_ids` as tuples of Python integers.

        Raises:
            UnsupportedParameter: The temperature is not supported, or a sequence is empty, too long, or holds ids that
                are not in the vocabulary.
        """
        if temperature != 1.0 and not self.capabilities.score_temperature:
            raise self._unsupported(
                f"score(temperature={temperature})", self.capabilities.refusals["score.temperature"]
            )
        sequences = [to_int_tuple(ids) for ids in token_ids]
        for ids in sequences:
            self._check_token_ids("score", ids)
            if len(ids) > self.max_score_len:
                raise self._unsupported(
                    "score",
                    f"a sequence has at most {self.max_score_len} tokens, got {len(ids)}. "
                    "Shorten it or raise max_model_len",
                )
        return sequences

    def check_pause(self, mode: str) -> None:
        """Check the mode of `pause`.

        Raises:
            UnsupportedParameter: The engine does not support the mode.
        """
        if mode not in self.capabilities.pause_modes:
            reason = self.capabilities.refusals.get(f"pause.{mode}", "")
            allowed = f"Its pause modes are {', '.join(sorted(self.capabilities.pause_modes))}"
            raise self._unsupported(f"pause(mode={mode!r})", f"{reason} {allowed}".strip())

    def check_wake_up(self, tags: Sequence[str] | None) -> None:
        """Check the tags of `wake_up`; None, which stands for all of them, is valid.

        Raises:
            UnsupportedParameter: A tag is not in MEMORY_TAGS.
        """
        if unknown := set(tags or ()) - MEMORY_TAGS:
            raise self._unsupported(f"wake_up({sorted(unknown)})", f"its tags are {', '.join(sorted(MEMORY_TAGS))}")

    def check_adapter(self, name: str) -> None:
        """Check that the engine can load adapters; `name` is the adapter's, for the message.

        Raises:
            UnsupportedParameter: The engine does not support adapters.
        """
        if not self.capabilities.lora:
            raise self._unsupported(f"adapter={name!r}", self.capabilities.refusals["adapter"])

    def _check_stop_token_ids(self, sampling: SamplingParams) -> None:
        ids = sampling.stop_token_ids
        if invalid := [token for token in ids if not 0 <= token < self.vocab_size]:
            raise self._unsupported(
                f"stop_token_ids with {invalid[0]}", f"token ids must be in 0..{self.vocab_size - 1}"
            )
        if sampling.min_tokens and 2 * len(set(ids)) > self.vocab_size:
            raise self._unsupported(
                f"{len(set(ids))} stop_token_ids with min_tokens={sampling.min_tokens}",
                f"stop tokens are forbidden before min_tokens and may be at most half of the {self.vocab_size} tokens, "
                "so that tokens to sample remain",
            )

    def _check_token_ids(self, what: str, ids: Sequence[int] | Tokens) -> None:
        if not len(ids):
            raise self._unsupported(what, "it has no tokens")
        array = np.asarray(ids)
        lowest, highest = int(array.min()), int(array.max())
        if lowest < 0 or highest >= self.vocab_size:
            allowed = f"token ids must be in 0..{self.vocab_size - 1}, got {lowest}..{highest}"
            raise self._unsupported(what, allowed)

    def _unsupported(self, what: str, reason: str) -> UnsupportedParameter:
        return UnsupportedParameter(f"Engine {self.capabilities.name!r} rejects {what}: {reason.rstrip('.')}.")
