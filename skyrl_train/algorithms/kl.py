"""Per-token estimators of KL(policy || reference) from the sampled token alone (joschu.net/blog/kl-approx.html).

All take log-probs [T] in nats and a bool mask [T], return nats [T], exactly 0 outside the mask, and are differentiable
in `logprobs`. With d = logprobs - ref_logprobs, the tokens being samples of the policy:

    name  value             gradient wrt logprobs   estimates the KL
    k1    d                 1                       without bias, can be negative
    abs   |d|               sign(d)                 not: a distance
    k2    d^2 / 2           d                       with bias; its gradient in expectation is that of the KL
    k3    exp(-d) - 1 + d   1 - exp(-d)             without bias, never negative
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_K3 = 10.0
"""A single token's k3 is bounded, as in SkyRL: past it (d < -2.6) the value is constant and its gradient 0."""


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
    # Where exp overflows, the outer bound's zero gradient times infinity would be NaN: hence the inner one.
    difference = _difference(logprobs, ref_logprobs, mask).clamp(min=-2 * MAX_K3)
    return (torch.expm1(-difference) + difference).clamp(max=MAX_K3)


def _difference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - ref_logprobs, 0.0)


def kl_penalised_rewards(rewards: Tensor, kl: Tensor, sequence_ids: Tensor, coef: float) -> Tensor:
    """KL in the reward (`use_kl_in_reward`): [B] rewards minus coef times the KL summed over each sequence's tokens.

    rewards [B]; kl [T] nats, 0 outside the mask; sequence_ids [T]. Without gradient: a reward is data.
    """
    return rewards - coef * torch.zeros_like(rewards).index_add(0, sequence_ids, kl.detach().to(rewards.dtype))


class FixedKLController:
    """The coefficient stays what it is (`kl_ctrl.type=fixed`)."""

    def __init__(self, coef: float):
        self.coef = coef

    def update(self, observed_kl: float, num_sequences: int) -> None:
        """Nothing to adapt."""


class AdaptiveKLController:
    """Proportional control of the coefficient towards a target KL (`kl_ctrl.type=adaptive`; arXiv:1909.08593, 2.2).

    coef <- coef * (1 + clip(observed / target - 1, -0.2, 0.2) * num_sequences / horizon)
    """

    def __init__(self, coef: float, target: float, horizon: float):
        self.coef = coef
        self.target = target
        self.horizon = horizon

    def update(self, observed_kl: float, num_sequences: int) -> None:
        """observed_kl in nats: the mean over sequences of their mean over tokens."""
        error = min(max(observed_kl / self.target - 1, -0.2), 0.2)
        self.coef *= 1 + error * num_sequences / self.horizon
