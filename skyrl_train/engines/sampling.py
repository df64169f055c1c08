"""Sampling parameters normalised to mean the same for every engine, and the seeds of requests. No torch here."""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, is_dataclass, replace
from typing import Any

from skyrl_train.config.section import FRACTION, POSITIVE_FRACTION, REPETITION_PENALTY, TEMPERATURE, Range
from skyrl_train.engines.base import Capabilities, SamplingParams
from skyrl_train.errors import ConfigError, UnsupportedParameter

_NAMES_OF_MAX_TOKENS = ("max_tokens", "max_generate_length", "max_new_tokens")
_IGNORED = {"logprobs"}
"""Log-probs of the sampled tokens are always returned."""

_OFF = {
    field.name: field.default
    for field in fields(SamplingParams)
    if field.name not in ("max_tokens", "temperature", "ignore_eos")
}


def normalise(config: Any, key: str = "sampling_params") -> SamplingParams:
    """Convert a sampling section (dataclass or mapping, with SkyRL's or vLLM's names) to SamplingParams.

    top_k -1 and 0 are both off, stop may be a string or a list, None means the default. `key` is the prefix of names in
    messages. Raises ConfigError listing every wrong value: key, value, what is allowed.
    """
    given = asdict(config) if is_dataclass(config) and not isinstance(config, type) else dict(config)
    values: dict[str, Any] = {}
    lengths = {name: given.pop(name) for name in _NAMES_OF_MAX_TOKENS if given.get(name) is not None}
    problems: list[str] = []
    if len(set(lengths.values())) != 1:
        problems.append(f"{key}: give exactly one of {', '.join(_NAMES_OF_MAX_TOKENS)}, got {lengths or 'none'}.")
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
        allowed, holds = RULES[name]
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
    for name, (allowed, holds) in RULES.items():
        if not holds(value := getattr(params, name)):
            raise UnsupportedParameter(f"Engine {capabilities.name!r} cannot honour {name}={value!r}; give {allowed}.")
    for name, on in active(params).items():
        if name not in capabilities.sampling:
            honoured = ", ".join(sorted(capabilities.sampling)) or "nothing beyond max_tokens"
            raise UnsupportedParameter(
                f"Engine {capabilities.name!r} cannot honour {name}={on!r}. It honours: {honoured}. "
                f"Turn {name} off or choose another engine."
            )


def active(params: SamplingParams) -> dict[str, Any]:
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


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= low


_FLOATS = {"temperature", "top_p", "min_p", "repetition_penalty"}
RULES: Mapping[str, tuple[str, Callable[[Any], bool]]] = {
    # Allowed values, in words and as a predicate.
    "max_tokens": ("a whole number of at least 1", _whole(1)),
    "temperature": (f"0, which is greedy, or a finite number of at least {TEMPERATURE.low}", _number(TEMPERATURE)),
    "top_p": ("more than 0 and at most 1; 1 is off", _number(POSITIVE_FRACTION)),
    "top_k": ("a whole number of at least 1; -1 or 0 is off", _whole(0)),
    "min_p": ("from 0 to 1; 0 is off", _number(FRACTION)),
    "repetition_penalty": ("from 0.01 to 100; 1 is off", _number(REPETITION_PENALTY)),
    "min_tokens": ("a whole number of at least 0", _whole(0)),
    "stop": ("strings that are not empty", lambda value: all(isinstance(text, str) and text for text in value)),
    "stop_token_ids": ("whole numbers of at least 0", lambda value: all(type(i) is int and i >= 0 for i in value)),
    "ignore_eos": ("true or false", lambda value: isinstance(value, bool)),
}
