"""One rank's shard of a parameter, and how to gather the full tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ShardedTensor:
    """One rank's shard of a tensor. Elementwise changes can be made before it is gathered: see `map`."""

    local: Tensor
    """This rank's elements: from `start` on in the flattened full tensor, unless `zero_pad` says otherwise."""
    shape: tuple[int, ...]
    """Shape of the full tensor."""
    start: int
    """Index of this rank's first element in the flattened full tensor."""
    is_first_replica: bool
    """True on one rank of each set of replicas. Sums over ranks must count replicated elements once."""
    gather: Callable[[Tensor], Tensor]
    """Maps `local` of all ranks to the full tensor; a collective. Any dtype works that is the same on all ranks."""
    zero_pad: Callable[[Tensor], Tensor] = lambda local: local
    """Pads `local` with zeros where other ranks hold elements, so that it is a contiguous range of the full tensor."""
    select_columns: Callable[[Tensor], Tensor] = lambda matrix: matrix
    """Selects the columns of which this rank holds elements, in a matrix with as many columns as the full tensor."""

    @property
    def elements(self) -> Tensor:
        """This rank's elements as a contiguous range [n] from `start` on; zeros replace elements of other ranks."""
        return self.zero_pad(self.local).reshape(-1)

    def map(self, change: Callable[[Tensor], Tensor]) -> ShardedTensor:
        """Return the tensor with `change` applied to this rank's elements; `change` must keep their shape."""
        return replace(self, local=change(self.local))

    def full_tensor(self) -> Tensor:
        """Return the full tensor, on the device of `local`. This is a collective: all ranks must call it."""
        return self.gather(self.local)


def replicated(tensor: Tensor, rank: int) -> ShardedTensor:
    """Return a ShardedTensor for a tensor that every rank holds in full; rank 0 is its first replica."""
    return ShardedTensor(tensor, tuple(tensor.shape), 0, rank == 0, lambda local: local)


def gather_ranges(shape: tuple[int, ...], start: int, local: Tensor) -> Tensor:
    """Return the full tensor from one range of its flattened elements per rank.

    This is a collective: all ranks must call it. The ranges may have any size and must cover the tensor. It is an
    all-reduce, which has twice the traffic of a gather.

    Args:
        shape: Shape of the full tensor.
        start: Index of this rank's first element in the flattened tensor.
        local: This rank's elements.
    """
    full = local.new_zeros(shape)
    full.view(-1)[start : start + local.numel()] = local.view(-1)
    dist.all_reduce(full.view(-1).view(torch.uint8))  # as bytes, to keep the sign of a zero
    return full


def gather_equal_ranges(shape: tuple[int, ...], length: int, ranks: int, local: Tensor) -> Tensor:
    """Return the full tensor from ranges of equal length, in the order of ranks.

    This is a collective: all ranks must call it.

    Args:
        shape: Shape of the full tensor.
        length: Number of elements per rank. The last ranks may have fewer, or none.
        ranks: Number of ranks.
        local: This rank's elements.
    """
    padded = local.new_zeros(length)
    padded[: local.numel()] = local.view(-1)
    flat = local.new_empty(ranks * length)
    dist.all_gather_into_tensor(flat, padded)
    full_shape = torch.Size(shape)
    return flat[: full_shape.numel()].view(full_shape)
