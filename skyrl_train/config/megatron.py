"""Recipes of `trainer.strategy=megatron`: what of Megatron's parallelism runs here, and under which keys."""

from __future__ import annotations

from skyrl_train.config.keys import value_at, with_value_at
from skyrl_train.config.schema import Config

_ROLES = ("policy", "ref")


def resolve_megatron(config: Config) -> tuple[Config, list[str]]:
    """The configuration with Megatron's tensor parallelism as that of fsdp2; a note for every change."""
    if config.trainer.strategy != "megatron":
        return config, []
    notes = ["trainer.strategy=megatron -> fsdp2: layers are divided by transformers' tensor-parallel plan."]
    config = with_value_at(config, "trainer.strategy", "fsdp2")
    for role in _ROLES:
        theirs = f"trainer.{role}.megatron_config.tensor_model_parallel_size"
        ours = f"trainer.{role}.tensor_parallel_size"
        size = value_at(config, theirs)
        if size != 1 and value_at(config, ours) == 1:  # else what was written for fsdp2 counts
            config = with_value_at(with_value_at(config, theirs, 1), ours, size)
            notes.append(f"{theirs}={size} -> {ours}={size}.")
    return config, notes
