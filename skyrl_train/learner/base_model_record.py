"""A record of the model that training started from. Resuming a checkpoint compares it, to reject other base models."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from transformers import PreTrainedModel

from skyrl_train.config.schema import LoraConfig
from skyrl_train.errors import CheckpointMismatch
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.pretrained_weights import PretrainedWeights
from skyrl_train.weight_sync.buckets import fingerprint


@dataclass(frozen=True)
class LoraRecord:
    """The settings of a model's LoRA adapters, as they are written to trainer_state.json."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    """Names of the adapted layers and parameters of experts, sorted."""

    @classmethod
    def of(cls, settings: LoraConfig, adapters: LoraAdapters) -> LoraRecord:
        """Return the record of `adapters`, which were made with `settings`."""
        return cls(settings.rank, settings.alpha, tuple(sorted([*adapters.layers, *adapters.experts])))


@dataclass(frozen=True)
class BaseModelRecord:
    """The model that a policy or critic started from, as it is written to trainer_state.json."""

    weights: str
    """Fingerprint of all loaded weights. Equal weights in different files have the same fingerprint."""
    lora: LoraRecord | None
    """None for a model that is trained without adapters."""

    @classmethod
    def of(cls, shares: Iterable[Mapping[str, str]], lora: LoraRecord | None) -> BaseModelRecord:
        """Return the record of a model.

        Args:
            shares: The results of `tensor_fingerprints` on all ranks.
            lora: The record of the adapters; None if there are none.
        """
        fingerprints = sorted({name: digest for share in shares for name, digest in share.items()}.items())
        return cls(hashlib.sha256(json.dumps(fingerprints).encode()).hexdigest()[:16], lora)


def tensor_fingerprints(
    model: PreTrainedModel, pretrained: PretrainedWeights, rank: int, world_size: int
) -> dict[str, str]:
    """Return the fingerprints of this rank's share of a model's pretrained tensors.

    Each rank reads every `world_size`-th tensor in descending order of size, so all ranks together read the weights
    once.

    Args:
        model: The model with its parameters and buffers, which may be on the meta device.
        pretrained: The values of the tensors when they were loaded.
        rank: The rank, from 0.
        world_size: The number of ranks.

    Returns:
        dtype, shape and fingerprint of each tensor as text, by tensor name.
    """
    tensors = {
        name: tensor
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if name in pretrained
    }  # fmt: skip
    by_size = sorted(tensors, key=lambda name: (-tensors[name].numel(), name))
    fingerprints = {}
    for name in by_size[rank::world_size]:
        total = 0
        for part in pretrained.iter_row_blocks(name):
            total += fingerprint(part)
        fingerprints[name] = f"{part.dtype} {list(tensors[name].shape)} {total % 2**64:016x}"
    return fingerprints


def check_same_base_model(checkpoint: Path, saved: BaseModelRecord, current: BaseModelRecord, section: str) -> None:
    """Check that a checkpoint was trained from the same base model as the current run, with the same LoRA settings.

    Args:
        checkpoint: The folder of the checkpoint, for the message.
        saved: The record in the checkpoint.
        current: The record of the model that is loaded now.
        section: The configuration section of the model, such as "trainer.policy.model".

    Raises:
        CheckpointMismatch: The fingerprint of the base weights differs, the adapters have another rank or alpha, or
            they belong to other layers. Equal weights at another path pass.
    """
    differences = list(_lora_differences(saved.lora, current.lora, f"{section}.lora"))
    if saved.weights != current.weights:
        differences.append(f"{section}.path: its weights had the fingerprint {saved.weights}, now {current.weights}")
    if differences:
        raise CheckpointMismatch(
            f"{checkpoint} was trained from another model: {'; '.join(differences)}. Restore these settings (the path "
            "may differ if the weights are equal), or start a new run in another trainer.ckpt_path."
        )


def _lora_differences(saved: LoraRecord | None, current: LoraRecord | None, key: str) -> Iterator[str]:
    if saved is None or current is None:
        if saved != current:
            yield f"{key}.rank was {0 if saved is None else saved.rank}, is {0 if current is None else current.rank}"
        return
    if saved.rank != current.rank:
        yield f"{key}.rank was {saved.rank}, is {current.rank}"
    if saved.alpha != current.alpha:
        yield f"{key}.alpha was {saved.alpha}, is {current.alpha}"
    if changed := sorted({*saved.targets} ^ {*current.targets}):
        place = "only in the checkpoint" if changed[0] in saved.targets else "not in the checkpoint"
        yield (
            f"{key}.target_modules or target_parameters: the adapters of {len(changed)} layers differ; that of "
            f"{changed[0]} is {place}"
        )
