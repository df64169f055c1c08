"""Importance ratios between two policies' log-probs, bounded so that no outlier token gives infinity."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio, far beyond any clip range. Unbounded, an outlier gives inf, and inf times 0 is NaN."""


def log_ratios(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return logprobs - other_logprobs [T] in nats, 0 outside the mask [T].

    Values are bounded by ±MAX_LOG_RATIO, and the gradient is 0 beyond the bounds.

    Args:
        logprobs: Log-probs of the first policy, nats [T].
        other_logprobs: Log-probs of the second policy, nats [T].
        mask: Tokens that count [T] bool.
    """
    return torch.where(mask, logprobs - other_logprobs, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def importance_ratios(logprobs: Tensor, other_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return exp(log_ratios(...)) [T]: the ratio of two policies' probabilities, 1 outside the mask [T].

    Args:
        logprobs: Log-probs of the first policy, nats [T].
        other_logprobs: Log-probs of the second policy, nats [T].
        mask: Tokens that count [T] bool.
    """
    return log_ratios(logprobs, other_logprobs, mask).exp()
