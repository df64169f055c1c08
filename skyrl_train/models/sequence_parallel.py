"""Ulysses sequence parallelism: every rank runs a part of the tokens and, in attention, a part of the heads.

Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509. Legend: U tokens that go through the model, c of them on this
rank, s ranks, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from skyrl_train.errors import ConfigError
from skyrl_train.models.parallel_group import ParallelGroup


class SequenceParallel(ParallelGroup):
    """A parallel group in which each rank runs a part of the tokens of every micro-batch."""

    def scatter_heads(self, query: Tensor, key: Tensor, value: Tensor, tokens: int) -> tuple[Tensor, ...]:
        """Exchange this rank's tokens, [c, H, D] and two [c, K, D], for some heads of all: [U, H/s, D], two [U, K', D].

        U is `tokens`. A key/value head goes to every rank that needs it: K' is K/s if s divides K. Raises ConfigError
        if s does not divide H.
        """
        self.check_heads(query.shape[1])
        copies = self.size // math.gcd(self.size, key.shape[1])
        columns = (query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value)))
        parts = [x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(2) for x in columns]  # [s, c, its heads x D]
        chunks = self.split_sizes(tokens)
        received = self.all_to_all(torch.cat(parts, -1).flatten(0, 1), [len(query)] * self.size, chunks)
        split = received.split([part.shape[-1] for part in parts], -1)
        return tuple(x.unflatten(1, (-1, column.shape[-1])) for x, column in zip(split, columns, strict=True))

    def check_heads(self, count: int) -> None:
        """Raise ConfigError if the number of ranks does not divide that of the query heads."""
        if count % self.size:
            raise ConfigError(
                f"{self.size_key}={self.size} does not divide the model's {count} attention heads: each rank "
                "attends with as many of them; use a divisor."
            )

    def gather_heads(self, attended: Tensor) -> Tensor:
        """The inverse exchange, for the result of attention: [U, H/s, D] to [c, H, D]."""
        chunks = self.split_sizes(len(attended))
        mine = chunks[self.rank]
        received = self.all_to_all(attended, chunks, [mine] * self.size)
        return received.unflatten(0, (self.size, mine)).transpose(0, 1).flatten(1, 2)
