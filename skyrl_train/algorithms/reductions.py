"""Reductions turn per-token values into a single number, by a weight for every token of a whole mini-batch.

    loss = sum over t of weights[t] * values[t]

Weights are computed once for the mini-batch, before it is cut into micro-batches and ranks: sums of losses and
gradients then equal those of one large batch, however it was cut.

mask is [T] bool, sequence_ids and group_ids are [T] int64. Weights are [T] float64, 0 outside the mask: that is cheap
compared with the model and keeps sums precise. The sequences of one episode share a value of `sequence_ids`, so that
their total weight equals that of an episode with a single sequence. Sequences and prompts without a token that counts
(failed episodes) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from skyrl_train.data.batch import TrainBatch


def weigh(mini_batch: TrainBatch, reduction: Callable[..., Tensor]) -> TrainBatch:
    """Return the mini-batch with `loss_weights`; the `max_seq_len` of `reduction` must already be bound."""
    return mini_batch.with_tokens(
        loss_weights=reduction(
            mini_batch.loss_mask, mini_batch.episodes.of_token, mini_batch.per_token(mini_batch.group_ids)
        )
    )


def token_mean(mask: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Every token has the same weight: 1 / tokens (DAPO, arXiv:2503.14476, eq. 12)."""
    return mask.double() / mask.sum().clamp(min=1)


def sequence_mean(mask: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Every sequence has the same weight: 1 / (its tokens * sequences) (GRPO, arXiv:2402.03300, eq. 3)."""
    return _mean_of_means(mask, sequence_ids)


def seq_mean_token_sum_norm(mask: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """A token's weight is 1 / (max_seq_len * sequences), however long its sequence (Dr. GRPO, arXiv:2503.20783)."""
    return mask.double() / (max_seq_len * max(sequence_ids[mask].unique().numel(), 1))


def prompt_mean(mask: Tensor, sequence_ids: Tensor, group_ids: Tensor, *, max_seq_len: int) -> Tensor:
    """Every prompt has the same weight: 1 / (tokens of all its responses * prompts) (ScaleRL, arXiv:2510.13786)."""
    return _mean_of_means(mask, group_ids)


def _mean_of_means(mask: Tensor, ids: Tensor) -> Tensor:
    _, index, counts = ids[mask].unique(return_inverse=True, return_counts=True)
    weights = torch.zeros(len(mask), dtype=torch.float64, device=mask.device)
    weights[mask] = 1 / (counts.double()[index] * max(len(counts), 1))
    return weights
