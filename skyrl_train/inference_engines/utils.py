"""SkyRL's function for sampling parameters, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.skyrl.rollouts import to_vllm_sampling_params

__all__ = ["get_sampling_params_for_backend"]


def get_sampling_params_for_backend(backend: str, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's section with the engine's names; `InferenceEngineClient.generate` takes either."""
    named = to_vllm_sampling_params(dict(sampling_params))
    if backend == "sglang":
        named["max_new_tokens"] = named.pop("max_tokens")
    return named
