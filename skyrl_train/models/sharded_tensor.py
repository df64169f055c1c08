"""A parameter as one rank has it: its own elements, and the way to the others'."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class ShardedTensor:
    """One rank's part of a tensor. What changes every element alike can be done before it is gathered: see `map`."""

    local: Tensor
    """This rank's elements: from `start` on of the flattened whole, unless `spread` says otherwise."""
    shape: tuple[int, ...]
    """Of the whole."""
    start: int
    is_first_replica: bool
    """Whether this rank stands for all that have the same elements: a sum over ranks must contain them once."""
    gather: Callable[[Tensor], Tensor]
    """All ranks' `local` -> the whole, a collective. Any dtype that is the same on all ranks."""
    zero_pad: Callable[[Tensor], Tensor] = lambda local: local
    """`local` among zeros in place of other ranks' elements, so that the result lies within the whole without gaps."""
    select_columns: Callable[[Tensor], Tensor] = lambda matrix: matrix
    """Of a matrix with as many columns as the whole, those that this rank has elements of."""

    @property
    def elements(self) -> Tensor:
        """[n], elements `start` to `start` + n of the flattened whole."""
        return self.zero_pad(self.local).reshape(-1)

    def map(self, change: Callable[[Tensor], Tensor]) -> ShardedTensor:
        """The tensor with every rank's elements changed."""
        return replace(self, local=change(self.local))

    def full_tensor(self) -> Tensor:
        """The whole tensor, on the device of `local`; a collective of all ranks."""
        return self.gather(self.local)


def replicated(tensor: Tensor, rank: int) -> ShardedTensor:
    """A tensor that every rank has whole."""
    return ShardedTensor(tensor, tuple(tensor.shape), 0, rank == 0, lambda local: local)


def gather_ranges(shape: tuple[int, ...], start: int, local: Tensor) -> Tensor:
    """Any ranges of a flattened tensor, one on each rank, which together are all of it; twice a gather's traffic."""
    whole = local.new_zeros(shape)
    whole.view(-1)[start : start + local.numel()] = local.view(-1)
    dist.all_reduce(whole.view(-1).view(torch.uint8))  # as bytes, which keep the sign of a zero
    return whole


def gather_equal_ranges(shape: tuple[int, ...], length: int, ranks: int, local: Tensor) -> Tensor:
    """Ranges of `length` elements in the order of ranks; the last ones may have fewer, or none."""
    padded = local.new_zeros(length)
    padded[: local.numel()] = local.view(-1)
    flat = local.new_empty(ranks * length)
    dist.all_gather_into_tensor(flat, padded)
    whole = torch.Size(shape)
    return flat[: whole.numel()].view(whole)
