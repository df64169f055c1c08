"""A custom advantage that uses ranks: only the order of rewards matters, not their differences."""

from __future__ import annotations

import torch
from torch import Tensor

import skyrl_train as sk


@sk.register.advantage("centred_rank")
def centred_rank(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Return (samples with a lower reward - samples with a higher one) / samples, over the prompt's valid samples.

    All tensors have the shape [B].
    """
    comparable = (group_ids[:, None] == group_ids) & valid & valid[:, None]
    order = torch.sign(rewards[:, None] - rewards)
    return torch.where(comparable, order, 0.0).sum(1) / comparable.sum(1).clamp(min=1)
