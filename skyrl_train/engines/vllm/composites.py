"""What vLLM needs for composite checkpoints. Does not import vLLM, so that checks can use it before a run."""

from __future__ import annotations

import importlib.util

from transformers import PreTrainedConfig

from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import composite_class


def refuse_composite(model: str, config: PreTrainedConfig) -> None:
    """Raise ConfigError for a composite that vLLM cannot inspect here; vLLM itself does not name the reason."""
    kind = composite_class(config)
    if kind is not None and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"generator.backend=vllm: {model!r} is a {kind}, whose class in vLLM imports torchvision, which is not "
            "installed. Install it in the version that belongs to this torch, or set generator.backend=transformers."
        )
