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
from skyrl_train.weight_sync.protocol import dtype_of
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
    """Run a sync on all ranks and compare it with the ranks' weights.

    Returns:
        `announced` and `sent`: True if the manifest and the sent buckets have the fingerprints of the weights.
        `gathered`: gathered bytes divided by the bytes of all tensors in the wire dtype.
    """
    sender = WeightSender(
        parameters,
        wire_dtype=wire_dtype,
        bucket_bytes=4096,
        rank=dist.get_rank(),
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
    held = {name: fingerprint(part.full_tensor().to(dtype_of(wire_dtype))) for name, part in parameters()}
    return {
        "announced": announced == held,
        "sent": arrived == (held if dist.get_rank() == 0 else {}),
        "gathered": gathered.count / sum(num_bytes(spec) for spec in manifest.tensors),
    }


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
