"""Tokenizer and datasets, from configuration."""

from __future__ import annotations

from typing import Any

from skyrl_train.config.schema import Config
from skyrl_train.models.loading import load_tokenizer


def build_tokenizer(cfg: Config) -> Any:
    """The policy's tokenizer."""
    return load_tokenizer(cfg.trainer.policy.model.path, use_fast=not cfg.trainer.disable_fast_tokenizer)
