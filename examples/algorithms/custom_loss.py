"""REINFORCE as a custom policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

import skyrl_train as sk


@sk.register.policy_loss("reinforce")
def reinforce(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """-A logprobs on every token. All [T]; returns (loss, was_clipped), 0 outside the mask."""
    loss = torch.where(mask, -advantages * logprobs, 0.0)
    return loss, torch.zeros_like(loss)
