"""Models that SGLang would start, and then serve wrongly or not at all: refused before it starts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import composite_class
from skyrl_train.models.layer_sizes import sizes_of_layers

_WITHOUT_WINDOWS = frozenset({"mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"})
"""Models whose code in SGLang has no sliding window, though their configuration may."""

_ONLY_ON_GPUS = frozenset({"exaone4", "hunyuan_v1_dense", "minimax_m2"})
_WITHOUT_CODE = frozenset({"ernie4_5", "smollm3"})
"""Models that SGLang runs with transformers' classes, though it does not know their tensor-parallel plans."""


def refuse_composite(config: Any, name: str) -> None:
    """Raise ConfigError for a composite, whose other towers SGLang does not load from transformers' own names."""
    if (kind := composite_class(config)) is not None:
        raise ConfigError(
            f"Engine {name!r}: SGLang cannot serve {kind} as a text model: it also loads the other towers, whose names "
            "in checkpoints it does not always know; set generator.backend=vllm or generator.backend=transformers."
        )


def refuse_model(config: Any, arguments: Mapping[str, Any], *, name: str, max_model_len: int) -> None:
    """Raises ConfigError for a model that SGLang cannot serve exactly with these arguments for ServerArgs.

    `config`: the model's.
    """
    text = config.get_text_config()
    if text.model_type == "apertus" and arguments.get("dtype") == "float32":
        raise ConfigError(
            "generator.model_dtype=float32: SGLang keeps the parameters of Apertus' activation in bfloat16, so its "
            "log-probs would differ from the learner's. Use bfloat16 or generator.backend=transformers."
        )
    plain = arguments.get("attention_backend") == "torch_native"
    if plain and getattr(text, "kv_lora_rank", None):
        missing = "its attention on CPUs (torch_native) computes no latent attention (MLA)"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif plain and text.model_type == "gpt_oss":
        missing = "its attention on CPUs (torch_native) has no attention sinks"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif plain and text.model_type in _ONLY_ON_GPUS:
        missing = "its code for them does not run with its attention on CPUs (torch_native)"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif text.model_type in _WITHOUT_CODE:
        missing = "it has no code for them, and transformers' plan for dividing them has a style that it does not know"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif text.model_type == "olmo3":
        missing = "its code for them reads one set of rope parameters, where these have one for each kind of layer"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif len(sizes := sizes_of_layers(text, "head_dim")) > 1:
        missing = f"its code reads one size of heads, where the layers of this one have {sizes}"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif (window := _ignored_window(text)) is not None and window < max_model_len:
        missing = f"its code for them attends to everything, where this one has a sliding window of {window} tokens"
        todo = (
            "set generator.backend=vllm or generator.backend=transformers, or have at most that many tokens in prompt "
            "and response (max_prompt_length, max_generate_length)"
        )
    else:
        return
    raise ConfigError(f"Engine {name!r}: SGLang cannot serve models of type {text.model_type!r}: {missing}; {todo}.")


def _ignored_window(config: Any) -> int | None:
    """How many tokens are attended to by a model of a kind whose windows SGLang does not know; None for all."""
    kinds = getattr(config, "layer_types", None)
    if config.model_type not in _WITHOUT_WINDOWS or (kinds and "sliding_attention" not in kinds):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
