"""Models with an incomplete configuration: it lacks the end of a turn, or ties a head that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model

END_OF_SEQUENCE, END_OF_TURN = 0, 2
FILE = "generation_config.json"


def save_base_model(folder: Path, *, generation: dict[str, Any] | None) -> str:
    """Save a model that names <|endoftext|> as its end of sequence, whatever `generation` names."""
    save_tiny_model(folder)
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": END_OF_SEQUENCE}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / FILE).unlink()
    if generation is not None:
        (folder / FILE).write_text(json.dumps(generation))
    return str(folder)


def save_with_head(folder: Path, *, equal: bool = False, kind: str = "qwen2", **options: Any) -> str:
    """Save a model whose config.json ties the head to the embedding, although the weights have a head."""
    save_tiny_model(folder, kind, **options)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    torch.manual_seed(3)
    weights["lm_head.weight"] = embedding.clone() if equal else 0.1 * torch.randn_like(embedding)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)
