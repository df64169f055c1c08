"""REINFORCE as a custom policy loss."""

from __future__ import annotations

import torch
from torch import Tensor

import skyrl_train as sk


@sk.register.policy_loss("reinforce")
def reinforce(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss -A * logprobs, 0 outside the mask, and "was clipped", always 0. All tensors are [T]."""
    loss = torch.where(mask, -advantages * logprobs, 0.0)
    return loss, torch.zeros_like(loss)
