"""Groups of ranks that share the layers of a model: in tensor, sequence and expert parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

G = TypeVar("G", bound="ParallelGroup")


def make_meta_group(group_class: type[G], size: int, key: str) -> G:
    """Return the first rank of a group without processes. It can shard a model, but not communicate.

    Args:
        group_class: The class of the group.
        size: Number of ranks.
        key: The configuration key of the size, for messages.
    """
    meta_class: type[G] = type(group_class.__name__, (group_class,), {"size": size, "rank": 0})
    return meta_class(None, key)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ParallelGroup:
    """A process group of ranks that make the same calls in the same order.

    In tensor and sequence parallelism the ranks also get the same micro-batches.
    """

    group: dist.ProcessGroup
    size_key: str
    """The configuration key of the group's size, for messages."""

    @property
    def size(self) -> int:
        """Number of ranks."""
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        """This process's rank within the group."""
        return dist.get_rank(self.group)

    def split_sizes(self, count: int) -> list[int]:
        """Return the number of `count` items that each rank gets [size].

        The parts are consecutive, and their sizes differ by at most one.
        """
        return [count // self.size + (rank < count % self.size) for rank in range(self.size)]

    def local_slice(self, count: int) -> slice:
        """Return the slice of `count` items that this rank gets."""
        rank, chunks = self.rank, self.split_sizes(count)
        return slice(sum(chunks[:rank]), sum(chunks[: rank + 1]))

    def all_reduce(self, values: Tensor) -> Tensor:
        """Return the sum over ranks, without gradient. This is a collective."""
        total = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self.group)
        return total

    def all_gather(self, values: Tensor) -> list[Tensor]:
        """Return the values of every rank [size], without gradient. This is a collective; all have the same shape."""
        contiguous = values.contiguous()
        gathered = [torch.empty_like(contiguous) for _ in range(self.size)]
        dist.all_gather(gathered, contiguous, group=self.group)
        return gathered

    def all_to_all(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send consecutive rows to each rank, and return the rows received from each; differentiable. This is a
        collective.

        Args:
            rows: The rows to send, in the order of ranks.
            sent: Number of rows to send to each rank.
            received: Number of rows to receive from each rank.
        """
        output: Tensor = _AllToAll.apply(rows, sent, received, self.group)  # type: ignore[no-untyped-call]
        return output

    def all_reduce_disjoint(self, values: Tensor) -> Tensor:
        """Return the sum of `values` over the ranks. Each element must be 0 on all ranks but one. This is a collective.

        In the backward pass every rank gets the gradient of the sum unchanged. All ranks must therefore compute the
        same loss from the sum, and the caller must sum gradients of parameters over ranks, not average them.
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
    """An all-to-all whose gradient is the reverse all-to-all."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.reverse = received, sent, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        received, sent, group = ctx.reverse
        return _AllToAll.apply(gradient, received, sent, group), None, None, None  # type: ignore[no-untyped-call]
