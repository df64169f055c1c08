"""A record of the model that training started from, by which checkpoints refuse to be resumed on another one."""

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
    """The adapters of a model."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    """Names of the adapted layers, sorted."""

    @classmethod
    def of(cls, settings: LoraConfig, adapters: LoraAdapters) -> LoraRecord:
        return cls(settings.rank, settings.alpha, tuple(sorted(adapters.layers)))


@dataclass(frozen=True)
class BaseModelRecord:
    """The model that a policy or critic started from, as it is written to trainer_state.json."""

    weights: str
    """Fingerprint of all weights that were loaded: equal for equal weights, whatever files they are in."""
    lora: LoraRecord | None
    """None for a model that is trained whole."""

    @classmethod
    def of(cls, shares: Iterable[Mapping[str, str]], lora: LoraRecord | None) -> BaseModelRecord:
        """Put together what the ranks return for `tensor_fingerprints`."""
        every = sorted({name: found for share in shares for name, found in share.items()}.items())
        return cls(hashlib.sha256(json.dumps(every).encode()).hexdigest()[:16], lora)


def tensor_fingerprints(
    model: PreTrainedModel, pretrained: PretrainedWeights, rank: int, world_size: int
) -> dict[str, str]:
    """Return dtype, shape and fingerprint by tensor name, for every `world_size`-th tensor of a model.

    The ranks share out the tensors, so together they read the weights once more than loading does.
    """
    tensors = {name: one for name, one in chain(model.named_parameters(), model.named_buffers()) if name in pretrained}
    by_size = sorted(tensors, key=lambda name: (-tensors[name].numel(), name))
    found = {}
    for name in by_size[rank::world_size]:
        total = 0
        for part in pretrained.iter_row_blocks(name):
            total += fingerprint(part)
        found[name] = f"{part.dtype} {list(tensors[name].shape)} {total % 2**64:016x}"
    return found


def check_same_base_model(checkpoint: Path, saved: BaseModelRecord, now: BaseModelRecord, section: str) -> None:
    """Raise CheckpointMismatch unless a checkpoint was trained from the present model with the present adapters.

    Args:
        checkpoint: The folder of the checkpoint, for the message.
        saved: The record of the checkpoint.
        now: The record of the model that is loaded now.
        section: The configuration section of the model, such as "trainer.policy.model".
    """
    differences = list(_lora_differences(saved.lora, now.lora, f"{section}.lora"))
    if saved.weights != now.weights:
        differences.append(f"{section}.path: its weights had the fingerprint {saved.weights}, now {now.weights}")
    if differences:
        raise CheckpointMismatch(
            f"{checkpoint} was trained from another model: {'; '.join(differences)}. Restore what has changed (a copy "
            "with equal weights may be anywhere), or start a new run in another trainer.ckpt_path."
        )


def _lora_differences(saved: LoraRecord | None, now: LoraRecord | None, key: str) -> Iterator[str]:
    if saved is None or now is None:
        if saved != now:
            yield f"{key}.rank was {0 if saved is None else saved.rank}, is {0 if now is None else now.rank}"
        return
    if saved.rank != now.rank:
        yield f"{key}.rank was {saved.rank}, is {now.rank}"
    if saved.alpha != now.alpha:
        yield f"{key}.alpha was {saved.alpha}, is {now.alpha}"
    if changed := sorted({*saved.targets} ^ {*now.targets}):
        place = "only in the checkpoint" if changed[0] in saved.targets else "not in the checkpoint"
        yield f"{key}.target_modules: adapters of {len(changed)} layers differ; that of {changed[0]} is {place}"
