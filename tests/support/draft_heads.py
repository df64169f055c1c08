"""Random draft heads in the formats of published EAGLE and EAGLE-3 heads, and a model with multi-token prediction.

Their drafts are accepted now and then, because they are sampled with the noise of the sampler.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.testing.tiny_models import tiny_config, tiny_model
from tests.support.engine_harness import save_as_base_model

DRAFT_VOCABULARY = 200
"""Number of tokens that the EAGLE-3 head can draft, of the 320 of the model."""


def save_draft_head(folder: Path, method: str) -> str:
    """Save a head of one layer for `tiny_model("qwen3")`; return the folder's path.

    Args:
        folder: The folder to write to.
        method: "eagle" or "eagle3".
    """
    config = tiny_config("llama", layers=1, tied=False).to_dict()
    layer = {
        name.removeprefix("model.layers.0."): tensor
        for name, tensor in tiny_model("llama", layers=1, seed=1).state_dict().items()
        if name.startswith("model.layers.0.")
    }
    width = config["hidden_size"]
    tensors: dict[str, Tensor] = {"fc.weight": 0.1 * torch.randn(width, 2 * width)}
    if method == "eagle":
        config["architectures"] = ["LlamaForCausalLM"]
        del layer["input_layernorm.weight"]
        tensors |= {f"layers.0.{name}": tensor for name, tensor in layer.items()}
    else:
        config |= {
            "architectures": ["LlamaForCausalLMEagle3"],
            "draft_vocab_size": DRAFT_VOCABULARY,
            "eagle_aux_hidden_state_layer_ids": [0, 1],
            "num_aux_hidden_states": 2,
        }
        for name in ("q", "k", "v"):  # They read the embedding, too.
            key = f"self_attn.{name}_proj.weight"
            layer[key] = torch.cat((layer[key], layer[key]), dim=1)
        layer["hidden_norm.weight"] = torch.ones(width)
        tensors |= {f"midlayer.{name}": tensor for name, tensor in layer.items()}
        tensors |= {
            "norm.weight": torch.ones(width),
            "lm_head.weight": 0.1 * torch.randn(DRAFT_VOCABULARY, width),
            "d2t": torch.full((DRAFT_VOCABULARY,), 20),  # The head drafts the tokens 20 to 219.
        }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return str(folder)


def save_mtp_model(folder: Path) -> str:
    """Save a tiny GLM-4.5 with a layer for multi-token prediction; return the folder's path."""
    torch.manual_seed(0)
    shared = tiny_config("llama", tied=False).to_dict()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = AutoConfig.for_model(
        "glm4_moe",
        **{name: shared[name] for name in (*names, "num_key_value_heads", "head_dim", "initializer_range")},
        max_position_embeddings=4096, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0, bos_token_id=None,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, first_k_dense_replace=1, n_group=1,
        topk_group=1, n_shared_experts=1, num_nextn_predict_layers=1,
    )  # fmt: skip
    save_as_base_model(AutoModelForCausalLM.from_config(config, dtype=torch.float32), folder)
    tensors, width, last = load_file(folder / "model.safetensors"), config.hidden_size, "model.layers.1."
    added = "model.layers.2."
    tensors |= {
        name.replace(last, added): tensor + 0.05 * torch.randn_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith(last)
    }
    tensors[f"{added}eh_proj.weight"] = 0.1 * torch.randn(width, 2 * width)
    tensors |= {f"{added}{name}.weight": torch.ones(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{added}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors[f"{added}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return str(folder)
