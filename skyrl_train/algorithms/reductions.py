"""Reductions turn per-token values into a single number, with a weight for every token of a mini-batch.

    loss = sum over t of weights[t] * values[t]

Weights are computed once for the mini-batch, before it is split into micro-batches and ranks. Sums of losses and
gradients then equal those of one large batch, however it is split.

mask is [T] bool, sequence_ids and group_ids are [T] int64. Weights are [T] float64, 0 outside the mask; float64 is
cheap compared with the model and keeps sums precise. The sequences of one episode have the same `sequence_ids`, so that
their total weight equals that of an episode with a single sequence. Sequences and prompts without a loss token (failed
episodes) are not counted.

The reductions here give all tokens of a sequence the same weight. They are therefore written for sequences: they map
tokens [B] (the number of loss tokens), sequence_ids [B] and group_ids [B] to weights [B], and each rank expands these
to its tokens.

Legend: T tokens, B sequences.
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
    """A reduction whose weights are the same for all tokens of a sequence; it is called like any other reduction."""

    def __init__(self, compute_sequence_weights: Callable[..., Tensor]):
        """Wrap a function that computes one weight per sequence.

        Args:
            compute_sequence_weights: (tokens [B], sequence_ids [B], group_ids [B], *, settings) to weights [B] float64.
        """
        self.compute_sequence_weights = compute_sequence_weights
        update_wrapper(self, compute_sequence_weights)

    def __call__(self, mask: Tensor, sequence_ids: Tensor, group_ids: Tensor, **settings: Any) -> Tensor:
        """Return the weight of each token [T] float64, 0 outside the mask.

        Args:
            mask: Loss tokens [T] bool.
            sequence_ids: Sequence of each token [T]; the tokens of a sequence are consecutive.
            group_ids: Prompt of each token [T].
            **settings: Settings that the wrapped function takes as keyword-only parameters.
        """
        ids = torch.stack([sequence_ids, group_ids])
        is_first = torch.cat([mask.new_ones(1), (ids[:, 1:] != ids[:, :-1]).any(0)])[: len(mask)]
        index = is_first.cumsum(0) - 1
        tokens = torch.bincount(index[mask], minlength=int(is_first.sum()))
        return torch.where(mask, self.compute_sequence_weights(tokens, *ids[:, is_first], **settings)[index], 0.0)

    def __reduce__(self) -> str:
        """Pickle by name, like a function."""
        return self.compute_sequence_weights.__qualname__


def assign_loss_weights(mini_batch: TrainBatch, reduction: Callable[..., Tensor]) -> TrainBatch:
    """Return the mini-batch with `sequence_weights` [B], or `loss_weights` [T] for a reduction with a weight per token.

    Args:
        mini_batch: A whole mini-batch, before it is split.
        reduction: A reduction whose settings are bound.
    """
    function, settings = (reduction.func, reduction.keywords) if isinstance(reduction, partial) else (reduction, {})
    if isinstance(function, SequenceReduction):
        ids = mini_batch.sequence_to_episode, mini_batch.group_ids
        return replace(
            mini_batch, sequence_weights=function.compute_sequence_weights(mini_batch.num_loss_tokens, *ids, **settings)
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
    """Return weights [B] that are equal for all tokens: 1 / tokens (DAPO, arXiv:2503.14476, eq. 12).

    Args:
        tokens: Number of loss tokens of each sequence [B]; sequences without any get weight 0.
        sequence_ids: Not used.
        group_ids: Not used.
        max_seq_len: Not used.
    """
    return (tokens > 0).double() / tokens.sum().clamp(min=1)


@SequenceReduction
def token_mean_legacy(
    tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, micro_train_batch_size_per_gpu: int
) -> Tensor:
    """Return weights [B] that are equal for all micro-batches: 1 / (its tokens * micro-batches).

    SkyRL 0.4 averages the means of micro-batches and calls that `token_mean`. A micro-batch is
    `micro_train_batch_size_per_gpu` consecutive sequences with loss tokens; the last one may be smaller.

    Args:
        tokens: Number of loss tokens of each sequence [B]; sequences without any get weight 0.
        sequence_ids: Not used.
        group_ids: Not used.
        micro_train_batch_size_per_gpu: Number of sequences of a micro-batch.
    """
    return _mean_of_means(tokens, ((tokens > 0).cumsum(0) - 1).clamp(min=0) // micro_train_batch_size_per_gpu)


@SequenceReduction
def sequence_mean(tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Return weights [B] that are equal for all sequences: 1 / (its tokens * sequences).

    This is the mean of GRPO (arXiv:2402.03300, eq. 3).

    Args:
        tokens: Number of loss tokens of each sequence [B]; sequences without any get weight 0.
        sequence_ids: Episode of each sequence [B]; sequences of one episode count as one.
        group_ids: Not used.
        max_seq_len: Not used.
    """
    return _mean_of_means(tokens, sequence_ids)


@SequenceReduction
def seq_mean_token_sum_norm(tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Return weights [B] of 1 / (max_seq_len * sequences), however long a sequence is (Dr. GRPO, arXiv:2503.20783).

    Args:
        tokens: Number of loss tokens of each sequence [B]; sequences without any get weight 0.
        sequence_ids: Episode of each sequence [B]; sequences of one episode count as one.
        group_ids: Not used.
        max_seq_len: Maximum length of a sequence.
    """
    return (tokens > 0).double() / (max_seq_len * max(sequence_ids[tokens > 0].unique().numel(), 1))


@SequenceReduction
def prompt_mean(tokens: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Return weights [B] that are equal for all prompts: 1 / (tokens of its responses * prompts) (ScaleRL,
    arXiv:2510.13786).

    Args:
        tokens: Number of loss tokens of each sequence [B]; sequences without any get weight 0.
        sequence_ids: Not used.
        group_ids: Prompt of each sequence [B].
        max_seq_len: Not used.
    """
    return _mean_of_means(tokens, group_ids)


def _mean_of_means(tokens: Tensor, ids: Tensor) -> Tensor:
    _, index = ids.unique(return_inverse=True)
    sums = tokens.new_zeros(len(tokens)).index_add(0, index, tokens)
    weights = 1 / (sums.double() * max(int((sums > 0).sum()), 1))
    return torch.where(sums > 0, weights, 0.0)[index]
