"""The tokens that end a model's responses."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from transformers import GenerationConfig

from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.models.loading import load_config
from skyrl_train.storage.download_cache import local_copy


def get_stop_tokens(tokenizer: Any, *configs: Any) -> frozenset[int]:
    """Return the ids of all tokens that end a response.

    These are the end-of-sequence tokens of `configs` and of the tokenizer, and the token with which the tokenizer's
    chat template ends an assistant turn.

    Args:
        tokenizer: The tokenizer; None for a model without one.
        configs: Generation and model configurations; see `load_stop_configs`.
    """
    end = find_end_of_turn_token(tokenizer)
    return get_eos_tokens(*configs, tokenizer) | (frozenset() if end is None else {end})


def get_eos_tokens(*sources: Any) -> frozenset[int]:
    """Return all end-of-sequence ids in `sources`: generation configs, model configs or tokenizers; None is allowed."""
    eos_ids: set[int] = set()
    for source in sources:
        ids = getattr(source, "eos_token_id", None)
        eos_ids.update(ids if isinstance(ids, list | tuple) else [ids] if ids is not None else [])
    return frozenset(eos_ids)


def load_stop_configs(model: str) -> list[Any]:
    """Return the configurations of a model that may name end-of-sequence tokens: its config, text config, generation
    config.

    Args:
        model: A folder or hub name. Its generation config is optional.

    Raises:
        ConfigError: The model's configuration cannot be loaded.
    """
    config = load_config(model)
    configs: list[Any] = [config, config.get_text_config()]
    with suppress(OSError):  # it is optional
        configs.append(GenerationConfig.from_pretrained(local_copy(model, weights=False)))
    return configs
