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
    r"d_model|n_embd|dim|hidden_(size|dim)|emb(ed)?_dim|embedding_size|word_embed_proj_dim|d_embed": 64,
    r".*(intermediate_size|ffn_dim|ffn_hidden_size|[dn]_inner|d_ff|dim_ff|mlp_hidden_size|_intermediate_dim)": 64,
    r".*(num_attention_heads|num_heads|n_heads?|attention_heads)": 4,
    r".*(num_key_value_heads|num_kv_heads|n_kv_heads)": 2,
    r"((global|swa|attention|v|swa_v|qk_nope|qk_rope)_)?head_dim": 16,
    r"q_lora_rank|kv_lora_rank|o_lora_rank": 16,
    r"(num_|n_)?(local_|routed_)?experts|n_routed_experts|moe_num_experts|zero_expert_num": 4,
    r"num_experts_per_tok(en)?|moe_(topk|k|top_k)|num_selected_experts|top_k_experts|experts_per_token": 2,
    r"(n_group|topk_group|num_expert_groups?)": 1,
    r"(n_)?shared_experts|num_shared_experts": 1,
    r"(vocab_size|n_vocab|text_vocab_size|vocab_size_per_layer_input)": VOCABULARY,
    r"hidden_size_per_layer_input|encoder_hash_byte_group_vocab": 16,
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


_SHARED_EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
_MIXED = ["sliding_attention", "full_attention"] * 2
_CONVOLUTIONS = ["conv", "full_attention"] * 2
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_THREE_ROPES = {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}}
_GROUPS = {"n_group": 1, "topk_group": 1}
_OMNI = {"audio_start_token_id": 5, "audio_end_token_id": 3, "vision_start_token_id": 6, "vision_end_token_id": 4}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_head": 32},
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [3, 3, 2]}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "deepseek_v2": {**_SHARED_EXPERTS, **_GROUPS, "topk_method": "greedy"},
    "dots1": _SHARED_EXPERTS,
    "gemma3n_text": {
        "layer_types": _MIXED,
        "intermediate_size": [64] * 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "num_kv_shared_layers": 2,
    },
    "gptj": {"rotary_dim": 8},
    "granitemoehybrid": {"mamba_d_head": 32, "layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "lfm2": {"layer_types": _CONVOLUTIONS},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "mamba2": {"head_dim": 32},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp_text": {
        "indexer_n_heads": 16,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 16,
        "ple_embed_dim": 64,
        "ngram_vocab_size_base": 320,
    },
    "mistral4": {"qk_nope_head_dim": 8, "qk_rope_head_dim": 8},
    "step3p5": {"sliding_window": 6},
    "glm4v_moe_text": {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}},
    "glm4v_text": _THREE_ROPES,
    "glm_ocr_text": _THREE_ROPES,
    "paddleocr_vl_text": _THREE_ROPES,
    "qwen2_5_omni_text": _THREE_ROPES,
    "qwen2_5_omni_thinker": _OMNI,
    "qwen3_omni_moe_thinker": _OMNI,
    "qwen2_5_vl_text": _THREE_ROPES,
    "qwen2_vl_text": _THREE_ROPES,
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "linear_attention", "hybrid"] * 2},
}
"""Model type -> attributes that fit together only with others of them."""


def tiny_config(kind: str) -> PreTrainedConfig:
    """Return the default configuration of a model type with small sizes, at any depth.

    Layers are chosen such that there is one of each kind.
    """
    return AutoConfig.for_model(kind, **_smaller(AutoConfig.for_model(kind)) | _OWN.get(kind, {}))


def _smaller(config: PreTrainedConfig) -> dict[str, Any]:
    given = config.to_dict()
    names = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
    layers = next((given[name] for name in names if isinstance(given.get(name), int)), None)
    smaller: dict[str, Any] = {}
    for name, value in given.items():
        part = vars(config).get(name)
        if isinstance(part, PreTrainedConfig):
            smaller[name] = _smaller(part) | _OWN.get(part.model_type, {}) | {"model_type": part.model_type}
        elif type(value) is int:
            size = next((size for pattern, size in _SIZES.items() if re.fullmatch(pattern, name)), None)
            if size is not None and value > size:
                smaller[name] = size
            elif "token" in name and value >= VOCABULARY:
                smaller[name] = 7
        elif name == "per_layer_config" and layers is not None:
            by_layer = {int(index): [*attributes] for index, attributes in value.items()}
            chosen = enumerate(_chosen(given, layers))
            smaller[name] = {new: dict.fromkeys(by_layer[old], 32) for new, old in chosen if old in by_layer}
        elif isinstance(value, float) and "drop" in name and value:
            smaller[name] = 0.0
        elif isinstance(value, list) and layers is not None and len(value) == layers > LAYERS:
            smaller[name] = [value[index] for index in _chosen(given, layers)]
    heads, keys = (given.get(f"num_{name}_heads") for name in ("attention", "key_value"))
    if heads is not None and heads == keys:
        smaller["num_key_value_heads"] = 4
    for name, token in (("bos_token_id", 1), ("eos_token_id", 2), ("pad_token_id", 0)):
        if name in given:
            smaller[name] = token
    return smaller


def _chosen(given: dict[str, Any], layers: int) -> list[int]:
    kinds = given.get("layer_types") or [0] * layers
    first = list(dict.fromkeys(kinds.index(kind) for kind in kinds))[:LAYERS]
    rest = [index for index in range(layers) if index not in first]
    return sorted((first + rest)[:LAYERS])


def tiny_family(kind: str, auto_class: Any) -> PreTrainedModel:
    """Return a random model in float32 of a model type, in evaluation mode, whose tokens' probabilities clearly differ.

    Args:
        kind: The model type, such as "glm4_moe".
        auto_class: AutoModelForCausalLM or another class of transformers that makes models of configurations.
    """
    torch.manual_seed(0)
    model: PreTrainedModel = auto_class.from_config(tiny_config(kind), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.1)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model
