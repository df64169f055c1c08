"""Policy losses: per-token values over the ragged tokens [T]; what divides them is a reduction (reductions.py)."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is far beyond any clip range; without a bound one stray token gives inf, and inf times 0 is NaN."""


def clipped_surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, eps_low: float, eps_high: float
) -> tuple[Tensor, Tensor]:
    """PPO's clipped surrogate per token, negated (arXiv:1707.06347, eq. 7), with separate bounds (arXiv:2503.14476).

    -min(r A, clip(r, 1 - eps_low, 1 + eps_high) A), r = exp(logprobs - old_logprobs).

    All tensors [T]; log-probs in nats; mask bool, True on sampled tokens. Gradient flows through `logprobs` only.
    Returns (loss, was_clipped), both exactly 0 outside the mask, whatever the inputs hold there.
    """
    ratio = torch.where(mask, logprobs - old_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    advantages = torch.where(mask, advantages, 0.0)
    plain, clipped = ratio * advantages, ratio.clamp(1 - eps_low, 1 + eps_high) * advantages
    return -torch.minimum(plain, clipped), ((clipped < plain) & mask).to(logprobs.dtype)
