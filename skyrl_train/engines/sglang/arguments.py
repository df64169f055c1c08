"""SGLang's start arguments, and checks for models that it cannot serve exactly. Does not import SGLang."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from skyrl_train.engines.graph_sizes import get_graph_sizes
from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import get_composite_class_name
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.loading import has_untied_head, load_config
from skyrl_train.models.recurrent_layers import RECURRENT_LAYER_TYPES
from skyrl_train.weight_sync.protocol import dtype_of

RESERVED_POSITIONS = 8
"""Number of positions that SGLang needs in addition to the longest request."""
_CPU_CACHE_BYTES = 4 << 30
"""Upper limit of the KV cache on a CPU. Below it the cache has the size of max_num_seqs full sequences."""

_ARGUMENT_NAMES = {
    "tensor_parallel_size": "tp_size",
    "expert_parallel_size": "ep_size",
    "enforce_eager": "disable_cuda_graph",
    "gpu_memory_utilization": "mem_fraction_static",
    "seed": "random_seed",
    "batch_invariant": "enable_deterministic_inference",
    "keeps_routing": "enable_return_routed_experts",
}
"""SGLang's argument names by configuration key."""
_GRAPH_SIZE_ARGUMENTS = frozenset({"cuda_graph_bs_decode", "cuda_graph_max_bs_decode", "cuda_graph_config"})
"""SGLang's arguments for the batch sizes of CUDA graphs."""
_MODELS_WITHOUT_SLIDING_WINDOW = frozenset(
    {"mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2"}
)
"""Model types whose code in SGLang ignores the sliding window of their configuration."""
_GPU_ONLY_MODELS = frozenset({"exaone4", "hunyuan_v1_dense", "minimax_m2"})
_UNTIED_MODELS = frozenset({"kimi_linear", "qwen3_next"})
"""Model types whose code in SGLang never ties the head to the embedding."""
_MODELS_WITHOUT_TP_PLAN = frozenset({"ernie4_5", "smollm3"})
"""Model types that SGLang runs with transformers' classes without supporting their tensor-parallel plans."""


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
    """Return the keyword arguments for SGLang's ServerArgs.

    Args:
        model: Folder or hub name of the model.
        name: The engine's name, for error messages.
        device: "cpu", or an accelerator.
        dtype: Data type of the weights.
        max_num_seqs: Maximum number of requests that run at a time.
        max_model_len: Maximum length of a prompt with its response, in tokens.
        max_lora_rank: Largest rank of LoRA adapters; 0 turns LoRA off.
        rope_scaling: RoPE scaling that overrides the model's; None to keep it.
        rope_theta: RoPE base that overrides the model's; None to keep it.
        options: Keys of `generator` or arguments of ServerArgs, which take precedence over the defaults.
        check_weights: False to not read the weights, which are only downloaded to find out if the head is untied. Use
            this for checks only.

    Raises:
        ConfigError: An option is one that the engine sets itself, or SGLang cannot serve the model.
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
    overrides = _translate_arguments(options)
    if conflicts := sorted(fixed.keys() & overrides.keys()):
        key = f"generator.engine_init_kwargs.{conflicts[0]}"
        raise ConfigError(
            f"{key}={overrides[conflicts[0]]!r} is not allowed: engine {name!r} sets this argument itself. Remove it."
        )
    if (algorithm := overrides.get("speculative_algorithm")) is not None:
        # SGLang's requests have top_k=1, because sampler.py samples; its verification of drafts would be greedy.
        raise ConfigError(
            f"generator.engine_init_kwargs.speculative_algorithm={algorithm!r} is not allowed: SGLang verifies drafts "
            f"without the sampler of engine {name!r}, so tokens and log-probs would be wrong. Remove it, or set "
            "generator.backend=vllm and generator.speculative.method."
        )
    defaults: dict[str, Any] = {
        "grammar_backend": "none",
        "log_level": "error",
        "sleep_on_idle": True,
        "random_seed": 0,
    }
    model_overrides: dict[str, Any] = {}
    if rope_scaling or rope_theta is not None:
        model_overrides["rope_parameters"] = config.rope_parameters
    if check_weights and has_untied_head(model):
        model_overrides["tie_word_embeddings"] = False
    if model_overrides:
        defaults["json_model_override_args"] = json.dumps(model_overrides)
    if max_lora_rank:
        defaults |= {"enable_lora": True, "max_lora_rank": max_lora_rank, "lora_target_modules": ["all"]}
    if device == "cpu" and overrides.get("enable_return_routed_experts"):
        raise ConfigError(
            f"Engine {name!r}: SGLang returns the experts of tokens on GPUs only. Set trainer.moe_routing_replay to "
            "null or old_policy, or generator.backend=transformers."
        )
    if device == "cpu":
        defaults |= _cpu_arguments(config, dtype, max_num_seqs, max_model_len)
        overrides["disable_cuda_graph"] = True
    else:
        defaults["enable_memory_saver"] = True
        if _GRAPH_SIZE_ARGUMENTS.isdisjoint(overrides):
            # SGLang's own largest size depends on the GPU's memory: 256 on an H200.
            defaults["cuda_graph_bs_decode"] = get_graph_sizes(max_num_seqs)
    arguments = {**defaults, **overrides, **fixed}
    check_model(config, arguments, name=name, max_model_len=max_model_len)
    return arguments


def _translate_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Rename configuration keys to SGLang's argument names."""
    arguments = {_ARGUMENT_NAMES.get(key, key): value for key, value in options.items()}
    if "enable_prefix_caching" in arguments:
        arguments["disable_radix_cache"] = not arguments.pop("enable_prefix_caching")
    tokens = arguments.pop("max_num_batched_tokens", None)
    if tokens is not None:
        arguments |= {"max_prefill_tokens": tokens, "chunked_prefill_size": tokens}
    if not arguments.pop("enable_chunked_prefill", True):
        arguments["chunked_prefill_size"] = -1
    return arguments


