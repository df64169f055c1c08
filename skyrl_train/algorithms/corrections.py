"""Corrections for the difference between the policy that sampled (the engine's) and the one that is trained.

For every token, w = exp(old_logprobs - rollout_logprobs): the trainer's probability before the step, divided by the
engine's, both at the sampling temperature and before top-p and top-k (ratios of truncated distributions would be biased
by the mass that survived). Tensors are [T]; mask is bool; sequence_ids is int64, 0 to num_sequences - 1. Nothing here
has a gradient.

Legend: T tokens, B sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.ratios import MAX_LOG_RATIO, log_ratios


def sequence_ratios(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    geometric: bool = False,
) -> Tensor:
    """[B] the product of w over a sequence's tokens, or their geometric mean; 1 for a sequence without tokens."""
    logs = log_ratios(old_logprobs, rollout_logprobs, mask).double()
    sums = logs.new_zeros(num_sequences).index_add(0, sequence_ids, logs)
    if geometric:
        sums = sums / sums.new_zeros(num_sequences).index_add(0, sequence_ids, mask.double()).clamp(min=1)
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated(ratios: Tensor, high: float) -> Tensor:
    """min(w, high): truncated importance sampling, of tokens or of sequences (fengyao.notion.site/off-policy-rl)."""
    return ratios.clamp(max=high)


def inside(ratios: Tensor, low: float | None, high: float | None) -> Tensor:
    """bool: low <= w <= high; a bound of None always holds."""
    kept = torch.ones_like(ratios, dtype=torch.bool)
    if low is not None:
        kept &= ratios >= low
    if high is not None:
        kept &= ratios <= high
    return kept


def all_inside(kept: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[B] bool: every token of the sequence that counts is inside the bounds, given by kept [T] bool."""
    outside = (mask & ~kept).long()
    return outside.new_zeros(num_sequences).index_add(0, sequence_ids, outside) == 0


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), 1 if all n weights are equal: the share of samples that is not lost to variance."""
    weights = weights.double()
    return weights.sum().square() / (len(weights) * weights.square().sum()).clamp(min=1e-300)
