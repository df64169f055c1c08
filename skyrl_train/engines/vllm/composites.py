"""Checks of composite (multimodal) checkpoints for vLLM. Does not import vLLM, so that preflight checks can use it."""

from __future__ import annotations

import importlib.util

from transformers import PreTrainedConfig

from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import get_composite_class_name

_SERVED_WRONGLY = {
    "glm4v_text": "whose log-probs in vLLM differ from the learner's",
    "qwen3_vl_moe_text": "whose experts vLLM reads in a layout that differs from the one that transformers saves",
}
"""Reasons by `model_type` of a composite's language model. vLLM starts with these models but serves them wrongly."""


def check_composite(model: str, config: PreTrainedConfig) -> None:
    """Check that vLLM can serve a composite checkpoint. Other checkpoints pass.

    Args:
        model: Folder or hub name of the checkpoint, for error messages.
        config: Configuration of the checkpoint.

    Raises:
        ConfigError: vLLM serves the composite wrongly, or needs torchvision for it, which is not installed.
    """
    class_name = get_composite_class_name(config)
    if class_name is None:
        return
    if reason := _SERVED_WRONGLY.get(config.get_text_config().model_type):
        raise ConfigError(
            f"generator.backend=vllm: {model!r} is a {class_name}, {reason}. Set generator.backend=transformers."
        )
    if importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"generator.backend=vllm: vLLM needs torchvision for {model!r} ({class_name}), but it is not installed. "
            "Install the torchvision version that matches the installed torch, or set generator.backend=transformers."
        )
