"""Models that vLLM cannot serve exactly, with reasons. Does not import vLLM, so that preflight checks can use it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from skyrl_train.config.local_checks import GATED_DELTA_NET_MODELS
from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import get_composite_class_name

_NEEDS_TORCHVISION = frozenset({"qwen3_5_text", "qwen3_5_moe_text"})
"""Model types of text models whose classes in vLLM import torchvision."""
_TRANSFORMERS = "Set generator.backend=transformers."


@dataclass(frozen=True)
class _Rejection:
    """Models that vLLM cannot serve, or serves wrongly."""

    model_types: frozenset[str]
    """Values of `model_type` of the text configuration."""
    reason: str
    """Reason, for messages."""
    on_cpus_only: bool = True
    """False if the reason applies to all devices."""
    applies: Callable[[Any, str], bool] = lambda text, dtype: True
    """(text configuration, engine's data type) -> True if the model has what the reason is about."""
    fix: str = _TRANSFORMERS
    """Advice for messages."""


def _is_float32(_text: Any, dtype: str) -> bool:
    return dtype == "float32"


_REJECTIONS = (
    _Rejection(frozenset({"glm4v_text"}), "its log-probs in vLLM differ from the learner's", on_cpus_only=False),
    _Rejection(
        frozenset({"qwen3_vl_moe_text"}),
        "vLLM reads its experts in a layout that differs from the one that transformers saves",
        on_cpus_only=False,
    ),
    _Rejection(
        frozenset({"apertus"}),
        "vLLM keeps the parameters of Apertus' activation in bfloat16, so its log-probs in float32 would differ from "
        "the learner's",
        on_cpus_only=False,
        applies=_is_float32,
        fix="Set generator.model_dtype=bfloat16 or generator.backend=transformers.",
    ),
    _Rejection(
        frozenset({"minimax_m2"}),
        "vLLM's expert routing on CPUs supports sigmoid scores only with groups of experts, which it does not have",
    ),
    _Rejection(
        frozenset({"granitemoehybrid"}),
        "vLLM normalizes each of its mamba_n_groups groups of Mamba2 channels alone, but transformers all channels "
        "together",
        on_cpus_only=False,
        applies=lambda text, _: text.mamba_n_groups > 1,
    ),
    _Rejection(
        frozenset({"mamba2"}),
        "vLLM normalizes each of its n_groups groups of Mamba2 channels alone, but transformers all channels together",
        on_cpus_only=False,
        applies=lambda text, _: text.n_groups > 1,
    ),
    _Rejection(
        frozenset({"falcon_h1"}),
        "vLLM multiplies by the gate before the norm of Mamba2 layers, but its configuration has "
        "mamba_norm_before_gate=true",
        on_cpus_only=False,
        applies=lambda text, _: text.mamba_rms_norm and text.mamba_norm_before_gate,
    ),
    _Rejection(frozenset({"bamba", "minimax"}), "this version of vLLM has no code for its layers", on_cpus_only=False),
    _Rejection(
        GATED_DELTA_NET_MODELS,
        "vLLM's gated delta nets on CPUs compute in bfloat16 only",
        applies=lambda _, dtype: dtype != "bfloat16",
        fix="Set generator.model_dtype=bfloat16 or generator.backend=transformers.",
    ),
    _Rejection(
        GATED_DELTA_NET_MODELS,
        "vLLM's gated delta nets on CPUs require keys and values of the same head size, 64 or 128 "
        "(linear_key_head_dim, linear_value_head_dim)",
        applies=lambda text, _: (text.linear_key_head_dim, text.linear_value_head_dim) not in ((64, 64), (128, 128)),
    ),
    _Rejection(
        frozenset({"qwen3_next", "nemotron_h"}),
        "its head is tied to the embedding (tie_word_embeddings=true), but vLLM gives it a head of its own, without "
        "weights",
        on_cpus_only=False,
        applies=lambda text, _: bool(text.tie_word_embeddings),
    ),
    _Rejection(
        frozenset({"lfm2", "lfm2_moe"}),
        "vLLM always ties its head to the embedding, but its configuration has tie_word_embeddings=false",
        on_cpus_only=False,
        applies=lambda text, _: not text.tie_word_embeddings,
    ),
    _Rejection(
        frozenset({"nemotron_h"}),
        "vLLM's experts on CPUs do not support its activation, and without experts its log-probs differ from the "
        "learner's by more than 0.0001 nats",
    ),
    _Rejection(
        frozenset({"lfm2", "lfm2_moe"}), "its log-probs in vLLM on CPUs differ from the learner's by about 0.3 nats"
    ),
    _Rejection(frozenset({"jamba", "falcon_mamba"}), "vLLM cannot load its weights on CPUs"),
    _Rejection(frozenset({"olmo_hybrid"}), "vLLM's code for it needs Triton, which has no CPU backend"),
    _Rejection(
        frozenset({"kimi_linear"}),
        "vLLM's code for it does not start on CPUs, and its log-probs and weight syncs have not been tested on GPUs",
        on_cpus_only=False,
    ),
    _Rejection(frozenset({"deepseek_v32", "glm_moe_dsa"}), "vLLM has no sparse attention for CPUs"),
)
"""Models that were tried with vLLM 0.32 and do not start, or whose log-probs differ from the learner's."""


def check_model(model: str, config: PreTrainedConfig, *, on_cpu: bool, dtype: str) -> None:
    """Check that vLLM serves a model exactly, as far as its configuration tells.

    Args:
        model: Folder or hub name of the checkpoint, for error messages.
        config: Configuration of the checkpoint. Of a composite, vLLM serves the language model.
        on_cpu: True to serve on a CPU.
        dtype: Data type of the weights, such as "bfloat16"; "auto" for vLLM's choice.

    Raises:
        ConfigError: vLLM cannot serve the model or serves it wrongly, or needs torchvision for it, which is missing.
    """
    text: Any = config.get_text_config()
    class_name = get_composite_class_name(config)
    if dtype == "auto":
        dtype = _choose_dtype(text)
    for rejection in _REJECTIONS:
        is_affected = text.model_type in rejection.model_types and (on_cpu or not rejection.on_cpus_only)
        if is_affected and rejection.applies(text, dtype):
            model_type = text.model_type if class_name is None else class_name
            raise ConfigError(
                f"generator.backend=vllm cannot serve {model!r} ({model_type}): {rejection.reason}. {rejection.fix}"
            )
    needs_torchvision = class_name is not None or text.model_type in _NEEDS_TORCHVISION
    if needs_torchvision and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"generator.backend=vllm: vLLM needs torchvision for {model!r} ({class_name or text.model_type}), but it "
            "is not installed. Install the torchvision version that matches the installed torch, or set "
            "generator.backend=transformers."
        )


def _choose_dtype(text: Any) -> str:
    """Return the data type that vLLM chooses for "auto": the checkpoint's, but bfloat16 instead of float32."""
    name = str(text.dtype).removeprefix("torch.")
    return "bfloat16" if name in ("float32", "None") else name
