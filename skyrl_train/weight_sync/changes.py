"""Changed elements of tensors: how a sync sends their positions and values instead of the tensors, for both ends.

Most steps change few elements of a tensor in half precision. Bits are compared, not values: -0.0 differs from 0.0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from skyrl_train.data.host_memory import empty_host_tensor
from skyrl_train.errors import WeightSyncError
from skyrl_train.models.sharded_tensor import ShardedTensor
from skyrl_train.weight_sync.buckets import buffer_bytes, num_bytes, tensor_views
from skyrl_train.weight_sync.protocol import TensorSpec

_BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integer dtypes by itemsize, in which bits are compared."""


@functools.lru_cache(1 << 14)
def wire_spec(spec: TensorSpec) -> TensorSpec:
    """Return the spec of what is sent for a tensor: the tensor, or the bytes of its changes if they are fewer."""
    if spec.changed is None:
        return spec
    size = buffer_bytes(_change_specs(spec))
    return spec if size >= num_bytes(spec) else replace(spec, shape=(size,), dtype="uint8")


def sends_changes(spec: TensorSpec) -> bool:
    """True if changed elements are sent instead of the tensor."""
    return wire_spec(spec) != spec


def apply_changes(spec: TensorSpec, changes: Tensor, base: Tensor) -> Tensor:
    """Return a copy of a tensor with changed elements, on the device of `changes`.

    Args:
        spec: Spec of the tensor.
        changes: Positions and values, uint8 [bytes].
        base: The tensor before the changes.

    Raises:
        WeightSyncError: A position is outside the tensor.
    """
    positions, values = _split(spec, changes)
    lowest, highest = torch.stack(positions.aminmax()).tolist()
    if lowest < 0 or highest >= base.numel():
        raise WeightSyncError(f"changes of {spec.name} have positions outside its {base.numel()} elements")
    tensor = torch.empty(spec.shape, dtype=values.dtype, device=changes.device).copy_(base)
    tensor.view(-1)[positions.long()] = values
    return tensor


def _change_specs(spec: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """Return the specs of the positions in the flattened tensor and of the values, as they are packed."""
    assert spec.changed is not None
    positions = "int32" if math.prod(spec.shape) <= 2**31 else "int64"
    return TensorSpec("positions", (spec.changed,), positions), TensorSpec("values", (spec.changed,), spec.dtype)


def _split(spec: TensorSpec, changes: Tensor) -> tuple[Tensor, Tensor]:
    positions, values = tensor_views(changes, _change_specs(spec))
    return positions, values


class ChangeTracker:
    """A copy of a trainer rank's shards as they were sent last, in host memory, to find the elements that changed."""

    def __init__(self, rank: int, world_size: int, all_reduce_sum: Callable[[Tensor], Tensor]):
        """Create a tracker without a copy.

        Args:
            rank: Rank of this trainer process.
            world_size: Number of trainer ranks.
            all_reduce_sum: Returns the sum of a tensor over all ranks.
        """
        self._rank = rank
        self._world_size = world_size
        self._all_reduce_sum = all_reduce_sum
        self._sent: dict[str, Tensor] = {}
        self._ranges: dict[str, tuple[int, int]] = {}
        """Range of this rank's changes among those of all ranks, by name."""

    def count(self, name: str, on_wire: ShardedTensor) -> Tensor:
        """Return the number of this rank's elements that changed, int64 [], on their device."""
        return self._changed(name, on_wire).count_nonzero()

    def sum_counts(self, names: Sequence[str], counts: Sequence[Tensor]) -> list[int]:
        """Return the number of changed elements of each tensor. A collective of all ranks.

        Args:
            names: Names of the tensors.
            counts: This rank's numbers of changed elements.
        """
        by_rank = torch.zeros(self._world_size, len(names), dtype=torch.int64)
        if counts:
            by_rank[self._rank] = torch.stack([count.to(counts[0].device) for count in counts]).cpu()
        by_rank = self._all_reduce_sum(by_rank)
        ends = by_rank[: self._rank + 1].sum(0)
        ranges = zip((ends - by_rank[self._rank]).tolist(), ends.tolist(), strict=True)
        self._ranges = dict(zip(names, ranges, strict=True))
        totals: list[int] = by_rank.sum(0).tolist()
        return totals

    def gather_changes(self, spec: TensorSpec, on_wire: ShardedTensor) -> Tensor:
        """Return the changes of all ranks as they are sent, uint8 [bytes]. A collective of all ranks.

        Like `gather_ranges`, this is an all-reduce of the ranks' parts, which needs no more memory than the result.

        Args:
            spec: Spec of the tensor.
            on_wire: This rank's shard, as it is sent.
        """
        start, end = self._ranges[spec.name]
        changes = torch.zeros(wire_spec(spec).shape, dtype=torch.uint8, device=on_wire.local.device)
        if end > start:
            changed = self._changed(spec.name, on_wire)
            own = _positions(on_wire.map(lambda _: changed).elements)
            if len(own) == end - start:  # otherwise the receiver notices that the parameters changed during the sync
                positions, values = _split(spec, changes)
                positions[start:end] = own + on_wire.start
                values[start:end] = on_wire.elements[own]
        return self._all_reduce_sum(changes)

    def store(self, name: str, on_wire: ShardedTensor) -> None:
        """Remember this rank's shard, which is being sent."""
        if not on_wire.is_first_replica:
            return
        local, sent = on_wire.local, self._sent.get(name)
        if sent is None or sent.shape != local.shape or sent.dtype != local.dtype:
            sent = self._sent[name] = empty_host_tensor(local.shape, local.dtype, local.device)
        sent.copy_(local)

    def _changed(self, name: str, on_wire: ShardedTensor) -> Tensor:
        """Return a mask of the elements of `on_wire.local` whose bits changed."""
        local = on_wire.local
        if not on_wire.is_first_replica:
            return torch.zeros_like(local, dtype=torch.bool)
        bits = _BIT_DTYPES[local.itemsize]
        sent = self._sent[name].to(local.device, non_blocking=True)
        return _differences(local.view(bits), sent.view(bits))


def _differences(left: Tensor, right: Tensor) -> Tensor:
    """Return a mask of the elements that differ. On CPUs numpy is 8 times as fast as torch."""
    if left.is_cpu:
        return torch.from_numpy(np.asarray(left.numpy() != right.numpy()))
    return left != right


def _positions(mask: Tensor) -> Tensor:
    """Return the indices of the true elements of a flat mask, int64 [n]. On CPUs numpy is twice as fast as torch."""
    return torch.from_numpy(np.flatnonzero(mask.numpy())) if mask.is_cpu else mask.nonzero().view(-1)
