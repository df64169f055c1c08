"""Ulysses sequence parallelism: every rank runs a part of the tokens, and in attention a part of the heads.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509. Legend: U tokens that go through the model, c of them on this
rank, s ranks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class SequenceParallel:
    """The ranks that run every micro-batch together. All of them make the same calls in the same order."""

    group: dist.ProcessGroup
    key: str
    """Where their number was configured, for messages."""

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    def chunks(self, tokens: int) -> list[int]:
        """[s] how many of `tokens` each rank runs: parts of them in order, whose sizes differ by one at most."""
        return [tokens // self.size + (rank < tokens % self.size) for rank in range(self.size)]

    def chunk(self, tokens: int) -> slice:
        """Those of this rank."""
        rank, chunks = dist.get_rank(self.group), self.chunks(tokens)
        return slice(sum(chunks[:rank]), sum(chunks[: rank + 1]))

    def by_heads(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """[c, H, D] and two [c, K, D] of this rank's tokens to some heads of all `tokens`: [U, H/s, D], two [U, K', D].

        A key/value head goes to every rank that needs it: K' is K/s where s divides K. Raises ConfigError where s does
        not divide H.
        """
        if query.shape[1] % self.size:
            raise ConfigError(
                f"{self.key}={self.size} does not divide the model's {query.shape[1]} attention heads: each rank "
                "attends with as many of them; use a divisor."
            )
        copies = self.size // math.gcd(self.size, key.shape[1])
        columns = (query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value)))
        parts = [x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(2) for x in columns]  # [s, c, its heads x D]
        chunks = self.chunks(tokens)
        received = _exchange(torch.cat(parts, -1).flatten(0, 1), [len(query)] * self.size, chunks, self.group)
        split = received.split([part.shape[-1] for part in parts], -1)
        return tuple(x.unflatten(1, (-1, column.shape[-1])) for x, column in zip(split, columns, strict=True))

    def by_tokens(self, attended: Tensor) -> Tensor:
        """The way back of what attention made of it: [U, H/s, D] to [c, H, D]."""
        chunks = self.chunks(len(attended))
        mine = chunks[dist.get_rank(self.group)]
        received = _exchange(attended, chunks, [mine] * self.size, self.group)
        return received.unflatten(0, (self.size, mine)).transpose(0, 1).flatten(1, 2)

    def together(self, values: Tensor) -> Tensor:
        """The sum over ranks of `values`, of which each position is 0 on all ranks but one.

        Every rank then computes the same loss of it, and has the gradient of what it added: they are summed over ranks.
        """
        total: Tensor = _Together.apply(values, self.group)  # type: ignore[no-untyped-call]
        return total


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    """`sent` rows to each rank, in order; returns `received` rows from each of them."""
    output: Tensor = _Exchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]
    return output


class _Exchange(torch.autograd.Function):
    """An all-to-all, whose gradient takes the way back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = received, sent, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return _exchange(gradient, *ctx.back), None, None, None


class _Together(torch.autograd.Function):
    """A sum over ranks that hands its gradient to each of them as it is."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        return gradient, None
