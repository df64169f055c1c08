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
        """Exchange this rank's tokens of all heads for all tokens of some heads.

        This is a collective: all ranks must call it. A key/value head goes to every rank that needs it.

        Args:
            query: Queries [c, H, D].
            key: Keys [c, K, D].
            value: Values [c, K, D].
            tokens: Number of tokens on all ranks, U.

        Returns:
            Queries [U, H/s, D], keys and values [U, K', D]. K' is K/s if s divides K.

        Raises:
            ConfigError: s does not divide H.
        """
        self.check_heads(query.shape[1])
        copies = self.size // math.gcd(self.size, key.shape[1])
        columns = (query, *(x.repeat_interleave(copies, 1) if copies > 1 else x for x in (key, value)))
        heads_by_rank = [
            x.unflatten(1, (self.size, -1)).transpose(0, 1).flatten(2) for x in columns
        ]  # [s, c, heads of the rank x D]
        chunks = self.split_sizes(tokens)
        received = self.all_to_all(torch.cat(heads_by_rank, -1).flatten(0, 1), [len(query)] * self.size, chunks)
        split = received.split([heads.shape[-1] for heads in heads_by_rank], -1)
        return tuple(x.unflatten(1, (-1, column.shape[-1])) for x, column in zip(split, columns, strict=True))

    def check_heads(self, count: int) -> None:
        """Raise ConfigError if the number of ranks does not divide `count`, the number of query heads."""
        if count % self.size:
            raise ConfigError(
                f"{self.size_key}={self.size} does not divide the model's {count} attention heads. Every rank "
                f"computes the same number of heads: use a divisor of {count}."
            )

    def gather_heads(self, attended: Tensor) -> Tensor:
        """Exchange all tokens of some heads for this rank's tokens of all heads, after attention.

        This is the inverse of `scatter_heads`, and a collective: all ranks must call it.

        Args:
            attended: The result of attention [U, H/s, D].

        Returns:
            This rank's tokens [c, H, D].
        """
        chunks = self.split_sizes(len(attended))
        own_tokens = chunks[self.rank]
        received = self.all_to_all(attended, chunks, [own_tokens] * self.size)
        return received.unflatten(0, (self.size, own_tokens)).transpose(0, 1).flatten(1, 2)
