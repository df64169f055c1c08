"""Tiny composite checkpoints: language models with a vision tower, as multimodal families publish them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

from skyrl_train.testing.tiny_models import byte_tokenizer

_MROPE = {"rope_type": "default", "rope_theta": 10000.0}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
_TEXT: dict[str, dict[str, Any]] = {
    "gemma3": {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4": {
        "sliding_window": 6,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "num_kv_shared_layers": 0,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 320,
        "final_logit_softcapping": 30.0,
        "use_bidirectional_attention": None,
    },
    "mistral3": {
        "model_type": "ministral3",
        "rope_parameters": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 256.0, "beta_fast": 32.0, "beta_slow": 1.0},
            **{"mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16},
            "llama_4_scaling_beta": 0.1,
        },
    },
    "qwen2_5_vl": {"rope_parameters": _MROPE | {"mrope_section": [4, 6, 6]}},
    "qwen3_vl": {"rope_parameters": _MROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}},
    "qwen3_vl_moe": _EXPERTS
    | {"rope_parameters": _MROPE | {"mrope_section": [6, 5, 5], "mrope_interleaved": True}, "norm_topk_prob": True},
    "llama4": {
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 128,
        "no_rope_layers": [1, 0],
        "attn_temperature_tuning": True,
    },
    "qwen3_5": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "rope_parameters": _MROPE | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
    },
    "glm4v": {"rope_parameters": _MROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 0.5}},
    "internvl": {"model_type": "qwen2"},
    "qwen2_vl": {"rope_parameters": _MROPE | {"mrope_section": [4, 6, 6]}},
    "smolvlm": {"model_type": "llama"},
}
_QWEN_VISION = {"hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "depth": 1, "out_hidden_size": 64}
_SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "image_size": 28,
    "patch_size": 14,
}
_VISION: dict[str, dict[str, Any]] = {
    "gemma3": _SIGLIP,
    "gemma4": {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 1,
        "position_embedding_size": 64,
    },
    "mistral3": _SIGLIP | {"model_type": "pixtral", "head_dim": 16},
    "qwen2_5_vl": _QWEN_VISION | {"fullatt_block_indexes": [0]},
    "qwen3_vl": _QWEN_VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    "qwen3_vl_moe": _QWEN_VISION | {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
    "llama4": _SIGLIP
    | {"intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32},
    "qwen3_5": _QWEN_VISION | {"num_position_embeddings": 64},
    "glm4v": _QWEN_VISION | {"image_size": 28},
    "internvl": _SIGLIP | {"image_size": [28, 28], "patch_size": [14, 14]},
    "qwen2_vl": {"embed_dim": 32, "hidden_size": 64, "num_heads": 2, "depth": 1, "mlp_ratio": 2},
    "smolvlm": _SIGLIP,
}
_TOP: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 1, "boi_token_index": 300, "eoi_token_index": 301, "image_token_index": 302},
    "gemma4": {
        **{"image_token_id": 302, "boi_token_id": 300, "eoi_token_id": 301, "audio_token_id": 303},
        **{"boa_token_id": 304, "eoa_token_id": 305, "video_token_id": 306, "audio_config": None},
    },
    "mistral3": {"image_token_index": 302, "spatial_merge_size": 1},
    "llama4": {"boi_token_index": 300, "eoi_token_index": 301, "image_token_index": 302},
    "internvl": {"image_token_id": 302},
    "smolvlm": {"image_token_id": 302, "scale_factor": 1},
}
_QWEN_TOKENS = {"image_token_id": 302, "video_token_id": 303, "vision_start_token_id": 300, "vision_end_token_id": 301}
_OWN_HEAD_SIZE = ("glm4v", "internvl", "qwen2_5_vl", "qwen2_vl")
"""Model types whose attention ignores `head_dim`."""
KINDS = tuple(_TEXT)
"""Values of `model_type` of the available composites."""


def composite_model(
    kind: str,
    *,
    tied: bool = False,
    hidden_size: int = 64,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return a randomly initialised composite of `kind`, in evaluation mode."""
    text = {
        "vocab_size": 320,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": hidden_size // 32 if kind in _OWN_HEAD_SIZE else 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": tied,
    }
    vision = dict(_VISION[kind])
    if "out_hidden_size" in vision:
        vision["out_hidden_size"] = hidden_size
    if kind == "qwen2_vl":
        vision["hidden_size"] = hidden_size
    config = AutoConfig.for_model(
        kind,
        text_config=text | _TEXT[kind],
        vision_config=vision,
        tie_word_embeddings=tied,
        **_TOP.get(kind, _QWEN_TOKENS),
    )
    torch.manual_seed(seed)
    model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases begin equal in all models
                parameter.add_(0.1 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.mul_(0.5)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the others do not support float64
    return model


def save_composite(folder: Path, kind: str, **options: Any) -> str:
    """Save a composite, the byte tokenizer and files of a processor as a Hugging Face folder; return its path."""
    composite_model(kind, **options).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text('{"do_resize": true, "image_mean": [0.5, 0.5, 0.5]}\n')
    (folder / "processor_config.json").write_text('{"image_seq_length": 1}\n')
    return str(folder)
