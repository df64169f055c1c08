"""Policy losses: per-token values over the ragged tokens [T]; a reduction weighs and sums them (reductions.py).

    loss(logprobs, advantages, mask, *, ...) -> (values, was_clipped)

All tensors are [T]: log-probs in nats, mask bool and True on the tokens that count. Gradient flows only through
`logprobs`. Both results are exactly 0 outside the mask, whatever the inputs contain there. A loss declares what else it
needs as keywords: numbers come from the configuration, and the available tensors are

    old_logprobs      [T] the trainer's, before the step's first update
    frozen_logprobs   [T] the values of `logprobs` without gradient, for terms under a stop-gradient
    rollout_logprobs  [T] the engine's, at the sampling temperature and before top-p and top-k
    sequence_ids      [T] int64, the sequence (0 to B-1) to which a token belongs
    selected          [T] bool, chosen over the whole mini-batch (token_selection.py)

Below, r = exp(logprobs - old_logprobs), A = advantages, sg[] is the stop-gradient, clip(x, a, b) = min(max(x, a), b).
"""

from __future__ import annotations

import torch
from torch import Tensor

from skyrl_train.algorithms.ratios import MAX_LOG_RATIO, importance_ratios
from skyrl_train.algorithms.token_selection import select_clip_cov_tokens, select_kl_cov_tokens, selects_tokens_with


