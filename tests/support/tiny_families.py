"""Tiny random models of any class of transformers: its own default configuration with small sizes."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

LAYERS = 4
VOCABULARY = 320
_SIZES = {
    r"(n_|encoder_|decoder_)?(num_)?(hidden_)?layers?|n_layer|depth|num_blocks": LAYERS,
    r"(d_model|n_embd|dim|hidden_size|hidden_dim|embed_dim|embedding_size|word_embed_proj_dim|d_embed)": 64,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|d_inner|n_inner|d_ff|dim_ff|mlp_hidden_size|_intermediate_dim)": 64,
    r".*(num_attention_heads|num_heads|n_heads?|attention_heads)": 4,
    r".*(num_key_value_heads|num_kv_heads|n_kv_heads)": 2,
    r"(head_dim|global_head_dim|swa_head_dim|v_head_dim|swa_v_head_dim|qk_nope_head_dim|attention_head_dim)": 16,
    r"qk_rope_head_dim": 8,
    r"q_lora_rank|kv_lora_rank|o_lora_rank": 16,
    r"(num_|n_)?(local_|routed_)?experts|n_routed_experts|moe_num_experts|zero_expert_num": 4,
    r"(num_experts_per_tok|moe_topk|moe_k|num_selected_experts|moe_top_k|top_k_experts|experts_per_token)": 2,
    r"(n_group|topk_group|num_expert_groups?)": 1,
    r"(n_)?shared_experts|num_shared_experts": 1,
    r"(vocab_size|n_vocab|text_vocab_size|vocab_size_per_layer_input)": VOCABULARY,
    r"hidden_size_per_layer_input": 16,
    r"(first_k_dense_replace|moe_layer_start_index|num_dense_layers|num_kv_shared_layers|first_k_dense_layers)": 1,
    r"sliding_window|window_size|attention_window": 6,
    r"index_n_heads": 16,
    r"index_head_dim": 16,
    r"index_topk": 64,
    r"linear_(key|value)_head_dim|mamba_d_head|mamba_head_dim|mamba_d_state|ssm_state_size|state_size": 16,
    r"linear_num_(key|value)_heads|mamba_n_heads|mamba_num_heads": 4,
    r"(mamba_)?n_groups": 1,
    r"mamba_d_ssm": 64,
    r"image_size": 56,
    r"patch_size": 14,
}
"""Regular expression of an attribute of configurations -> its size in a tiny model, if it has more."""


def tiny_config(kind: str, **changes: Any) -> PreTrainedConfig:
    """Return the default configuration of a model type with small sizes, at any depth; `changes` are of the outermost.

    Layers are chosen such that there is one of each kind.
    """
    config = _shrunk(AutoConfig.for_model(kind), changes)
    return config


def _shrunk(config: PreTrainedConfig, changes: dict[str, Any]) -> PreTrainedConfig:
    given = {name: value for name, value in config.to_dict().items() if name not in ("transformers_version",)}
    parts = {name: value for name, value in vars(config).items() if isinstance(value, PreTrainedConfig)}
    layers = next((given[n] for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if isinstance(given.get(n), int)), None)
    smaller: dict[str, Any] = {}
    for name, value in given.items():
        if name in parts:
            continue
        if type(value) is int:
            size = next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), None)
            if size is not None and value > size:
                smaller[name] = size
            elif "token" in name and value >= VOCABULARY:
                smaller[name] = 7
        elif isinstance(value, float) and "drop" in name:
            smaller[name] = 0.0
        elif isinstance(value, list) and layers is not None and len(value) == layers > LAYERS:
            smaller[name] = [value[index] for index in _chosen(given, layers)]
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if name in given:
            smaller[name] = {"bos": 1, "eos": 2, "pad": 0}[name[:3]]
    result = type(config)(**{**given, **{n: p.to_dict() for n, p in parts.items()}, **smaller, **changes})
    for name, part in parts.items():
        setattr(result, name, _shrunk(part, {}))
    return result


def _chosen(given: dict[str, Any], layers: int) -> list[int]:
    kinds = given.get("layer_types") or [0] * layers
    first = list(dict.fromkeys(kinds.index(kind) for kind in kinds))[:LAYERS]
    rest = [index for index in range(layers) if index not in first]
    return sorted((first + rest)[:LAYERS])


def tiny(kind: str, auto: Any, dtype: torch.dtype = torch.float32, **changes: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model: PreTrainedModel = auto.from_config(tiny_config(kind, **changes), dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.1)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
