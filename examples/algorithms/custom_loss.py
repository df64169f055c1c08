"""REINFORCE as a policy loss of one's own."""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.registry import register_policy_loss


@register_policy_loss("reinforce")
def reinforce(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """-A logprobs on every token. All [T]; returns (loss, was_clipped), 0 outside the mask."""
    loss = torch.where(mask, -advantages * logprobs, 0.0)
    return loss, torch.zeros_like(loss)
