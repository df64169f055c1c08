"""Ranks that work on the same layers together: on the same micro-batches, or with experts that they share out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

G = TypeVar("G", bound="RankGroup")


def planned_group(kind: type[G], size: int, key: str) -> G:
    """Return the first rank of a group that does not exist yet. It can divide a model, but not communicate."""
    planned: type[G] = type(kind.__name__, (kind,), {"size": size, "rank": 0})
    return planned(None, key)  # type: ignore[arg-type]


@dataclass(frozen=True)
class RankGroup:
    """Ranks that make the same calls in the same order. Those of a parallel group get the same micro-batches, too."""

    group: dist.ProcessGroup
    key: str
    """The configuration key of its size, for messages."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    def chunks(self, count: int) -> list[int]:
        """[size] how many of `count` items each rank gets: consecutive parts whose sizes differ by at most one."""
        return [count // self.size + (rank < count % self.size) for rank in range(self.size)]

    def chunk(self, count: int) -> slice:
        """The slice of `count` items that this rank gets."""
        rank, chunks = self.rank, self.chunks(count)
        return slice(sum(chunks[:rank]), sum(chunks[: rank + 1]))

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks, without gradient."""
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, values: Tensor) -> list[Tensor]:
        """[size] the values of every rank, which have the same shape; without gradient."""
        mine = values.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return parts

    def exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send `sent` rows to each rank, in order; returns the `received` rows from each of them."""
        output: Tensor = _Exchange.apply(rows, sent, received, self.group)  # type: ignore[no-untyped-call]
        return output

    def sum_of_parts(self, values: Tensor) -> Tensor:
        """The sum over ranks of `values`, where each position is 0 on all ranks but one.

        Every rank then computes the same loss from it, and gets the gradient of its own part: gradients of parameters
        are summed over ranks.
        """
        total: Tensor = _SumOfParts.apply(values, self)  # type: ignore[no-untyped-call]
        return total


class _SumOfParts(torch.autograd.Function):
    """A sum over ranks whose gradient is passed to each of them unchanged."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: RankGroup) -> Tensor:
        return ranks.sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, None


class _Exchange(torch.autograd.Function):
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
        return _Exchange.apply(gradient, received, sent, group), None, None, None  # type: ignore[no-untyped-call]
