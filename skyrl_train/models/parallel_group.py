"""Ranks that work on the same layers together: on the same micro-batches, or with experts that they share out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

G = TypeVar("G", bound="ParallelGroup")


def make_meta_group(group_class: type[G], size: int, key: str) -> G:
    """Return the first rank of a group that does not exist yet. It can divide a model, but not communicate."""
    planned: type[G] = type(group_class.__name__, (group_class,), {"size": size, "rank": 0})
    return planned(None, key)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ParallelGroup:
    """Ranks that make the same calls in the same order. Those of a parallel group get the same micro-batches, too."""

    group: dist.ProcessGroup
    size_key: str
    """The configuration key of its size, for messages."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    def split_sizes(self, count: int) -> list[int]:
        """[size] how many of `count` items each rank gets: consecutive parts whose sizes differ by at most one."""
        return [count // self.size + (rank < count % self.size) for rank in range(self.size)]

    def local_slice(self, count: int) -> slice:
        """The slice of `count` items that this rank gets."""
        rank, chunks = self.rank, self.split_sizes(count)
        return slice(sum(chunks[:rank]), sum(chunks[: rank + 1]))

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over ranks, without gradient."""
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """[size] the values of every rank, which have the same shape; without gradient."""
        mine = values.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return parts

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent` rows to each rank, in order; returns the `received` rows from each of them."""
        output: Tensor = _AllToAll.apply(rows, sent, received, self.group)  # type: ignore[no-untyped-call]
        return output

    def all_reduce_disjoint(self, values: Tensor) -> Tensor:
        """The sum over ranks of `values`, where each position is 0 on all ranks but one.

        Every rank then computes the same loss from it, and gets the gradient of its own part: gradients of parameters
        are summed over ranks.
        """
        total: Tensor = _AllReduceDisjoint.apply(values, self)  # type: ignore[no-untyped-call]
        return total


class _AllReduceDisjoint(torch.autograd.Function):
    """A sum over ranks whose gradient is passed to each of them unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: ParallelGroup) -> Tensor:
        return ranks.all_reduce(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, None


class _AllToAll(torch.autograd.Function):
    """An all-to-all, whose gradient is the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        received, sent, group = ctx.back
        return _AllToAll.apply(gradient, received, sent, group), None, None, None  # type: ignore[no-untyped-call]
