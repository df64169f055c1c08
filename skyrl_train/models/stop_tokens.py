"""The tokens at which a model's responses end."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import GenerationConfig

from skyrl_train.data.control_tokens import end_of_turn_token
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
