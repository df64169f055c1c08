"""Ranks instead of rewards: how large differences are does not matter, only their order."""

from __future__ import annotations

import torch
from torch import Tensor

import skyrl_train as sk


@sk.register.advantage("centred_rank")
def centred_rank(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """(samples with less reward - samples with more) / samples, over the valid samples of the prompt. All [B]."""
    comparable = (group_ids[:, None] == group_ids) & valid & valid[:, None]
    order = torch.sign(rewards[:, None] - rewards)
    return torch.where(comparable, order, 0.0).sum(1) / comparable.sum(1).clamp(min=1)
