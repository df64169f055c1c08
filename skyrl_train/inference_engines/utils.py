"""SkyRL's function for sampling parameters, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.skyrl.rollouts import sampling_params_of

__all__ = ["get_sampling_params_for_backend"]


def get_sampling_params_for_backend(backend: str, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration's section as `InferenceEngineClient.generate` takes it, which is the same for all engines."""
    return sampling_params_of(dict(sampling_params))
