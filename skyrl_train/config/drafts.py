"""Speculative decoding in the configuration: vLLM's settings, the draft model, and their checks.

`generator.speculative` has the keys. vLLM's own dictionary, `speculative_config` in `generator.engine_init_kwargs`, is
accepted in its place, for further options such as `draft_tensor_parallel_size`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.config.generator import SPECULATIVE_METHODS, GeneratorConfig
from skyrl_train.config.problems import Problem
from skyrl_train.config.schema import Config

SECTION = "generator.speculative"
VLLM_KEY = "generator.engine_init_kwargs.speculative_config"
METHODS_WITH_MODEL = ("draft_model", "eagle", "eagle3")
"""Methods whose drafts come from a model with its own path."""
_VLLM_METHODS = (*SPECULATIVE_METHODS, "ngram_gpu", "dflash", "dspark")
"""Methods of vLLM's V2 model runner."""
_INEXACT_OPTIONS = {"rejection_sample_method": "synthetic", "enable_adaptive_verification": True}
"""Options of vLLM, and their values with which sampled tokens and log-probs are not exact."""
_MODEL_RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_UNCHECKED_ARGUMENTS = ("spec_method", "spec_model", "spec_tokens")
"""Arguments of vLLM for drafts that no check and no plan reads."""


def get_speculative_config(generator: GeneratorConfig) -> dict[str, Any] | None:
    """Return vLLM's `speculative_config` for the engines of a run; None without drafts."""
    if (options := generator.engine_init_kwargs.get("speculative_config")) is not None:
        return dict(options)
    speculative = generator.speculative
    if speculative.method is None:
        return None
    config: dict[str, Any] = {
        "method": speculative.method,
        "num_speculative_tokens": speculative.num_speculative_tokens,
    }
    if speculative.model is not None:
        config["model"] = speculative.model
    if speculative.method == "ngram":
        config |= {name: getattr(speculative, name) for name in ("prompt_lookup_min", "prompt_lookup_max")}
    return config


def find_draft_model(generator: GeneratorConfig) -> tuple[str, str] | None:
    """Return the key and the path of the draft model or head of the run's own engines; None if they have none."""
    drafts = get_speculative_config(generator)
    if drafts is None or generator.backend != "vllm" or drafts.get("model") is None:
        return None
    return f"{get_section(generator)}.model", str(drafts["model"])


def get_section(generator: GeneratorConfig) -> str:
    """Return the section of the configuration that has the settings of speculative decoding."""
    return SECTION if generator.engine_init_kwargs.get("speculative_config") is None else VLLM_KEY


def uses_v2_on_cpu() -> bool:
    """True if the user chose vLLM's V2 model runner, which vLLM does not choose on CPUs."""
    return os.environ.get(_MODEL_RUNNER_VARIABLE) == "1"


def find_draft_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of speculative decoding in the run's own engines."""
    generator = config.generator
    for name in _UNCHECKED_ARGUMENTS:
        if (value := generator.engine_init_kwargs.get(name)) is not None:
            yield Problem(f"generator.engine_init_kwargs.{name}", value, "left out", f"Set {SECTION} instead.")
    options, speculative = generator.engine_init_kwargs.get("speculative_config"), generator.speculative
    if speculative.method not in (None, *SPECULATIVE_METHODS):  # reported with the other choices
        return
    if options is not None and not isinstance(options, Mapping):
        yield Problem(VLLM_KEY, options, "a dictionary", f"Set {SECTION}.method instead.")
        return
    if options is not None and speculative.method is not None:
        advice = f"It would replace all keys of {SECTION}."
        yield Problem(VLLM_KEY, dict(options), f"left out with {SECTION}.method={speculative.method}", advice)
        return
    drafts = get_speculative_config(generator)
    if drafts is None:
        return
    section, method = get_section(generator), drafts.get("method")
    if generator.backend != "vllm":
        advice = "Only vLLM engines verify drafts with a sampler that returns both log-probs of every token."
        yield Problem(f"{section}.method", method, f"null with generator.backend={generator.backend}", advice)
    elif config.device == "cpu" and not uses_v2_on_cpu():
        advice = "It requires vLLM's V2 model runner, which runs on GPUs."
        yield Problem(f"{section}.method", method, "null on a CPU", advice)
    elif (variable := os.environ.get(_MODEL_RUNNER_VARIABLE, "1").lower()) not in ("1", "true"):
        advice = "It requires vLLM's V2 model runner. Unset the environment variable."
        yield Problem(f"{section}.method", method, f"null with {_MODEL_RUNNER_VARIABLE}={variable}", advice)
    if method not in _VLLM_METHODS:
        allowed = f"one of {', '.join(_VLLM_METHODS)}"
        yield Problem(f"{section}.method", method, allowed, "vLLM's V2 model runner has no other methods.")
        return
    model = drafts.get("model")
    if method in METHODS_WITH_MODEL and model is None:
        advice = "Set it to a folder, URI or hub name."
        yield Problem(f"{section}.model", None, f"a draft model with method={method}", advice)
    if method in SPECULATIVE_METHODS and method not in METHODS_WITH_MODEL and model is not None:
        advice = "Only draft_model, eagle and eagle3 load a model; mtp uses the policy's own layers."
        yield Problem(f"{section}.model", model, f"null with method={method}", advice)
    shortest, longest = drafts.get("prompt_lookup_min"), drafts.get("prompt_lookup_max")
    if shortest is not None and longest is not None and shortest > longest:
        yield Problem(f"{section}.prompt_lookup_min", shortest, f"at most {section}.prompt_lookup_max={longest}")
    for name, inexact in _INEXACT_OPTIONS.items():
        if drafts.get(name) == inexact:
            advice = "Sampled tokens and log-probs would not be exact."
            yield Problem(f"{section}.{name}", inexact, "left out", advice)