def clipped_surrogate(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """`regular`: -min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A).

    PPO (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476, eq. 10).
    """
    return _clipped(importance_ratios(logprobs, old_logprobs, mask), advantages, mask, eps_clip_low, eps_clip_high)


def dual_clip(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
    clip_ratio_c: float,
) -> tuple[Tensor, Tensor]:
    """`regular`, but at most -c A if A < 0, so that a huge ratio gives no huge loss (arXiv:1912.09729, eq. 5)."""
    values, clipped = clipped_surrogate(
        logprobs, advantages, mask, old_logprobs=old_logprobs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high
    )
    ceiling = -clip_ratio_c * torch.where(mask, advantages, 0.0)
    beyond = mask & (advantages < 0) & (values > ceiling)
    return torch.where(beyond, ceiling, values), torch.maximum(clipped, beyond.to(clipped.dtype))


def gspo(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor,
    frozen_logprobs: Tensor,
    sequence_ids: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """`regular` with one ratio per sequence: s = exp(mean of log r over the sequence's tokens) instead of r.

    GSPO-token (arXiv:2507.18071, section 4.3): a token's ratio is sg[s] * exp(logprobs - sg[logprobs]). With
    `sequence_mean` and one advantage per sequence, its gradient is GSPO's.
    """
    mean = _sequence_mean(frozen_logprobs - old_logprobs, mask, sequence_ids)
    ratio = torch.where(mask, mean + (logprobs - frozen_logprobs), 0.0)
    return _clipped(ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp(), advantages, mask, eps_clip_low, eps_clip_high)


def gmpo(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor,
    sequence_ids: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """-A exp(mean over the sequence's tokens of the clipped log r), on every token of the sequence.

    GMPO (arXiv:2507.20673): the geometric instead of the arithmetic mean. The bounds are on the log-ratio,
    log r in [-eps_clip_low, eps_clip_high] (the paper uses 0.4 for both, and mirrors them if A < 0), and apply only in
    the direction in which A pushes. A is the sequence's mean advantage. Meant for `sequence_mean`.
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    bounded = log_ratio.clamp(-eps_clip_low, eps_clip_high)
    pessimistic = torch.where(advantages > 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = _sequence_mean(pessimistic, mask, sequence_ids).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    values = -_sequence_mean(advantages, mask, sequence_ids) * ratio
    return torch.where(mask, values, 0.0), (mask & (pessimistic != log_ratio)).to(logprobs.dtype)


def cispo(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor,
    frozen_logprobs: Tensor,
    cispo_eps_clip_low: float,
    cispo_eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """-sg[clip(r, 1 - low, 1 + high)] A logprobs: every token keeps a gradient (arXiv:2506.13585, eq. 4-5)."""
    ratio = importance_ratios(frozen_logprobs, old_logprobs, mask)
    weight = ratio.clamp(1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high)
    return _reinforce(weight, logprobs, advantages, mask), (mask & (weight != ratio)).to(logprobs.dtype)


def cispo_rollout(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    rollout_logprobs: Tensor,
    frozen_logprobs: Tensor,
    cispo_eps_clip_low: float,
    cispo_eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """`cispo` with r = exp(logprobs - rollout_logprobs) (SkyRL's `cispo_anchor: rollout`).

    With one update a step r is 1 against `old_logprobs` and nothing is clipped; against the engine's log-probs it also
    covers how stale the sample is.
    """
    return cispo(
        logprobs,
        advantages,
        mask,
        old_logprobs=rollout_logprobs,
        frozen_logprobs=frozen_logprobs,
        cispo_eps_clip_low=cispo_eps_clip_low,
        cispo_eps_clip_high=cispo_eps_clip_high,
    )


def rollout_is(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    frozen_logprobs: Tensor,
    rollout_logprobs: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """-sg[u] A logprobs with u = exp(logprobs - rollout_logprobs); 0 outside (1 - eps_clip_low, 1 + eps_clip_high).

    The ratio is to the policy that actually sampled (SkyRL's `rollout_is`; double-sided masking as in IcePop).
    """
    ratio = importance_ratios(frozen_logprobs, rollout_logprobs, mask)
    inside = (ratio > 1 - eps_clip_low) & (ratio < 1 + eps_clip_high)
    weight = torch.where(inside, ratio, 0.0)
    return _reinforce(weight, logprobs, advantages, mask), (mask & ~inside).to(logprobs.dtype)


def importance_sampling(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, old_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """-r A without clipping: the policy gradient with plain importance weights."""
    values = -importance_ratios(logprobs, old_logprobs, mask) * torch.where(mask, advantages, 0.0)
    return values, torch.zeros_like(values)


def cross_entropy(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """-logprobs: imitate the samples whatever their reward (rejection sampling, if they are filtered before)."""
    values = torch.where(mask, -logprobs, 0.0)
    return values, torch.zeros_like(values)


def sapo(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, old_logprobs: Tensor, tau_pos: float, tau_neg: float
) -> tuple[Tensor, Tensor]:
    """-(4 / tau) sigmoid(tau (r - 1)) A, tau = tau_pos if A > 0, else tau_neg (SAPO, arXiv:2511.20347).

    A soft gate: its gradient equals that of r A at r = 1 and fades with the distance from it. Meant for
    `sequence_mean`.
    """
    ratio = importance_ratios(logprobs, old_logprobs, mask)
    tau = torch.full_like(ratio, tau_neg).masked_fill(advantages > 0, tau_pos)
    values = -(4 / tau) * torch.sigmoid(tau * (ratio - 1)) * torch.where(mask, advantages, 0.0)
    return torch.where(mask, values, 0.0), torch.zeros_like(values)


def dppo_tv(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    frozen_logprobs: Tensor,
    rollout_logprobs: Tensor,
    delta_low: float,
    delta_high: float,
    tv_threshold: float | None = None,
) -> tuple[Tensor, Tensor]:
    """-u A, but 0 if p - q is not in [-delta_low, delta_high] and the gradient would move it further out.

    p, q are the trainer's and the engine's probability of the sampled token. DPPO with the binary total variation
    (arXiv:2602.04879, eq. 12-13, which has one bound): the trust region around the policy that sampled bounds
    probabilities instead of ratios; u = exp(logprobs - rollout_logprobs). `tv_threshold` replaces both bounds.
    """
    if tv_threshold is not None:
        delta_low = delta_high = tv_threshold
    moved = frozen_logprobs.exp() - rollout_logprobs.exp()
    outside = (moved < -delta_low) | (moved > delta_high)
    return _mask_outside_trust_region(logprobs, frozen_logprobs, rollout_logprobs, advantages, mask, outside)


def dppo_kl(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    frozen_logprobs: Tensor,
    rollout_logprobs: Tensor,
    kl_threshold: float,
) -> tuple[Tensor, Tensor]:
    """Like `dppo_tv` with the binary KL divergence q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (eq. 14)."""
    p, q = (x.exp().clamp(1e-7, 1 - 1e-7) for x in (frozen_logprobs, rollout_logprobs))
    divergence = q * (q.log() - p.log()) + (1 - q) * ((-q).log1p() - (-p).log1p())
    return _mask_outside_trust_region(
        logprobs, frozen_logprobs, rollout_logprobs, advantages, mask, divergence > kl_threshold
    )


@selects_tokens_with(select_clip_cov_tokens)
def clip_cov(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    old_logprobs: Tensor,
    selected: Tensor,
    eps_clip_low: float,
    eps_clip_high: float,
) -> tuple[Tensor, Tensor]:
    """`regular` without gradient on the tokens that `choose_clip_cov` selected (Clip-Cov, arXiv:2505.22617)."""
    values, _ = clipped_surrogate(
        logprobs, advantages, mask, old_logprobs=old_logprobs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high
    )
    return torch.where(selected, 0.0, values), (mask & selected).to(logprobs.dtype)


@selects_tokens_with(select_kl_cov_tokens)
def kl_cov(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, old_logprobs: Tensor, selected: Tensor, ppo_kl_coef: float
) -> tuple[Tensor, Tensor]:
    """-r A, plus ppo_kl_coef |log r| on the tokens that `choose_kl_cov` selected (KL-Cov, arXiv:2505.22617)."""
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    values, none = importance_sampling(logprobs, advantages, mask, old_logprobs=old_logprobs)
    return values + torch.where(selected & mask, ppo_kl_coef * log_ratio.abs(), 0.0), none


def _clipped(
    ratio: Tensor, advantages: Tensor, mask: Tensor, eps_clip_low: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    advantages = torch.where(mask, advantages, 0.0)
    plain, clipped = ratio * advantages, ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high) * advantages
    return -torch.minimum(plain, clipped), ((clipped < plain) & mask).to(ratio.dtype)


def _reinforce(weight: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    advantages, logprobs = (torch.where(mask, x, 0.0) for x in (advantages, logprobs))
    return -weight * advantages * logprobs


def _mask_outside_trust_region(
    logprobs: Tensor, frozen: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, outside: Tensor
) -> tuple[Tensor, Tensor]:
    """-u A, except on tokens that are `outside` the trust region and that A would push further."""
    further = ((advantages > 0) & (frozen > rollout)) | ((advantages < 0) & (frozen < rollout))
    blocked = outside & further & mask
    values, _ = importance_sampling(logprobs, advantages, mask & ~blocked, old_logprobs=rollout)
    return torch.where(blocked, 0.0, values), blocked.to(logprobs.dtype)


def _sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """[T] -> [T]: on every token, the mean over its sequence's tokens that count."""
    size = len(values)  # at least the number of sequences, known without a device sync
    sums = values.new_zeros(size).index_add(0, sequence_ids, torch.where(mask, values, 0.0))
    counts = values.new_zeros(size).index_add(0, sequence_ids, mask.to(values.dtype))
    return (sums / counts.clamp(min=1))[sequence_ids]
