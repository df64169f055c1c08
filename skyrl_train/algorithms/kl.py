"""Per-token estimators of KL(policy || reference) from the sampled token alone (joschu.net/blog/kl-approx.html).

    estimator(logprobs, ref_logprobs, mask, *, ...) -> nats [T], exactly 0 outside the mask

Log-probs are [T] in nats, mask is [T] bool. The result is differentiable in `logprobs`. With tokens sampled from the
policy, d = logprobs - ref_logprobs and r = exp(logprobs - old_logprobs):

    name       value             gradient wrt logprobs   value estimates KL             gradient estimates KL's gradient
    k1         d                 1                       unbiased, can be negative      no: 0 in expectation
    abs        |d|               sign(d)                 no: a distance                 no
    k2         d^2 / 2           d                       biased                         unbiased
    k3         exp(-d) - 1 + d   1 - exp(-d)             unbiased, never negative       no: that of KL(ref || policy)
    k1+, k3+   as k1, k3         d, as k2                as k1, k3                      unbiased
    k3_ratio   r k3              r d                     unbiased, also off-policy      unbiased, also off-policy

Optional keyword-only parameters are frozen_logprobs [T], the values of `logprobs` without gradient, and old_logprobs
[T].
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.ratios import importance_ratios

MAX_K3 = 10.0
"""Upper bound of a token's k3, as in SkyRL. Beyond it (d < -2.6 or d > 11) k3 is constant and its gradient is 0."""


def k1(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return logprobs - ref_logprobs, nats [T]: an unbiased estimate of KL(policy || reference).

    Args:
        logprobs: Log-probs of the policy, nats [T].
        ref_logprobs: Log-probs of the reference model, nats [T].
        mask: Loss tokens [T] bool; the result is 0 elsewhere.
    """
    return _difference(logprobs, ref_logprobs, mask)


def abs_kl(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return |logprobs - ref_logprobs|, nats [T]: a distance, not an estimate of the KL divergence.

    Args:
        logprobs: Log-probs of the policy, nats [T].
        ref_logprobs: Log-probs of the reference model, nats [T].
        mask: Loss tokens [T] bool; the result is 0 elsewhere.
    """
    return _difference(logprobs, ref_logprobs, mask).abs()


def k2(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return (logprobs - ref_logprobs)^2 / 2, nats [T]: a biased estimate of the KL divergence with an unbiased
    gradient.

    Args:
        logprobs: Log-probs of the policy, nats [T].
        ref_logprobs: Log-probs of the reference model, nats [T].
        mask: Loss tokens [T] bool; the result is 0 elsewhere.
    """
    return _difference(logprobs, ref_logprobs, mask).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return exp(-d) - 1 + d with d = logprobs - ref_logprobs, at most MAX_K3, nats [T].

    This is GRPO's estimator of KL(policy || reference) (arXiv:2402.03300, eq. 4): unbiased and never negative.

    Args:
        logprobs: Log-probs of the policy, nats [T].
        ref_logprobs: Log-probs of the reference model, nats [T].
        mask: Loss tokens [T] bool; the result is 0 elsewhere.
    """
    # The inner bound keeps exp finite: otherwise the outer bound's zero gradient times infinity would be NaN.
    difference = _difference(logprobs, ref_logprobs, mask).clamp(min=-2 * MAX_K3)
    return (torch.expm1(-difference) + difference).clamp(max=MAX_K3)


def k1_plus(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, frozen_logprobs: Tensor) -> Tensor:
    """Return the value of k1 with the gradient of k2 (`k1+`), nats [T].

    Args:
        logprobs: Log-probs of the policy, nats [T].
        ref_logprobs: Log-probs of the reference model, nats [T].
        mask: Loss tokens [T] bool; the result is 0 elsewhere.
        frozen_logprobs: The values of `logprobs` without gradient, nats [T].
    """
    return _with_gradient_of_k2(k1(frozen_logprobs, ref_logprobs, mask), logprobs, frozen_logprobs, ref_logprobs, mask)


def k3_plus(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, frozen_logprobs: Tensor) -> Tensor:
    """Return the value of k3 with the gradient of k2 (`k3+`), nats [T].

    Args:
        logprobs: Log-probs of the policy, nats [T].
        ref_logprobs: Log-probs of the reference model, nats [T].
        mask: Loss tokens [T] bool; the result is 0 elsewhere.
        frozen_logprobs: The values of `logprobs` without gradient, nats [T].
    """
    return _with_gradient_of_k2(k3(frozen_logprobs, ref_logprobs, mask), logprobs, frozen_logprobs, ref_logprobs, mask)


def k3_ratio(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, old_logprobs: Tensor) -> Tensor:
    """Return the importance ratio times k3, nats [T], for tokens of an older policy (arXiv:2512.02556, section 3.1).

    The ratio is exp(logprobs - old_logprobs), and the gradient also flows through it.

    Args:
        logprobs: Log-probs of the policy, nats [T].
        ref_logprobs: Log-probs of the reference model, nats [T].
        mask: Loss tokens [T] bool; the result is 0 elsewhere.
        old_logprobs: Log-probs of the policy that sampled, nats [T].
    """
    return importance_ratios(logprobs, old_logprobs, mask) * k3(logprobs, ref_logprobs, mask)


def _with_gradient_of_k2(value: Tensor, logprobs: Tensor, frozen: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return value + (k2(logprobs, ref_logprobs, mask) - k2(frozen, ref_logprobs, mask))


def _difference(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, logprobs - ref_logprobs, 0.0)


class FixedKLController:
    """A KL controller with a constant coefficient (`kl_ctrl.type=fixed`)."""

    def __init__(self, kl_loss_coef: float):
        self.coef = kl_loss_coef

    def update(self, observed_kl: float, num_sequences: int) -> None:
        """Do nothing, because the coefficient is constant. The arguments are ignored."""


class AdaptiveKLController:
    """A proportional controller that moves the coefficient towards a target KL (`kl_ctrl.type=adaptive`).

    The source is arXiv:1909.08593, section 2.2:

        coef <- coef * (1 + clip(observed / kl_target - 1, -0.2, 0.2) * min(num_sequences / horizon, 1))
    """

    def __init__(self, kl_loss_coef: float, *, kl_target: float, horizon: float):
        """Start with a coefficient.

        Args:
            kl_loss_coef: The initial coefficient.
            kl_target: The target of the observed KL, nats.
            horizon: Number of sequences per update from which on the full (clipped) relative error is applied.
        """
        self.coef = kl_loss_coef
        self.kl_target = kl_target
        self.horizon = horizon

    def update(self, observed_kl: float, num_sequences: int) -> None:
        """Adapt the coefficient to an observed KL.

        Args:
            observed_kl: Mean over sequences of their mean KL per token, nats.
            num_sequences: Number of sequences behind the observation.
        """
        error = min(max(observed_kl / self.kl_target - 1, -0.2), 0.2)
        self.coef *= 1 + error * min(num_sequences / self.horizon, 1.0)  # with a factor above 1, the sign could flip