def _cpu_arguments(config: Any, dtype: str, max_num_seqs: int, max_model_len: int) -> dict[str, Any]:
    """Return the arguments that differ on a CPU: torch attention, no overlapping steps, a KV cache of limited size."""
    text = config.get_text_config()
    head_dim = max(get_layer_sizes(text, "head_dim"), default=text.hidden_size // text.num_attention_heads)
    heads = max(get_layer_sizes(text, "num_key_value_heads"), default=text.num_attention_heads)
    bytes_per_token = 2 * text.num_hidden_layers * heads * head_dim * dtype_of(dtype).itemsize
    max_len = max_model_len + RESERVED_POSITIONS
    return {
        "attention_backend": "torch_native",
        "disable_overlap_schedule": True,
        "max_total_tokens": max(max_len, min(max_num_seqs * max_len, _CPU_CACHE_BYTES // bytes_per_token)),
        "mem_fraction_static": 0.8,
    }


def check_composite(config: Any, name: str) -> None:
    """Check that a model is not a composite (multimodal), which SGLang cannot serve as a text model.

    Args:
        config: Configuration of the model.
        name: The engine's name, for error messages.

    Raises:
        ConfigError: The model is a composite.
    """
    if (class_name := get_composite_class_name(config)) is not None:
        raise ConfigError(
            f"Engine {name!r}: SGLang cannot serve {class_name} as a text model, because it also loads the vision or "
            "audio towers and does not always find their weights in the checkpoint. Set generator.backend=vllm or "
            "generator.backend=transformers."
        )


def check_model(config: Any, arguments: Mapping[str, Any], *, name: str, max_model_len: int) -> None:
    """Check that SGLang serves a model exactly.

    Args:
        config: Configuration of the model.
        arguments: Arguments for ServerArgs.
        name: The engine's name, for error messages.
        max_model_len: Maximum length of a prompt with its response, in tokens.

    Raises:
        ConfigError: SGLang cannot serve the model, or its log-probs would differ from the learner's.
    """
    text = config.get_text_config()
    if text.model_type == "apertus" and arguments.get("dtype") == "float32":
        raise ConfigError(
            "generator.model_dtype=float32: SGLang keeps the parameters of Apertus' activation in bfloat16, so its "
            "log-probs would differ from the learner's. Set generator.model_dtype=bfloat16 or "
            "generator.backend=transformers."
        )
    is_torch_native = arguments.get("attention_backend") == "torch_native"
    fix = "set generator.backend=vllm or generator.backend=transformers"
    if is_torch_native and getattr(text, "kv_lora_rank", None):
        reason = "its attention on CPUs (torch_native) does not support latent attention (MLA)"
    elif is_torch_native and text.model_type == "gpt_oss":
        reason = "its attention on CPUs (torch_native) has no attention sinks"
    elif is_torch_native and text.model_type in _GPU_ONLY_MODELS:
        reason = "its code for them does not run with its attention on CPUs (torch_native)"
    elif is_torch_native and RECURRENT_LAYER_TYPES & set(getattr(text, "layer_types", None) or ()):
        reason = "its code for recurrent layers needs compiled kernels, which its packages for CPUs do not have"
    elif text.model_type in _UNTIED_MODELS and text.tie_word_embeddings:
        reason = "its code for them gives them a head of their own, but this model has tie_word_embeddings=true"
    elif text.model_type in _MODELS_WITHOUT_TP_PLAN:
        reason = "it has no code for them and does not support a style in transformers' tensor-parallel plan for them"
    elif text.model_type == "olmo3":
        reason = "its code for them reads one set of RoPE parameters, but they have one for each type of layer"
    elif len(sizes := get_layer_sizes(text, "head_dim")) > 1:
        reason = f"its code reads one head size, but the layers of this model have {sizes}"
    elif (window := _ignored_window(text)) is not None and window < max_model_len:
        reason = f"its code for them has full attention, but this model has a sliding window of {window} tokens"
        fix += (
            ", or limit prompt and response together to that many tokens (trainer.max_prompt_length, "
            "generator.sampling_params.max_generate_length)"
        )
    else:
        return
    raise ConfigError(f"Engine {name!r}: SGLang cannot serve models of type {text.model_type!r}: {reason}; {fix}.")


def _ignored_window(config: Any) -> int | None:
    """Return the model's sliding window in tokens if SGLang ignores it, otherwise None."""
    layer_types = getattr(config, "layer_types", None)
    has_windows = not layer_types or "sliding_attention" in layer_types
    if config.model_type not in _MODELS_WITHOUT_SLIDING_WINDOW or not has_windows:
        return None
    window: int | None = getattr(config, "sliding_window", None)
    return window
