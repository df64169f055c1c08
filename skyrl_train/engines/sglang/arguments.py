"""SGLang's start arguments, and the models that it cannot serve exactly, refused before it starts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import get_composite_class_name
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.loading import has_untied_head, load_config
from skyrl_train.weight_sync.protocol import dtype_of

RESERVED_POSITIONS = 8
"""Positions that SGLang needs beyond the longest request."""
_CPU_CACHE_BYTES = 4 << 30
"""Upper limit for keys and values on a CPU, which otherwise take what max_num_seqs full sequences need."""

_ARGUMENT_NAMES = {
    "tensor_parallel_size": "tp_size",
    "expert_parallel_size": "ep_size",
    "enforce_eager": "disable_cuda_graph",
    "gpu_memory_utilization": "mem_fraction_static",
    "seed": "random_seed",
    "batch_invariant": "enable_deterministic_inference",
}
"""Our keys -> SGLang's."""
_MODELS_WITHOUT_SLIDING_WINDOW = frozenset(
    {"mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"}
)
"""Models whose code in SGLang has no sliding window, though their configuration may."""
_GPU_ONLY_MODELS = frozenset({"exaone4", "hunyuan_v1_dense", "minimax_m2"})
_MODELS_WITHOUT_TP_PLAN = frozenset({"ernie4_5", "smollm3"})
"""Models that SGLang runs with transformers' classes, though it does not know their tensor-parallel plans."""


def engine_arguments(
    model: str,
    *,
    name: str,
    device: str,
    dtype: str,
    max_num_seqs: int,
    max_model_len: int,
    max_lora_rank: int,
    rope_scaling: dict[str, Any] | None,
    rope_theta: float | None,
    options: Mapping[str, Any],
    check_weights: bool = True,
) -> dict[str, Any]:
    """Keyword arguments for ServerArgs; `options`, with our names or SGLang's, take precedence over defaults.

    `reads_weights`: False to only check them, without a look at the weights, which a hub name would have to download.

    Raises ConfigError for options that cannot be chosen, and for models that cannot be served.
    """
    config = load_config(model, rope_scaling=rope_scaling, rope_theta=rope_theta)
    check_composite(config, name)
    fixed: dict[str, Any] = {
        "model_path": model,
        "device": device,
        "dtype": dtype,
        "context_length": max_model_len + RESERVED_POSITIONS,
        "max_running_requests": max_num_seqs,
        "skip_tokenizer_init": True,
        "sampling_backend": "pytorch",
        "weight_version": "0",
        "trust_remote_code": False,
    }
    given = _translate_arguments(options)
    if taken := sorted(fixed.keys() & given.keys()):
        key = f"generator.engine_init_kwargs.{taken[0]}"
        raise ConfigError(f"{key}={given[taken[0]]!r}: engine {name!r} sets it itself; leave it out.")
    free: dict[str, Any] = {"grammar_backend": "none", "log_level": "error", "sleep_on_idle": True, "random_seed": 0}
    changed: dict[str, Any] = {}
    if rope_scaling or rope_theta is not None:
        changed["rope_parameters"] = config.rope_parameters
    if check_weights and has_untied_head(model):
        changed["tie_word_embeddings"] = False
    if changed:
        free["json_model_override_args"] = json.dumps(changed)
    if max_lora_rank:
        free |= {"enable_lora": True, "max_lora_rank": max_lora_rank, "lora_target_modules": ["all"]}
    if device == "cpu":
        free |= _cpu_arguments(config, dtype, max_num_seqs, max_model_len)
        given["disable_cuda_graph"] = True
    else:
        free["enable_memory_saver"] = True
    arguments = {**free, **given, **fixed}
    check_model(config, arguments, name=name, max_model_len=max_model_len)
    return arguments


def _translate_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    given = {_ARGUMENT_NAMES.get(key, key): value for key, value in options.items()}
    if "enable_prefix_caching" in given:
        given["disable_radix_cache"] = not given.pop("enable_prefix_caching")
    tokens = given.pop("max_num_batched_tokens", None)
    if tokens is not None:
        given |= {"max_prefill_tokens": tokens, "chunked_prefill_size": tokens}
    if not given.pop("enable_chunked_prefill", True):
        given["chunked_prefill_size"] = -1
    return given


def _cpu_arguments(config: Any, dtype: str, max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    """The arguments that differ on a CPU: plain torch attention, no overlap of steps, a cache of the size needed."""
    text = config.get_text_config()
    head_dim = max(get_layer_sizes(text, "head_dim"), default=text.hidden_size // text.num_attention_heads)
    heads = max(get_layer_sizes(text, "num_key_value_heads"), default=text.num_attention_heads)
    bytes_per_token = 2 * text.num_hidden_layers * heads * head_dim * dtype_of(dtype).itemsize
    longest = max_model_len + RESERVED_POSITIONS
    return {
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "max_total_tokens": max(longest, min(max_num_seqs * longest, _CPU_CACHE_BYTES // bytes_per_token)),
        "mem_fraction_static": 0.8,
    }


def check_composite(config: Any, name: str) -> None:
    """Raise ConfigError for a composite, whose other towers SGLang does not load from transformers' own names."""
    if (kind := get_composite_class_name(config)) is not None:
        raise ConfigError(
            f"Engine {name!r}: SGLang cannot serve {kind} as a text model: it also loads the other towers, whose names "
            "in checkpoints it does not always know; set generator.backend=vllm or generator.backend=transformers."
        )


def check_model(config: Any, arguments: Mapping[str, Any], *, name: str, max_model_len: int) -> None:
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
    elif plain and text.model_type in _GPU_ONLY_MODELS:
        missing = "its code for them does not run with its attention on CPUs (torch_native)"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif text.model_type in _MODELS_WITHOUT_TP_PLAN:
        missing = "it has no code for them, and transformers' plan for dividing them has a style that it does not know"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif text.model_type == "olmo3":
        missing = "its code for them reads one set of rope parameters, where these have one for each kind of layer"
        todo = "set generator.backend=vllm or generator.backend=transformers"
    elif len(sizes := get_layer_sizes(text, "head_dim")) > 1:
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
    if config.model_type not in _MODELS_WITHOUT_SLIDING_WINDOW or (kinds and "sliding_attention" not in kinds):
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
