"""Ranks that run every micro-batch together, whatever they share out of it: its tokens or the layers' features."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class RankGroup:
    """All of its ranks get the same micro-batches, and make the same calls in the same order."""

    group: dist.ProcessGroup
    key: str
    """Where their number was configured, for messages."""

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """Of this process in it."""
        return dist.get_rank(self.group)

    def chunks(self, count: int) -> list[int]:
        """[size] how many of `count` things each rank has: parts in order, whose sizes differ by one at most."""
        return [count // self.size + (rank < count % self.size) for rank in range(self.size)]

    def chunk(self, count: int) -> slice:
        """Those of this rank."""
        rank, chunks = self.rank, self.chunks(count)
        return slice(sum(chunks[:rank]), sum(chunks[: rank + 1]))

    def sum(self, values: Tensor) -> Tensor:
        """Over ranks, without gradient."""
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def gather(self, values: Tensor) -> list[Tensor]:
        """[size] those of every rank, of one shape, without gradient."""
        mine = values.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(parts, mine, group=self.group)
        return parts

    def together(self, values: Tensor) -> Tensor:
        """The sum over ranks of `values`, of which each position is 0 on all ranks but one.

        Every rank then computes the same loss of it, and has the gradient of what it added: they are summed over ranks.
        """
        total: Tensor = _Together.apply(values, self)  # type: ignore[no-untyped-call]
        return total


class _Together(torch.autograd.Function):
    """A sum over ranks that hands its gradient to each of them as it is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ranks: RankGroup) -> Tensor:
        return ranks.sum(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, None
