"""The algorithms that configuration can name.

A user's own join by decorator, from a module listed in `trainer.plugins`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from skyrl_train.algorithms.reductions import Denominators
from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS
from skyrl_train.registry import Registry


class AdvantageEstimator(Protocol):
    """Rewards, group ids and validity [B] to advantages [B]; 0 where not valid."""

    def __call__(self, rewards: Tensor, group_ids: Tensor, valid: Tensor, *, norm_by_std: bool) -> Tensor: ...


class PolicyLoss(Protocol):
    """Ragged [T] tensors to (loss [T], was_clipped [T]); both 0 outside the mask, gradient through `logprobs` only."""

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        eps_low: float,
        eps_high: float,
    ) -> tuple[Tensor, Tensor]: ...


class KLEstimator(Protocol):
    """log-probs [T] under the policy and the reference to nats [T]; 0 where mask is False."""

    def __call__(self, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor: ...


class Reduction(Protocol):
    """A weight per token [T], so that `loss = (values * weights).sum()` adds up over micro-batches and ranks."""

    def __call__(
        self, mask: Tensor, offsets: Tensor, denominators: Denominators, max_seq_len: int | None
    ) -> Tensor: ...


advantage_estimators: Registry[AdvantageEstimator] = Registry("advantage estimator", ADVANTAGE_ESTIMATORS)
policy_losses: Registry[PolicyLoss] = Registry("policy loss", POLICY_LOSSES)
kl_estimators: Registry[KLEstimator] = Registry("KL estimator", KL_ESTIMATORS)
reductions: Registry[Reduction] = Registry("loss reduction", REDUCTIONS)


def register_advantage_estimator(name: str) -> Callable[[AdvantageEstimator], AdvantageEstimator]:
    """Decorator: make an AdvantageEstimator available as trainer.algorithm.advantage_estimator=NAME."""
    return advantage_estimators.register(name)


def register_policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Decorator: make a PolicyLoss available as trainer.algorithm.policy_loss_type=NAME."""
    return policy_losses.register(name)
