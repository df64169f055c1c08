"""A base model whose configuration names another token than the one that ends a turn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

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
