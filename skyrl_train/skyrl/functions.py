"""Functions on SkyRL's rectangles, (B, L), that losses and estimators written for it import."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from skyrl_train.skyrl.batches import TrainingInputBatch


class AdvantageEstimator(StrEnum):
    """Names that SkyRL has constants for."""

    GAE = "gae"
    GRPO = "grpo"
    RLOO = "rloo"
    REINFORCE_PP = "reinforce++"


class PolicyLossType(StrEnum):
    """Names that SkyRL has constants for."""

    REGULAR = "regular"
    DUAL_CLIP = "dual_clip"
    GSPO = "gspo"
    CISPO = "cispo"
    CLIP_COV = "clip_cov"
    KL_COV = "kl_cov"
    SAPO = "sapo"


class FixedKLController:
    """A coefficient that stays."""

    def __init__(self, kl_coef: float):
        self.value = kl_coef

    def update(self, current: float, n_steps: int) -> None:
        """Nothing changes."""


class AdaptiveKLController:
    """A coefficient that follows the KL towards a target (arXiv:1909.08593, section 2.2)."""

    def __init__(self, init_kl_coef: float, target: float, horizon: float):
        self.value = init_kl_coef
        self.target = target
        self.horizon = horizon

    def update(self, current: float, n_steps: int) -> None:
        error = min(max(current / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """The mean over places where the mask is 1, 0 if it is nowhere."""
    if mask is None:
        return tensor.mean() if dim is None else tensor.mean(dim)
    dims = tuple(range(tensor.ndim)) if dim is None else (dim,)
    return (tensor * mask).sum(dims) / mask.sum(dims).clamp(min=1.0)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Raises ValueError if the mask has too few places."""
    count = mask.sum()
    if count < 1 + unbiased:
        raise ValueError(f"mask: has {int(count)} places, and a variance needs at least {1 + unbiased}.")
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Values of mean 0 (or their own, without `shift_mean`) and variance 1 over the mask."""
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + 1e-8)
    return whitened if shift_mean else whitened + mean


def compute_approx_kl(
    log_probs: Tensor, log_probs_base: Tensor, loss_mask: Tensor | None = None, kl_estimator_type: str = "k3"
) -> Tensor:
    """KL of a policy from a base at sampled tokens, nats (Schulman, http://joschu.net/blog/kl-approx.html).

    k1 is the log-ratio, abs its absolute value, k2 half its square, k3 the estimator without bias that is never
    negative. Raises ValueError for another name.
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
    """The scalar of a loss (B, L): token_mean, sequence_mean (of means), or seq_mean_token_sum_norm (of sums divided by
    max_seq_len; Dr. GRPO, arXiv:2503.20783). Raises ValueError for another name, or without that length."""
    mask = torch.ones_like(loss) if loss_mask is None else loss_mask
    if loss_reduction == "token_mean":
        return masked_mean(loss, mask)
    if loss_reduction == "sequence_mean":
        return masked_mean(loss, mask, dim=-1).mean()
    if loss_reduction == "seq_mean_token_sum_norm":
        if max_seq_len is None:
            raise ValueError("max_seq_len: seq_mean_token_sum_norm divides by it; set trainer.algorithm.max_seq_len.")
        return ((loss * mask).sum(-1) / max_seq_len).mean()
    allowed = "token_mean, sequence_mean or seq_mean_token_sum_norm"
    raise ValueError(f"loss_reduction={loss_reduction!r}: must be {allowed}.")


@torch.no_grad()
def normalize_advantages_dict(data: TrainingInputBatch) -> TrainingInputBatch:
    """Advantages of mean 0 and variance 1 over the batch's responses, in place."""
    mask, advantages = data["response_mask"], data["advantages"]
    centred = advantages - masked_mean(advantages, mask)
    variance = masked_mean(centred**2, mask).clamp(min=1e-8)
    data["advantages"] = centred * torch.rsqrt(variance) * mask
    return data
