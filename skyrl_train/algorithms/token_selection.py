"""Token selections: tokens that a loss treats differently, selected over a whole mini-batch before its first backward.

A selection within a micro-batch would depend on how the mini-batch is split. A loss declares its selection with
`selects_tokens_with`. The learner then computes the mini-batch's log-probs under the current policy, selects, and gives
each micro-batch its part of the `selected` mask. Both selections here are from arXiv:2505.22617.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def selects_tokens_with(select: Callable[..., Tensor]) -> Callable[[F], F]:
    """Return a decorator that declares the selection of a loss that takes `selected`.

    Args:
        select: Function (logprobs, old_logprobs, advantages, mask, *, ...), all [T], to the selected tokens [T] bool.
            Its other keyword-only parameters are configuration keys.
    """

    def declare(loss: F) -> F:
        loss.select_tokens = select  # type: ignore[attr-defined]
        return loss

    return declare


def get_token_selector(loss: Callable[..., Any]) -> Callable[..., Tensor] | None:
    """Return the selection that a loss declared, or None if the loss treats all tokens alike."""
    selector: Callable[..., Tensor] | None = getattr(loss, "select_tokens", None)
    return selector


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Return (logprob - its mean) (A - its mean) [T], with means over the mask; 0 outside the mask.

    A positive covariance drives entropy down.

    Args:
        logprobs: Log-probs under the current policy, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool.
    """
    count = mask.sum().clamp(min=1)

    def center(values: Tensor) -> Tensor:
        masked = torch.where(mask, values.double(), 0.0)
        return torch.where(mask, masked - masked.sum() / count, 0.0)

    return center(logprobs) * center(advantages)


def select_clip_cov_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    eps_clip_low: float,
    eps_clip_high: float,
    clip_ratio: float,
    clip_cov_lb: float,
    clip_cov_ub: float,
) -> Tensor:
    """Return a bool tensor [T] that selects the fraction `clip_ratio` of all loss tokens.

    Candidates have a covariance in (clip_cov_lb, clip_cov_ub), and PPO's clipping does not affect them. The paper draws
    at random among the candidates. Here the low bits of their covariances decide, so that the selection depends neither
    on the order of rows nor, except for ties, on float32 rounding. The number of tokens is rounded down, but at least 1
    unless the fraction is 0; it is lower if there are fewer candidates.

    Args:
        logprobs: Log-probs under the current policy, nats [T].
        old_logprobs: Log-probs before the step's first update, nats [T].
        advantages: Advantages [T].
        mask: Loss tokens [T] bool.
        eps_clip_low: Lower clip distance of the ratio from 1.
        eps_clip_high: Upper clip distance of the ratio from 1.
        clip_ratio: Fraction of the loss tokens to select.
        clip_cov_lb: Exclusive lower bound of the covariance.
        clip_cov_ub: Exclusive upper bound of the covariance.
    """
    weights = covariance(logprobs, advantages, mask)
    ratio = (logprobs - old_logprobs).exp()
    clipped = torch.where(advantages > 0, ratio > 1 + eps_clip_high, ratio < 1 - eps_clip_low)
    candidates = mask & ~clipped & (weights > clip_cov_lb) & (weights < clip_cov_ub)
    number = _count_selected(clip_ratio, mask)
    scrambled = (weights * 2.0**6).frac()
    return _largest(torch.where(candidates, scrambled, -torch.inf), number)


def select_kl_cov_tokens(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, kl_cov_frac: float
) -> Tensor:
    """Return a bool tensor [T] that selects the loss tokens with the largest covariance.

    The number of tokens is the fraction `kl_cov_frac` of all loss tokens, rounded down, but at least 1 unless the
    fraction is 0. `old_logprobs` are not used.

    Args:
        logprobs: Log-probs under the current policy, nats [T].
        old_logprobs: Not used.
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool.
        kl_cov_frac: Fraction of the loss tokens to select.
    """
    weights = covariance(logprobs, advantages, mask)
    number = _count_selected(kl_cov_frac, mask)
    return _largest(torch.where(mask, weights, -torch.inf), number)


def _count_selected(fraction: float, mask: Tensor) -> int:
    """Return this fraction of the loss tokens, rounded down but at least 1; 0 for a fraction of 0."""
    return max(int(fraction * int(mask.sum())), 1) if fraction > 0 else 0


def _largest(values: Tensor, number: int) -> Tensor:
    """Return a bool tensor [T] that is True for the `number` largest values; minus infinity is never selected."""
    selected = torch.zeros_like(values, dtype=torch.bool)
    selected[values.topk(min(number, len(values))).indices] = True
    return selected & (values > -torch.inf)
