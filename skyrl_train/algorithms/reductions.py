"""Reductions turn per-token values into a single number, by a weight for every token of a whole mini-batch.

    loss = sum over t of weights[t] * values[t]

Weights are computed once for the mini-batch, before it is cut into micro-batches and ranks: sums of losses and
gradients then equal those of one large batch, however it was cut.

mask is [T] bool, sequence_ids and group_ids are [T] int64. Weights are [T] float64, 0 outside the mask: that is cheap
compared with the model and keeps sums precise. The sequences of one episode share a value of `sequence_ids`, so that
their total weight equals that of an episode with a single sequence. Sequences and prompts without a token that counts
(failed episodes) are not counted.

In the reductions here all tokens of a sequence have the same weight: they are written for sequences, with tokens [B]
(how many count), sequence_ids [B] and group_ids [B] to weights [B], and a rank spreads these over its tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, update_wrapper
from typing import Any

import torch
from torch import Tensor

from skyrl_train.data.batch import TrainBatch


class SequenceReduction:
    """A reduction whose weights are the same for all tokens of a sequence; called like any other."""

    def __init__(self, compute_sequence_weights: Callable[..., Tensor]):
        """`of_sequences`: (tokens [B], sequence_ids [B], group_ids [B], *, settings) to weights [B] float64."""
        self.compute_sequence_weights = compute_sequence_weights
        update_wrapper(self, compute_sequence_weights)

    def __call__(self, mask: Tensor, sequence_ids: Tensor, group_ids: Tensor, **settings: Any) -> Tensor:
        """[T] float64"""
        ids = torch.stack([sequence_ids, group_ids])
        begins = torch.cat([mask.new_ones(1), (ids[:, 1:] != ids[:, :-1]).any(0)])[: len(mask)]
        index = begins.cumsum(0) - 1
        tokens = torch.bincount(index[mask], minlength=int(begins.sum()))
        return torch.where(mask, self.compute_sequence_weights(tokens, *ids[:, begins], **settings)[index], 0.0)

    def __reduce__(self) -> str:
        """By name, like a function."""
        return self.compute_sequence_weights.__qualname__


def assign_loss_weights(mini_batch: TrainBatch, reduction: Callable[..., Tensor]) -> TrainBatch:
    """Return the mini-batch with `sequence_weights` or else `loss_weights`; settings must already be bound."""
    inner, settings = (reduction.func, reduction.keywords) if isinstance(reduction, partial) else (reduction, {})
    if isinstance(inner, SequenceReduction):
        ids = mini_batch.sequence_to_episode, mini_batch.group_ids
        return replace(
            mini_batch, sequence_weights=inner.compute_sequence_weights(mini_batch.num_loss_tokens, *ids, **settings)
        )
    return mini_batch.with_tokens(
        loss_weights=reduction(
            mini_batch.loss_mask,
            mini_batch.episodes.token_to_episode,
            mini_batch.expand_to_tokens(mini_batch.group_ids),
        )
    )


@SequenceReduction
def token_mean(tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Every token has the same weight: 1 / tokens (DAPO, arXiv:2503.14476, eq. 12)."""
    return (tokens > 0).double() / tokens.sum().clamp(min=1)


@SequenceReduction
def token_mean_legacy(
    tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, micro_train_batch_size_per_gpu: int
) -> Tensor:
    """Every micro-batch of sequences in a row has the same weight: 1 / (its tokens * micro-batches).

    SkyRL 0.4 averages the means of micro-batches and calls that `token_mean`. The last micro-batch may be smaller.
    """
    return _mean_of_means(tokens, ((tokens > 0).cumsum(0) - 1).clamp(min=0) // micro_train_batch_size_per_gpu)


@SequenceReduction
def sequence_mean(tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Every sequence has the same weight: 1 / (its tokens * sequences) (GRPO, arXiv:2402.03300, eq. 3)."""
    return _mean_of_means(tokens, sequence_ids)


@SequenceReduction
def seq_mean_token_sum_norm(tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """A token's weight is 1 / (max_seq_len * sequences), however long its sequence (Dr. GRPO, arXiv:2503.20783)."""
    return (tokens > 0).double() / (max_seq_len * max(sequence_ids[tokens > 0].unique().numel(), 1))


@SequenceReduction
def prompt_mean(tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Every prompt has the same weight: 1 / (tokens of all its responses * prompts) (ScaleRL, arXiv:2510.13786)."""
    return _mean_of_means(tokens, group_ids)


def _mean_of_means(tokens: Tensor, ids: Tensor) -> Tensor:
    _, index = ids.unique(return_inverse=True)
    sums = tokens.new_zeros(len(tokens)).index_add(0, index, tokens)
    weights = 1 / (sums.double() * max(int((sums > 0).sum()), 1))
    return torch.where(sums > 0, weights, 0.0)[index]
