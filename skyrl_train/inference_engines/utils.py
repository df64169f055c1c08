"""SkyRL's import path of its function that translates sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.skyrl.rollouts import to_vllm_sampling_params

__all__ = ["get_sampling_params_for_backend"]


def get_sampling_params_for_backend(backend: str, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of `generator.sampling_params` under the names that the engine uses.

    `InferenceEngineClient.generate` accepts vLLM's and SGLang's names.

    Args:
        backend: The engine, `generator.backend`. Only "sglang" uses other names than vLLM.
        sampling_params: The parameters, `max_generate_length` (tokens) among them.

    Raises:
        KeyError: `max_generate_length` is missing.
    """
    named = to_vllm_sampling_params(dict(sampling_params))
    if backend == "sglang":
        named["max_new_tokens"] = named.pop("max_tokens")
    return named
