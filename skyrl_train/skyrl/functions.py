"""Functions on SkyRL's padded tensors, [B, L], that losses and advantage estimators written for SkyRL import."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from skyrl_train.skyrl.batches import TrainingInputBatch


class AdvantageEstimator(StrEnum):
    """Advantage estimators that SkyRL has constants for; `trainer.algorithm.advantage_estimator` accepts more."""

    GAE = "gae"
    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce++"


class PolicyLossType(StrEnum):
    """Policy losses that SkyRL has constants for; `trainer.algorithm.policy_loss_type` accepts more."""

    REGULAR = "regular"
    DUAL_CLIP = "dual_clip"
    GSPO = "gspo"
    CISPO = "cispo"
    CLIP_COV = "clip_cov"
    KL_COV = "kl_cov"
    SAPO = "sapo"


class FixedKLController:
    """A KL coefficient that never changes."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Do nothing, because the coefficient is constant. The arguments are ignored."""


class AdaptiveKLController:
    """A KL coefficient that is adapted until the KL divergence reaches a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        """Raise the coefficient if the KL divergence `current` is above the target, and lower it if it is below.

        Args:
            current: The measured KL divergence, in nats.
            n_steps: The number of steps since the last update; the change is proportional to n_steps / horizon.
        """
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Return the mean of the values whose mask is 1.

    The result is 0 where no mask value is 1. Without a mask, it is the plain mean.

    Args:
        tensor: The values, of any shape.
        mask: 0 or 1 for each value, or None.
        dim: The dimension to reduce; None reduces all.
    """
    if mask is None:
        return tensor.mean() if dim is None else tensor.mean(dim)
    dims = tuple(range(tensor.ndim)) if dim is None else (dim,)
    return (tensor * mask).sum(dims) / mask.sum(dims).clamp(min=1.0)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the scalar variance of the values whose mask is 1.

    Args:
        values: The values, of any shape.
        mask: 0 or 1 for each value.
        unbiased: True to divide by n - 1 instead of n.

    Raises:
        ValueError: The mask selects no value, or a single one with `unbiased`.
    """
    count = mask.sum()
    if count < 1 + unbiased:
        raise ValueError(f"mask: selects {int(count)} values, but a variance needs at least {1 + unbiased}.")
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Normalize values to mean 0 and variance 1 over the places whose mask is 1.

    Args:
        values: The values, of any shape. Values outside the mask are scaled in the same way.
        mask: 0 or 1 for each value.
        shift_mean: False to keep the mean of the values and change only the variance.

    Raises:
        ValueError: The mask selects fewer than two values.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, loss_mask: Tensor | None = None, kl_estimator_type: str = "k3"
) -> Tensor:
    """Estimate the KL divergence of a policy from a base policy at sampled tokens.

    The estimators are described at http://joschu.net/blog/kl-approx.html: k1 is the log-ratio, abs its absolute value,
    k2 half its square. k3 is unbiased and never negative; its log-ratio is clamped to 20 and its result to 10.

    Args:
        log_probs: Log-probs of the policy, of any shape.
        log_probs_base: Log-probs of the base policy, of the same shape.
        loss_mask: 0 or 1 for each token; None keeps all tokens.
        kl_estimator_type: k1, abs, k2 or k3.

    Returns:
        The estimate for each token in nats, 0 outside the mask.

    Raises:
        ValueError: `kl_estimator_type` is unknown.
    """
    ratio = log_probs - log_probs_base
    if kl_estimator_type == "k1":
        nats = ratio
    elif kl_estimator_type == "abs":
        nats = ratio.abs()
    elif kl_estimator_type == "k2":
        nats = 0.5 * ratio.square()
    elif kl_estimator_type == "k3":
        bounded = ratio.clamp(-20, 20)
        nats = (torch.expm1(-bounded) + bounded).clamp(-10, 10)
    else:
        raise ValueError(f"kl_estimator_type={kl_estimator_type!r}: must be k1, abs, k2 or k3.")
    return nats if loss_mask is None else nats * loss_mask


def reduce_loss(loss: Tensor, loss_mask: Tensor | None, loss_reduction: str, max_seq_len: int | None = None) -> Tensor:
    """Reduce a loss to a scalar.

    Args:
        loss: The loss of each token, [B, L].
        loss_mask: 0 or 1 for each token, [B, L]; None keeps all tokens.
        loss_reduction: token_mean is the mean over all tokens, sequence_mean the mean of the sequences' means, and
            seq_mean_token_sum_norm the mean of the sequences' sums divided by max_seq_len (Dr. GRPO, arXiv:2503.20783).
        max_seq_len: The divisor of seq_mean_token_sum_norm, in tokens. Other reductions ignore it.

    Raises:
        ValueError: `loss_reduction` is unknown, or is seq_mean_token_sum_norm without `max_seq_len`.
    """
    mask = torch.ones_like(loss) if loss_mask is None else loss_mask
    if loss_reduction == "token_mean":
        return masked_mean(loss, mask)
    if loss_reduction == "sequence_mean":
        return masked_mean(loss, mask, dim=-1).mean()
    if loss_reduction == "seq_mean_token_sum_norm":
        if max_seq_len is None:
            raise ValueError(
                "max_seq_len=None: loss_reduction=seq_mean_token_sum_norm divides by it. "
                "Set trainer.algorithm.max_seq_len."
            )
        return ((loss * mask).sum(-1) / max_seq_len).mean()
    allowed = "token_mean, sequence_mean or seq_mean_token_sum_norm"
    raise ValueError(f"loss_reduction={loss_reduction!r}: must be {allowed}.")


@torch.no_grad()
def normalize_advantages_dict(data: TrainingInputBatch) -> TrainingInputBatch:
    """Normalize `data["advantages"]` in place to mean 0 and variance 1 over all response tokens; return `data`."""
    mask, advantages = data["response_mask"], data["advantages"]
    centered = advantages - masked_mean(advantages, mask)
    variance = masked_mean(centered**2, mask).clamp(min=1e-8)
    data["advantages"] = centered * torch.rsqrt(variance) * mask
    return data
