"""Models and tokenizers that are small enough for tests. They are created without the hub."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}"
    "{% else %}{{ message['content'] + '<|im_end|>' + '\n' }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_DEEPSEEK_V3: dict[str, object] = {
    "num_key_value_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 32,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
"""Settings for latent attention, and for one layer without experts before the layers with experts."""
_EXPERTS: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_GATED_DELTA_NET: dict[str, object] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_QWEN_EXPERTS = _GATED_DELTA_NET | _EXPERTS | {"shared_expert_intermediate_size": 64}
_MAMBA2: dict[str, object] = {
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}
_HYBRID: dict[str, tuple[tuple[str, ...], dict[str, object]]] = {
    "qwen3_5_text": (("linear_attention", "full_attention"), _GATED_DELTA_NET),
    "qwen3_5_moe_text": (("linear_attention", "full_attention"), _QWEN_EXPERTS),
    "qwen3_next": (("linear_attention", "full_attention"), _QWEN_EXPERTS),
    "lfm2": (("conv", "full_attention"), {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": (("conv", "full_attention"), _EXPERTS | {"num_dense_layers": 1}),
    "falcon_h1": ((), _MAMBA2 | {"mamba_d_ssm": 64, "mamba_d_head": 16}),
    "granitemoehybrid": (
        ("linear_attention", "full_attention"),
        _MAMBA2 | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "nemotron_h": (
        ("linear_attention", "full_attention", "mlp", "moe"),
        {
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
        },
    ),
    "kimi_linear": (
        ("linear_attention", "full_attention"),
        _EXPERTS
        | {
            "linear_num_heads": 2,
            "linear_head_dim": 16,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 16,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}
"""Models with recurrent layers: the types of their layers in turn, and other settings. Falcon-H1's layers have both."""
HYBRID_KINDS = tuple(_HYBRID)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte and ChatML's three special tokens, with ids from 0 to 258.

    Any text survives encoding and decoding. The chat template is ChatML.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


def tiny_model(
    kind: str = "qwen2",
    *,
    vocab_size: int = 320,
    hidden_size: int = 64,
    layers: int = 2,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> PreTrainedModel:
    """Return a randomly initialized model of a real architecture. This sets torch's global seed.

    Weights are drawn from a wider distribution than usual, so that the probabilities of tokens clearly differ.

    Args:
        kind: Model type of transformers, such as qwen2, qwen3_moe, llama, gemma, mistral or gpt_oss.
        vocab_size: Number of tokens.
        hidden_size: Width of the hidden states.
        layers: Number of layers.
        tied: True to use the embedding as the head.
        seed: Seed of the weights.
        dtype: Data type of the weights.
    """
    torch.manual_seed(seed)
    config = tiny_config(kind, vocab_size, hidden_size, layers, tied)
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def tiny_config(
    kind: str, vocab_size: int = 320, hidden_size: int = 64, layers: int = 2, tied: bool = True
) -> PreTrainedConfig:
    """Return the configuration of a model of `tiny_model`.

    Args:
        kind: Model type of transformers, such as qwen2, qwen3_moe, llama, gemma, mistral or gpt_oss.
        vocab_size: Number of tokens.
        hidden_size: Width of the hidden states.
        layers: Number of layers.
        tied: True to use the embedding as the head.
    """
    experts: dict[str, object] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden_size}
    special: dict[str, dict[str, object]] = {
        "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": hidden_size},
        "deepseek_v3": _DEEPSEEK_V3 | {"moe_intermediate_size": hidden_size},
    }
    if kind in _HYBRID:
        types, settings = _HYBRID[kind]
        special[kind] = settings | ({"layer_types": [types[i % len(types)] for i in range(layers)]} if types else {})
    shape: dict[str, object] = special.get(kind, experts if kind.endswith("moe") else {})
    common: dict[str, object] = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 2 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": max(32, hidden_size // 4),
        "max_position_embeddings": 4096,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return AutoConfig.for_model(kind, **common | shape)


def save_tiny_model(directory: Path, kind: str = "qwen2", **options: object) -> str:
    """Save a tiny model and the byte tokenizer as a Hugging Face folder; return the folder's path.

    Args:
        directory: The folder to write to.
        kind: Model type of transformers.
        options: Further arguments of `tiny_model`.
    """
    tiny_model(kind, **options).save_pretrained(directory)  # type: ignore[arg-type]
    byte_tokenizer().save_pretrained(directory)
    return str(directory)


def save_tiny_reward_model(directory: Path, kind: str = "qwen2", seed: int = 0, **config: object) -> str:
    """Save a sequence classifier with one output and the byte tokenizer; return the folder's path.

    This sets torch's global seed.

    Args:
        directory: The folder to write to.
        kind: Model type of transformers.
        seed: Seed of the weights.
        config: Changes of the model's configuration.
    """
    torch.manual_seed(seed)
    settings = tiny_config(kind)
    settings.num_labels = 1
    settings.update(config)
    AutoModelForSequenceClassification.from_config(settings).save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return str(directory)
