"""How recipes distribute the work over ranks, in the terms of this package.

`trainer.strategy=megatron` runs as fsdp2, which shards models over all ranks of a role. Megatron's tensor parallelism
becomes transformers' plan for the model, its context parallelism becomes Ulysses, its expert parallelism shares experts
out over ranks of FSDP2, and the ranks of its other kinds become ranks of FSDP2. No gradient depends on any of this.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.keys import value_at, with_value_at
from skyrl_train.config.schema import Config

_ROLES = ("policy", "ref")
_SHARDED = ("pipeline_model", "expert_tensor")
"""Kinds of parallelism whose ranks are ranks of FSDP2 here."""


def resolve_megatron(config: Config) -> tuple[Config, list[str]]:
    """The configuration with Megatron's sizes as sizes of fsdp2, and a note for every change."""
    if config.trainer.strategy != "megatron":
        return config, []
    notes = ["trainer.strategy=megatron -> fsdp2: models are sharded over all ranks of a role."]
    config = with_value_at(config, "trainer.strategy", "fsdp2")
    for role in _ROLES:
        for kind, key, size, reason in _moves(config, role):
            theirs = f"trainer.{role}.megatron_config.{kind}_parallel_size"
            notes.append(f"{theirs}={value_at(config, theirs)} -> {key}{'' if size is None else f'={size}'}{reason}.")
            config = with_value_at(config, theirs, None if kind == "expert_tensor" and role == "policy" else 1)
            if size is not None:
                config = with_value_at(config, key, size)
    return config, notes


def _moves(config: Config, role: str) -> Iterator[tuple[str, str, int | None, str]]:
    """(Megatron's kind of parallelism, what it becomes here, its size, why); without a size, ranks of FSDP2."""
    section = getattr(config.trainer, role)
    megatron = section.megatron_config
    tensor, context = megatron.tensor_model_parallel_size, megatron.context_parallel_size
    experts = megatron.expert_model_parallel_size
    ours = f"trainer.{role}"
    sharded = "FSDP2 over those ranks"
    if context > 1 and section.sequence_parallel_size == 1:  # otherwise what was written for fsdp2 counts
        yield "context", f"{ours}.sequence_parallel_size", context, ""
    if experts > 1 and section.expert_parallel_size == 1:
        if config.trainer.policy.use_torch_compile:
            yield "expert_model", sharded, None, ": layers are compiled"
        else:
            yield "expert_model", f"{ours}.expert_parallel_size", experts, ""
    if tensor > 1 and section.tensor_parallel_size == 1:
        why = _why_no_tensor_parallelism(config, role, context, experts)
        if why:
            yield "tensor_model", sharded, None, f": {why}"
        else:
            yield "tensor_model", f"{ours}.tensor_parallel_size", tensor, ""
    for kind in _SHARDED:
        if (getattr(megatron, f"{kind}_parallel_size") or 1) > 1:
            yield kind, sharded, None, ""


def _why_no_tensor_parallelism(config: Config, role: str, context: int, experts: int) -> str:
    section = getattr(config.trainer, role)
    if context > 1 or section.sequence_parallel_size > 1:
        return "sequences are divided already"
    if experts > 1 or section.expert_parallel_size > 1:
        return "experts are shared out already"
    return "layers are compiled" if config.trainer.policy.use_torch_compile else ""


def resolve_engine_copies(config: Config) -> tuple[Config, list[str]]:
    """Make data-parallel copies inside an engine engines of their own, with the same accelerators and samples."""
    generator = config.generator
    copies, ranks = generator.inference_engine_data_parallel_size, generator.inference_engine_tensor_parallel_size
    if copies <= 1 or not generator.run_engines_locally:
        return config, []
    engines = generator.num_inference_engines * copies
    note = (
        f"generator.inference_engine_data_parallel_size={copies} -> generator.num_inference_engines={engines}: "
        "copies are engines of their own"
    )
    changes = {"inference_engine_data_parallel_size": 1, "num_inference_engines": engines}
    if generator.inference_engine_expert_parallel_size == copies * ranks:
        changes["inference_engine_expert_parallel_size"] = ranks
        note += f", each with its experts on its {ranks} ranks" if ranks > 1 else ", each with all experts"
    for key, value in changes.items():
        config = with_value_at(config, f"generator.{key}", value)
    return config, [f"{note}."]
