"""Per-token estimators of KL(policy || reference) from the sampled token alone (joschu.net/blog/kl-approx.html).

    estimator(logprobs, ref_logprobs, mask, *, ...) -> [T] nats, exactly 0 outside the mask

Log-probs are [T] in nats, mask is [T] bool; the result is differentiable in `logprobs`. With tokens sampled from the
policy, d = logprobs - ref_logprobs and r = exp(logprobs - old_logprobs):

    name       value             gradient wrt logprobs   estimates the KL                        its gradient
    k1         d                 1                       without bias, can be negative           not: 0 in expectation
    abs        |d|               sign(d)                 not: a distance                         not
    k2         d^2 / 2           d                       with bias                               without bias
    k3         exp(-d) - 1 + d   1 - exp(-d)             without bias, never negative            not: KL(ref||policy)'s
    k1+, k3+   of k1, of k3      d, as k2                as k1, as k3                            without bias
    k3_ratio   r k3              r d                     without bias, off-policy as well        without bias

Optional keywords: frozen_logprobs [T], the values of `logprobs` without gradient; old_logprobs [T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.ratios import importance_ratios

MAX_K3 = 10.0
"""Bound of a token's k3, as in SkyRL: beyond it (d < -2.6 or d > 11) the value is constant and its gradient 0."""


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d"""
    return _difference(logprobs, ref_logprobs, mask)


def abs_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """|d|"""
    return _difference(logprobs, ref_logprobs, mask).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """d^2 / 2"""
    return _difference(logprobs, ref_logprobs, mask).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """exp(-d) - 1 + d, at most MAX_K3: the estimator of GRPO (arXiv:2402.03300, eq. 4)."""
    # If exp overflowed, the outer bound's zero gradient times infinity would be NaN: hence the inner bound.
    difference = _difference(logprobs, ref_logprobs, mask).clamp(min=-2 * MAX_K3)
    return (torch.expm1(-difference) + difference).clamp(max=MAX_K3)


def k1_plus(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, frozen_logprobs: Tensor) -> Tensor:
    """`k1+`: the value of k1 with the gradient of k2."""
    return _with_gradient_of_k2(k1(frozen_logprobs, ref_logprobs, mask), logprobs, frozen_logprobs, ref_logprobs, mask)


def k3_plus(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, frozen_logprobs: Tensor) -> Tensor:
    """`k3+`: the value of k3 with the gradient of k2."""
    return _with_gradient_of_k2(k3(frozen_logprobs, ref_logprobs, mask), logprobs, frozen_logprobs, ref_logprobs, mask)


def k3_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
    """r k3: corrected for tokens sampled by an older policy, with gradient also through r (arXiv:2512.02556, 3.1)."""
    return importance_ratios(logprobs, old_logprobs, mask) * k3(logprobs, ref_logprobs, mask)


def _with_gradient_of_k2(value: Tensor, logprobs: Tensor, frozen: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return value + (k2(logprobs, ref_logprobs, mask) - k2(frozen, ref_logprobs, mask))


def _difference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - ref_logprobs, 0.0)


class FixedKLController:
    """A constant coefficient (`kl_ctrl.type=fixed`)."""

    def __init__(self, kl_loss_coef: float):
        self.coef = kl_loss_coef

    def update(self, observed_kl: float, num_sequences: int) -> None:
        """Does nothing."""


class AdaptiveKLController:
    """Proportional control of the coefficient towards a target KL (`kl_ctrl.type=adaptive`; arXiv:1909.08593, 2.2).

    coef <- coef * (1 + clip(observed / kl_target - 1, -0.2, 0.2) * min(num_sequences / horizon, 1))
    """

    def __init__(self, kl_loss_coef: float, *, kl_target: float, horizon: float):
        self.coef = kl_loss_coef
        self.kl_target = kl_target
        self.horizon = horizon

    def update(self, observed_kl: float, num_sequences: int) -> None:
        """observed_kl in nats: the mean over sequences of their mean over tokens."""
        error = min(max(observed_kl / self.kl_target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(num_sequences / self.horizon, 1.0)  # beyond 1, the sign could flip
