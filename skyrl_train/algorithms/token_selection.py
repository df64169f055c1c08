"""Selections: tokens that a loss treats differently, chosen over a whole mini-batch before its first backward.

A choice made within a micro-batch would depend on how the mini-batch was cut. With `selects`, a loss declares a
selection; the learner then scores the mini-batch under the current policy, selects, and gives each micro-batch its part
of the `selected` mask. Both selections here are from arXiv:2505.22617.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def selects_tokens_with(select: Callable[..., Tensor]) -> Callable[[F], F]:
    """Decorator of a loss that takes `selected`: choose(logprobs, old_logprobs, advantages, mask, *, ...) -> [T]."""

    def declare(loss: F) -> F:
        loss.select_tokens = select  # type: ignore[attr-defined]
        return loss

    return declare


def get_token_selector(loss: Callable[..., Any]) -> Callable[..., Tensor] | None:
    """The selection that a loss declared; None if it treats all tokens alike."""
    found: Callable[..., Tensor] | None = getattr(loss, "select_tokens", None)
    return found


def covariance(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """[T] (logprob - its mean) (A - its mean), with means over the mask: it drives entropy down. 0 outside the mask."""
    count = mask.sum().clamp(min=1)

    def center(values: Tensor) -> Tensor:
        inside = torch.where(mask, values.double(), 0.0)
        return torch.where(mask, inside - inside.sum() / count, 0.0)

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
    """[T] bool: a share `clip_ratio` of all tokens, chosen among those with a covariance in bounds (see `_share`).

    Tokens that PPO clips anyway are left out. The paper draws at random among the candidates; here the bits of their
    covariances decide, so that the choice depends neither on the order of rows nor, except for ties, on float32
    rounding.
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
    """[T] bool: the share `kl_cov_frac` of all tokens with the largest covariance (see `_share`)."""
    weights = covariance(logprobs, advantages, mask)
    number = _count_selected(kl_cov_frac, mask)
    return _largest(torch.where(mask, weights, -torch.inf), number)


def _count_selected(fraction: float, mask: Tensor) -> int:
    """The number of tokens in this fraction of those that count, rounded down but at least 1; 0 for a fraction of 0."""
    return max(int(fraction * int(mask.sum())), 1) if fraction > 0 else 0


def _largest(values: Tensor, number: int) -> Tensor:
    """[T] bool: the `number` largest values, never minus infinity."""
    chosen = torch.zeros_like(values, dtype=torch.bool)
    chosen[values.topk(min(number, len(values))).indices] = True
    return chosen & (values > -torch.inf)
