"""Ranks instead of rewards: how large differences are does not matter, only their order."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.registry import register_advantage_estimator


@register_advantage_estimator("centred_rank")
def centred_rank(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Of the valid samples of its prompt: (those with less reward - those with more) / their number. All [B]."""
    comparable = (group_ids[:, None] == group_ids) & valid & valid[:, None]
    order = torch.sign(rewards[:, None] - rewards)
    return torch.where(comparable, order, 0.0).sum(1) / comparable.sum(1).clamp(min=1)
