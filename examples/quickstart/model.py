"""A small model and a tokenizer for the generated word problems, both created on the fly."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|unknown|>")
PIECES = r" ?\d| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s"
"""Pattern of tokens: words and signs with the preceding space, single digits, and line breaks."""

MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
}
"""Transformers' name of an architecture -> settings that only it has. Qwen3.5 mixes gated delta nets and attention."""
CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for every piece that occurs in `texts`, all digits, and ChatML's markers."""
    splitter = pre_tokenizers.Split(Regex(PIECES), "isolated")
    pieces = {piece for text in texts for piece, _ in splitter.pre_tokenize_str(text)}
    pieces |= {"user", "assistant", "\n"} | {space + digit for digit in "0123456789" for space in ("", " ")}
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *sorted(pieces)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<|unknown|>"))
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|unknown|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


def make_model(
    vocabulary: int, seed: int, hidden_size: int = 192, layers: int = 3, model_type: str = "llama"
) -> PreTrainedModel:
    """Return a randomly initialized model with one to two million parameters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=-(-vocabulary // 16) * 16,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
        **MODEL_TYPES[model_type],
    )
    return AutoModelForCausalLM.from_config(config)


def save_model(folder: Path, texts: list[str], seed: int, model_type: str = "llama") -> int:
    """Save a new model, and a tokenizer for `texts`, to a Hugging Face folder; return the number of parameters."""
    tokenizer = make_tokenizer(texts)
    model = make_model(len(tokenizer), seed, model_type=model_type)
    disable_progress_bar()
    # Saving a model imports DeepSpeed if it is installed, which warns about the missing GPU.
    logging.getLogger("DeepSpeed").disabled = True
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())
