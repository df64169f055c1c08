"""What engines may be asked: sampling parameters that mean the same for every engine, seeds, and checks of requests."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
"""Log-probs of the sampled tokens are always returned."""
_OFF = {
    field.name: field.default
    for field in fields(SamplingParams)
    if field.name not in ("max_tokens", "temperature", "ignore_eos")
}


def parse_sampling_params(config: Any, key: str = "sampling_params") -> SamplingParams:
    """Convert a sampling section (dataclass or mapping, with SkyRL's or vLLM's names) to SamplingParams.

    top_k -1 and 0 are both off, stop may be a string or a list, None means the default. `key` is the prefix of names in
    messages. Raises ConfigError listing every wrong value: key, value, what is allowed.
    """
    given = asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config)
    values: dict[str, Any] = {}
    lengths = {name: given.pop(name) for name in _MAX_TOKENS_ALIASES if given.get(name) is not None}
    problems: list[str] = []
    if len(set(lengths.values())) != 1:
        problems.append(f"{key}: give exactly one of {', '.join(_MAX_TOKENS_ALIASES)}, got {lengths or 'none'}.")
    else:
        values["max_tokens"] = next(iter(lengths.values()))
    known = {field.name for field in fields(SamplingParams)}
    for name, value in given.items():
        if name in _IGNORED or value is None:
            continue
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            problems.append(f"{key}.{name} is not a sampling parameter.{hint}")
        else:
            values[name] = _plain(name, value)
    for name, value in values.items():
        allowed, holds = SAMPLING_RULES[name]
        if not holds(value):
            problems.append(f"{key}.{name}={value!r} is not allowed: {allowed}.")
    if not problems and values.get("min_tokens", 0) > values["max_tokens"]:
        problems.append(f"{key}.min_tokens={values['min_tokens']} is more than max_tokens={values['max_tokens']}.")
    if problems:
        raise ConfigError("\n".join(problems))
    return SamplingParams(**values)


def request_seed(run_seed: int, uid: str, sample: int, turn: int, step: int) -> int:
    """A 64-bit seed that depends on all arguments and on nothing else: the same in every process, on every machine."""
    text = "\0".join((str(run_seed), str(uid), str(sample), str(turn), str(step)))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def with_stop_token(params: SamplingParams, token: int | None) -> SamplingParams:
    """Return `params` whose responses also end at `token`, unless they ignore ends of sequence.

    Callers that render prompts with a template of their own add its end-of-turn token in this way: an engine only knows
    that of its model's template.
    """
    if token is None or params.ignore_eos or token in params.stop_token_ids:
        return params
    return replace(params, stop_token_ids=(*params.stop_token_ids, token))


def check_supported(params: SamplingParams, capabilities: Capabilities) -> None:
    """Raises UnsupportedParameter naming engine and parameter, for one it would ignore or a value out of range."""
    for name, (allowed, holds) in SAMPLING_RULES.items():
        if not holds(value := getattr(params, name)):
            raise UnsupportedParameter(f"Engine {capabilities.name!r} cannot honour {name}={value!r}; give {allowed}.")
    for name, on in active_params(params).items():
        if name not in capabilities.sampling:
            honoured = ", ".join(sorted(capabilities.sampling)) or "nothing beyond max_tokens"
            raise UnsupportedParameter(
                f"Engine {capabilities.name!r} cannot honour {name}={on!r}. It honours: {honoured}. "
                f"Turn {name} off or choose another engine."
            )


def active_params(params: SamplingParams) -> dict[str, Any]:
    """Name -> value of the parameters that are on: those that an engine must support."""
    values = {name: getattr(params, name) for name, off in _OFF.items() if getattr(params, name) != off}
    if params.temperature not in (0.0, 1.0):  # every engine can be greedy
        values["temperature"] = params.temperature
    if params.ignore_eos:
        values["ignore_eos"] = True
    return values


def _plain(name: str, value: Any) -> Any:
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
    # Allowed values, in words and as a predicate.
    "max_tokens": ("a whole number of at least 1", _integer(1)),
    "temperature": (
        f"0, which is greedy, or a finite number of at least {TEMPERATURE_RANGE.low}",
        _number(TEMPERATURE_RANGE),
    ),
    "top_p": ("more than 0 and at most 1; 1 is off", _number(POSITIVE_FRACTION)),
    "top_k": ("a whole number of at least 1; -1 or 0 is off", _integer(0)),
    "min_p": ("from 0 to 1; 0 is off", _number(FRACTION)),
    "repetition_penalty": ("from 0.01 to 100; 1 is off", _number(REPETITION_PENALTY_RANGE)),
    "min_tokens": ("a whole number of at least 0", _integer(0)),
    "stop": ("strings that are not empty", lambda value: all(isinstance(text, str) and text for text in value)),
    "stop_token_ids": ("whole numbers of at least 0", lambda value: all(type(i) is int and i >= 0 for i in value)),
    "ignore_eos": ("true or false", lambda value: isinstance(value, bool)),
}


def check_unique_request_ids(engine: str, requests: Iterable[SampleRequest], active_ids: Iterable[str]) -> None:
    """Raises UnsupportedParameter for a request whose id is `under_way` already, or is that of another request."""
    taken = set(active_ids)
    for request in requests:
        if request.request_id in taken:
            used = request.request_id
            raise UnsupportedParameter(f"Engine {engine!r}: request id {used!r} is in use; give each its own.")
        taken.add(request.request_id)


def check_logprobs(engine: str, *logprobs: Iterable[float]) -> None:
    """Raises EngineError if a log-prob is not finite: no parameter of a request can cause that, only broken weights."""
    if not all(math.isfinite(one) for each in logprobs for one in each):
        raise EngineError(f"Engine {engine!r}: the model's logits are not finite; its weights are broken.")


@dataclass(frozen=True, slots=True)
class RequestValidator:
    """The checks of one engine. Each method raises UnsupportedParameter naming engine, value, and what is allowed."""

    capabilities: Capabilities
    vocab_size: int
    max_model_len: int
    """The most tokens of prompt plus response."""
    max_score_len: int
    """The most tokens of a sequence to score."""

    def check_request(self, request: SampleRequest, adapters: Collection[str]) -> None:
        """Check a request to sample; `adapters`: the names of those loaded."""
        check_supported(request.sampling, self.capabilities)
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

    def check_score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[tuple[int, ...]]:
        """Check the arguments of `score`; returns the ids as Python's integers."""
        if temperature != 1.0 and not self.capabilities.score_temperature:
            raise self._unsupported(
                f"score(temperature={temperature})", self.capabilities.refusals["score.temperature"]
            )
        plain = [to_int_tuple(ids) for ids in token_ids]
        for ids in plain:
            self._check_token_ids("score", ids)
            if len(ids) > self.max_score_len:
                allowed = f"at most {self.max_score_len} tokens, got {len(ids)}. Shorten it or raise max_model_len"
                raise self._unsupported("score", allowed)
        return plain

    def check_pause(self, mode: str) -> None:
        """Check the mode of `pause`."""
        if mode not in self.capabilities.pause_modes:
            why = self.capabilities.refusals.get(f"pause.{mode}", "")
            allowed = f"it knows {', '.join(sorted(self.capabilities.pause_modes))}"
            raise self._unsupported(f"pause(mode={mode!r})", f"{why} {allowed}".strip())

    def check_wake_up(self, tags: Sequence[str] | None) -> None:
        """Check the tags of `wake_up`."""
        if unknown := set(tags or ()) - MEMORY_TAGS:
            raise self._unsupported(f"wake_up({sorted(unknown)})", f"it knows {', '.join(sorted(MEMORY_TAGS))}")

    def check_adapter(self, name: str) -> None:
        """Check that an adapter can be loaded."""
        if not self.capabilities.lora:
            raise self._unsupported(f"adapter={name!r}", self.capabilities.refusals["adapter"])

    def _check_stop_token_ids(self, sampling: SamplingParams) -> None:
        ids = sampling.stop_token_ids
        if beyond := [one for one in ids if not 0 <= one < self.vocab_size]:
            raise self._unsupported(
                f"stop_token_ids with {beyond[0]}", f"token ids must be in 0..{self.vocab_size - 1}"
            )
        if sampling.min_tokens and 2 * len(set(ids)) > self.vocab_size:
            allowed = f"they forbid at most half of the {self.vocab_size} tokens, or there may be none to sample"
            raise self._unsupported(f"{len(set(ids))} stop_token_ids with min_tokens={sampling.min_tokens}", allowed)

    def _check_token_ids(self, what: str, ids: Sequence[int] | Tokens) -> None:
        if not len(ids):
            raise self._unsupported(what, "it has no tokens")
        array = np.asarray(ids)
        least, most = int(array.min()), int(array.max())
        if least < 0 or most >= self.vocab_size:
            allowed = f"token ids must be in 0..{self.vocab_size - 1}, got {least}..{most}"
            raise self._unsupported(what, allowed)

    def _unsupported(self, what: str, why: str) -> UnsupportedParameter:
        return UnsupportedParameter(f"Engine {self.capabilities.name!r} cannot honour {what}: {why.rstrip('.')}.")
