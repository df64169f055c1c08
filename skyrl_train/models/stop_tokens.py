"""The tokens at which a model's responses end, and the generation config that names them."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME, cached_file

from skyrl_train.data.end_of_turn import end_of_turn_token
from skyrl_train.models.loading import load_config
from skyrl_train.storage.copies import local_copy


def stop_tokens(tokenizer: Any, *configs: Any) -> frozenset[int]:
    """Return the ids of all tokens that end a response.

    These are the end-of-sequence tokens of `configs` and of the tokenizer, and the token with which the tokenizer's
    chat template closes an answer.

    Args:
        tokenizer: None for a model without one.
        configs: Generation and model configurations; see `stop_configs`.
    """
    end = end_of_turn_token(tokenizer)
    return end_tokens(*configs, tokenizer) | (frozenset() if end is None else {end})


def end_tokens(*sources: Any) -> frozenset[int]:
    """Return all end-of-sequence ids named by `sources`: generation config, model config or tokenizer."""
    found: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, list | tuple) else [ids] if ids is not None else [])
    return frozenset(found)


def stop_configs(model: str) -> list[Any]:
    """Return the configurations of a folder or hub name that may name end-of-sequence tokens."""
    config = load_config(model)
    configs: list[Any] = [config, config.get_text_config()]
    with suppress(OSError):  # it is optional
        configs.append(GenerationConfig.from_pretrained(local_copy(model, weights=False)))
    return configs


def write_generation_config(model: str, tokenizer: Any, directory: Path) -> None:
    """Copy the generation config of `model`, extended by the chat template's end-of-turn token if it lacks that one.

    Without a generation config one is written only for an end-of-turn token that nothing else in the export names.

    Args:
        model: The folder or hub name that the exported model was trained from.
        tokenizer: The exported tokenizer.
        directory: The exported folder.
    """
    source = cached_file(
        local_copy(model, weights=False), GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False
    )
    config = {} if source is None else json.loads(Path(source).read_text(encoding="utf-8"))
    named, end = config.get("eos_token_id"), end_of_turn_token(tokenizer)
    ends = sorted(end_tokens(*stop_configs(model), tokenizer)) if named is None else named
    ends = ends if isinstance(ends, list) else [ends]
    if end is not None and end not in ends:
        extended = json.dumps(config | {"eos_token_id": [*ends, end]}, indent=2)
        (directory / GENERATION_CONFIG_NAME).write_text(extended + "\n", encoding="utf-8")
    elif source is not None:
        shutil.copyfile(source, directory / GENERATION_CONFIG_NAME)
