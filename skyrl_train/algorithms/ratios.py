"""Importance ratios between two policies' log-probs, bounded so that no outlier token gives infinity."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""exp(20) is far beyond any clip range; without a bound, an outlier token gives inf, and inf times 0 is NaN."""


def log_ratios(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] logprobs - other_logprobs in nats, 0 outside the mask, bounded by MAX_LOG_RATIO (gradient 0 beyond)."""
    return torch.where(mask, logprobs - other_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratios(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """[T] exp(logprobs - other_logprobs), 1 outside the mask."""
    return log_ratios(logprobs, other_logprobs, mask).exp()
