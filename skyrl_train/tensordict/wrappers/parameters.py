"""Parsing of generate_kwargs, which accept the parameter names of Hugging Face, vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.engines.base import SamplingParams
from skyrl_train.engines.sampling_params import parse_sampling_params
from skyrl_train.errors import ConfigError

DEFAULT_MAX_NEW_TOKENS = 128
_SAME = {
    "max_tokens": "max_new_tokens",
    "max_generate_length": "max_new_tokens",
    "min_new_tokens": "min_tokens",
    "n": "num_return_sequences",
    "stop_sequences": "stop",
}
"""Aliases; two names of the same parameter with different values are rejected."""
_ONLY_OFF = {"num_beams": (None, 1), "length_penalty": (None, 1, 1.0), "early_stopping": (None, False)}
"""Options of beam search, which no engine here supports, and the values that turn it off."""


@dataclass(frozen=True)
class Generation:
    """The parameters of a call; calls with equal ones may share a batch."""

    sampling: SamplingParams
    num_samples: int | None
    """None: the output has no dimension for samples."""
    seed: int | None
    """Seed and prompt determine the samples; equal prompts of one call are numbered, so that their samples differ."""
    skip_special_tokens: bool


def read_generate_kwargs(given: Mapping[str, Any] | None, num_samples: int | None) -> Generation:
    """Parse generate_kwargs and the wrapper's `num_samples`.

    Args:
        given: Parameters under the names of TorchRL, vLLM or SGLang; None for the defaults. top_k=-1 turns top-k off.
        num_samples: Number of samples of a prompt; None for that of `given`, or 1.

    Raises:
        ConfigError: A name is unknown, a value is wrong, or two values contradict each other.
    """
    key, values = "generate_kwargs", common_names(given)
    for name, off in _ONLY_OFF.items():
        if (value := values.pop(name, None)) not in off:
            raise ConfigError(f"{key}.{name}={value!r} requests beam search, which no engine supports. Leave it out.")
    asked = values.pop("num_return_sequences", None)
    for name, value in (("num_samples", num_samples), (f"{key}['n']", asked)):
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}={value!r}: give an integer of at least 1.")
    if None not in (asked, num_samples) and asked != num_samples:
        raise ConfigError(f"num_samples={num_samples} differs from {key}['n']={asked}. Give one of them.")
    samples = num_samples if num_samples is not None or asked == 1 else asked
    seed, skip = values.pop("seed", None), values.pop("skip_special_tokens", False)
    if seed is not None and (type(seed) is not int or seed < 0):
        raise ConfigError(f"{key}.seed={seed!r} must be an integer of at least 0.")
    sample = values.pop("do_sample", None)
    for name, value in (("skip_special_tokens", skip), ("do_sample", sample)):
        if value not in (None, True, False):
            raise ConfigError(f"{key}.{name}={value!r}: give true or false.")
    if sample is False and values.setdefault("temperature", 0.0) != 0:
        raise ConfigError(f"{key}.do_sample=False is greedy: temperature={values['temperature']!r} must be 0.")
    values["max_tokens"] = values.pop("max_new_tokens", DEFAULT_MAX_NEW_TOKENS)
    return Generation(parse_sampling_params(values, key), samples, seed, skip)


def common_names(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return parameters under TorchRL's common names (`max_tokens` becomes `max_new_tokens`), without None values.

    Raises ConfigError if two names of a parameter have different values.
    """
    values: dict[str, Any] = {}
    for name, value in (given or {}).items():
        if value is None:
            continue
        common = _SAME.get(name, name)
        if common in values and values[common] != value:
            raise ConfigError(
                f"generate_kwargs.{name}={value!r} contradicts {common}={values[common]!r}. Give one of them."
            )
        values[common] = value
    return values


def overridden(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return generate_kwargs of a call on top of those of its wrapper, which are under common names.

    A temperature of the call, which takes precedence, removes the wrapper's `do_sample`; `do_sample=False` removes the
    wrapper's temperature.
    """
    gone = {_SAME.get(name, name) for name in given}
    if "temperature" in given:
        gone.add("do_sample")
    if given.get("do_sample") is False or (given.get("do_sample") and own.get("temperature") == 0):
        gone.add("temperature")
    return {**{name: value for name, value in own.items() if name not in gone}, **given}
