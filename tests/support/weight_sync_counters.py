"""Counters of the announcements, bytes sent and bytes gathered by a rank in a weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.models.sharded_tensor import ShardedTensor
from skyrl_train.weight_sync.buckets import fingerprint, num_bytes, packed_fingerprints, plan_buckets
from skyrl_train.weight_sync.changes import sends_changes
from skyrl_train.weight_sync.protocol import Bucket, Manifest, dtype_of
from skyrl_train.weight_sync.receiver import InPlaceWeightStore, WeightReceiver
from skyrl_train.weight_sync.sender import WeightSender


class GatheredBytes(TorchDispatchMode):
    """A counter of the bytes that this rank receives by gathering."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "all_gather_into_tensor" in func.name():
            self.count += result.nbytes
        elif "allgather_base" in func.name():
            self.count += args[0].nbytes
        return result


def _sum_over_ranks(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


def count_synced_bytes(
    parameters: Callable[[], Iterator[tuple[str, ShardedTensor]]], wire_dtype: str
) -> dict[str, Any]:
    """Run a sync on all ranks, and one of changed elements, and compare them with the ranks' weights.

    Returns:
        `announced` and `sent`: True if the manifest and the sent buckets have the fingerprints of the weights.
        `gathered`: gathered bytes divided by the bytes of all tensors in the wire dtype.
        `changes`: True if a receiver reconstructs the tensors from the elements that changed, and their number is
            announced.
    """
    changed = False

    def current() -> Iterator[tuple[str, ShardedTensor]]:
        return ((name, part.map(_with_changes) if changed else part) for name, part in parameters())

    def full_tensors() -> dict[str, Tensor]:
        return {name: part.full_tensor().to(dtype_of(wire_dtype)) for name, part in current()}

    sender = WeightSender(
        current,
        wire_dtype=wire_dtype,
        bucket_bytes=4096,
        rank=dist.get_rank(),
        weight_sync_only_changed=True,
        world_size=dist.get_world_size(),
        all_reduce_sum=_sum_over_ranks,
    )
    sender.connect("in_process", "", 2, 60.0)
    with GatheredBytes() as gathered:
        manifest = sender.prepare_manifest(1)
        sent = [sender.send(bucket.index) for bucket in plan_buckets(manifest)]
    announced = {spec.name: spec.fingerprint for spec in manifest.tensors}
    specs = {spec.name: spec for spec in manifest.tensors}
    arrived: dict[str, int] = {}
    for bucket in sent:
        if bucket is not None and bucket.payload is not None:
            found = packed_fingerprints(bucket.payload, [specs[name] for name in bucket.names])
            arrived |= dict(zip(bucket.names, found, strict=True))
    before = full_tensors()
    held = {name: fingerprint(tensor) for name, tensor in before.items()}
    loaded = {name: torch.zeros_like(tensor) for name, tensor in before.items()}
    receiver = WeightReceiver(InPlaceWeightStore(lambda: loaded), "engine")
    receiver.connect("in_process", "", 1, 2, 60.0)
    _deliver(sender, receiver, manifest, sent)
    changed = True
    partial = sender.prepare_manifest(2)
    _deliver(sender, receiver, partial, [sender.send(bucket.index) for bucket in plan_buckets(partial)])
    after = full_tensors()
    numbers = {name: int((_bits(after[name]) != _bits(before[name])).sum()) for name in after}
    assert len(partial.tensors) == len(loaded)
    assert sum(map(sends_changes, partial.tensors)) > len(loaded) / 2
    return {
        "changes": {spec.name: spec.changed for spec in partial.tensors} == numbers
        and (dist.get_rank() > 0 or all(torch.equal(_bits(loaded[name]), _bits(after[name])) for name in after)),
        "announced": announced == held,
        "sent": arrived == (held if dist.get_rank() == 0 else {}),
        "gathered": gathered.count / sum(num_bytes(spec) for spec in manifest.tensors),
    }


def _with_changes(local: Tensor) -> Tensor:
    """Return a copy with another sign of a few elements; 0.0 becomes -0.0."""
    changed = local.clone(memory_format=torch.contiguous_format)
    changed.view(-1)[::20] *= -1
    return changed


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize])


def _deliver(sender: WeightSender, receiver: WeightReceiver, manifest: Manifest, buckets: list[Bucket | None]) -> None:
    """Pass the buckets to the receiver on the rank that has them, and record the delivery on all ranks."""
    if dist.get_rank() == 0:
        receiver.begin(manifest)
        for bucket in buckets:
            assert bucket is not None
            receiver.receive(bucket)
        receiver.commit(manifest.version)
    sender.mark_delivered(manifest.version)


def _ends_with_nan(tensor: Tensor) -> Tensor:
    spoilt = tensor.clone()
    spoilt.view(-1)[-1] = torch.nan
    return spoilt


def with_nan(parameters: Callable[[], Iterator[tuple[str, ShardedTensor]]]) -> tuple[str, ...]:
    """Return the non-finite names in a manifest if the first parameter ends with NaN on its last rank."""

    def spoilt() -> Iterator[tuple[str, ShardedTensor]]:
        for index, (name, part) in enumerate(parameters()):
            whole = (
                part.local.numel() == torch.Size(part.shape).numel()
            )  # every rank has the whole tensor, and the first rank's counts
            if index == 0 and dist.get_rank() == (0 if whole else dist.get_world_size() - 1):
                part = part.map(_ends_with_nan)
            yield name, part

    sender = WeightSender(
        spoilt, wire_dtype="bfloat16", bucket_bytes=4096, rank=dist.get_rank(), all_reduce_sum=_sum_over_ranks
    )
    return sender.prepare_manifest(1).non_finite
