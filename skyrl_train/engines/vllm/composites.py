"""What vLLM needs for composite checkpoints. Does not import vLLM, so that checks can use it before a run."""

from __future__ import annotations

import importlib.util

from transformers import PreTrainedConfig

from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import get_composite_class_name

_SERVED_WRONGLY = {
    "glm4v_text": "whose log-probs in vLLM are not the learner's",
    "qwen3_vl_moe_text": "whose experts vLLM reads in another layout than transformers saves them in",
}
"""Value of `model_type` of a composite's language model -> what is wrong. vLLM starts with these."""


def check_composite(model: str, config: PreTrainedConfig) -> None:
    """Raise ConfigError for a composite that vLLM serves wrongly, or cannot inspect without naming the reason."""
    kind = get_composite_class_name(config)
    if kind is None:
        return
    if reason := _SERVED_WRONGLY.get(config.get_text_config().model_type):
        raise ConfigError(
            f"generator.backend=vllm: {model!r} is a {kind}, {reason}. Set generator.backend=transformers."
        )
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"generator.backend=vllm: {model!r} is a {kind}, whose class in vLLM imports torchvision, which is not "
            "installed. Install it in the version that belongs to this torch, or set generator.backend=transformers."
        )
