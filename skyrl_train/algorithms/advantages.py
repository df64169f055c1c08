"""What each response was worth compared with others. Rewards [B] in, advantages [B] out; nothing here has a gradient.

Legend: B sequences, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to a group's standard deviation."""


def grpo(rewards: Tensor, group_ids: Tensor, valid: Tensor, *, norm_by_std: bool) -> Tensor:
    """A = r - mean(r of its group), over (std + 1e-6) with `norm_by_std` (arXiv:2402.03300, section 4.1.2).

    rewards [B] float32, group_ids [B] (any integers), valid [B] bool: failed and cut samples neither count in their
    group's statistics nor get an advantage. The standard deviation is the unbiased one. A group that says nothing (one
    valid sample, or equal rewards) gets exactly 0. Without `norm_by_std` it is Dr. GRPO's (arXiv:2503.20783).
    """
    _, groups = group_ids.unique(return_inverse=True)  # [B], 0..G-1
    # In float64 the mean of equal float32 rewards is exact; a rounding error, over 1e-6, would be an advantage.
    wide = torch.where(valid, rewards.double(), 0.0)
    zeros = wide.new_zeros(len(rewards))  # G <= B: no need to ask the device how many there are
    count = zeros.index_add(0, groups, valid.double())
    mean = zeros.index_add(0, groups, wide) / count.clamp(min=1)
    centred = torch.where(valid, wide - mean[groups], 0.0)
    if norm_by_std:
        variance = zeros.index_add(0, groups, centred.square()) / (count - 1).clamp(min=1)
        centred = centred / (variance.sqrt()[groups] + EPSILON)
    return centred.to(rewards.dtype)


def batch_normalised(advantages: Tensor, mask: Tensor) -> Tensor:
    """(A - mean) / std over the tokens that count (`trainer.algorithm.advantage_batch_normalize`).

    advantages [T], mask [T] bool; 0 outside the mask. The variance is the biased one, at least 1e-8.
    """
    count = mask.sum().clamp(min=1)
    centred = torch.where(mask, advantages - torch.where(mask, advantages, 0.0).sum() / count, 0.0)
    return centred * (centred.square().sum() / count).clamp(min=1e-8).rsqrt()
