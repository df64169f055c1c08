"""Policy losses: per-token values over the ragged tokens [T]. A reduction (reductions.py) weights and sums them.

    loss(logprobs, advantages, mask, *, ...) -> (values, was_clipped)

All tensors are [T]. Log-probs are in nats, and mask is bool, True on the loss tokens. The gradient flows only through
`logprobs`. Both results are exactly 0 outside the mask, whatever the inputs contain there. was_clipped is 1 on tokens
whose loss was clipped or masked. A loss declares its other inputs as keyword-only parameters. Numbers come from the
configuration, and the available tensors are

    old_logprobs      [T] the trainer's, before the step's first update
    frozen_logprobs   [T] the values of `logprobs` without gradient, for terms under a stop-gradient
    rollout_logprobs  [T] the engine's, at the sampling temperature and before top-p and top-k
    sequence_ids      [T] int64, the sequence (0 to B-1) to which a token belongs
    selected          [T] bool, selected over the whole mini-batch (token_selection.py)

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
    """Return PPO's clipped loss, -min(r A, clip(r, 1 - eps_clip_low, 1 + eps_clip_high) A) (`regular`).

    r = exp(logprobs - old_logprobs) is the importance ratio (arXiv:1707.06347, eq. 7). The bounds are separate, as in
    DAPO (arXiv:2503.14476, eq. 10).

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].
        eps_clip_low: Lower clip distance of the ratio from 1.
        eps_clip_high: Upper clip distance of the ratio from 1.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
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
    """Return the loss of `clipped_surrogate`, but at most -clip_ratio_c A if A < 0 (arXiv:1912.09729, eq. 5).

    In dual-clip PPO, the bound prevents a huge ratio from causing a huge loss.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].
        eps_clip_low: Lower clip distance of the ratio from 1.
        eps_clip_high: Upper clip distance of the ratio from 1.
        clip_ratio_c: Bound c > 1 of the ratio for negative advantages.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
    values, clipped = clipped_surrogate(
        logprobs, advantages, mask, old_logprobs=old_logprobs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high
    )
    ceiling = -clip_ratio_c * torch.where(mask, advantages, 0.0)
    is_above = mask & (advantages < 0) & (values > ceiling)
    return torch.where(is_above, ceiling, values), torch.maximum(clipped, is_above.to(clipped.dtype))


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
    """Return the loss of `clipped_surrogate` with one ratio per sequence: the geometric mean of its tokens' ratios.

    This is GSPO-token (arXiv:2507.18071, section 4.3). A token's ratio is sg[s] * exp(logprobs - sg[logprobs]), where s
    = exp(mean of logprobs - old_logprobs over the sequence's loss tokens) and sg is the stop-gradient. With
    `sequence_mean` and one advantage per sequence, its gradient is that of GSPO.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].
        frozen_logprobs: The values of `logprobs` without gradient, nats [T].
        sequence_ids: Sequence of each token [T] int64.
        eps_clip_low: Lower clip distance of the ratio from 1.
        eps_clip_high: Upper clip distance of the ratio from 1.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
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
    """Return -A exp(mean over the sequence's tokens of the clipped log-ratio), on every token of the sequence.

    GMPO (arXiv:2507.20673) takes the geometric instead of the arithmetic mean of ratios. Log-ratios logprobs -
    old_logprobs are clipped to [-eps_clip_low, eps_clip_high], but only in the direction in which the token's advantage
    pushes. (The paper uses 0.4 for both bounds, and mirrors them if A < 0.) A is the sequence's mean advantage. Use it
    with `sequence_mean`.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].
        sequence_ids: Sequence of each token [T] int64.
        eps_clip_low: Lower bound of the log-ratio is -eps_clip_low.
        eps_clip_high: Upper bound of the log-ratio.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
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
    """Return -sg[clip(r, 1 - low, 1 + high)] A logprobs (CISPO, arXiv:2506.13585, eq. 4-5).

    r = exp(logprobs - old_logprobs) is the importance ratio, low and high are `cispo_eps_clip_low` and
    `cispo_eps_clip_high`, and sg is the stop-gradient. Every token keeps a gradient, also those whose ratio is clipped.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].
        frozen_logprobs: The values of `logprobs` without gradient, nats [T].
        cispo_eps_clip_low: Lower clip distance of the ratio from 1.
        cispo_eps_clip_high: Upper clip distance of the ratio from 1.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
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
    """Return the loss of `cispo` with ratios to the engine's log-probs (SkyRL's `cispo_anchor: rollout`).

    The ratio is exp(logprobs - rollout_logprobs). With one update per step, the ratio to `old_logprobs` is 1 and
    nothing is clipped. The ratio to the engine's log-probs also covers the staleness of the sample.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        rollout_logprobs: The engine's log-probs, nats [T].
        frozen_logprobs: The values of `logprobs` without gradient, nats [T].
        cispo_eps_clip_low: Lower clip distance of the ratio from 1.
        cispo_eps_clip_high: Upper clip distance of the ratio from 1.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
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
    """Return -sg[u] A logprobs with u = exp(logprobs - rollout_logprobs), or 0 where u is out of bounds.

    u must be in (1 - eps_clip_low, 1 + eps_clip_high). It is the ratio to the policy that actually sampled (SkyRL's
    `rollout_is`; double-sided masking as in IcePop). sg is the stop-gradient.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        frozen_logprobs: The values of `logprobs` without gradient, nats [T].
        rollout_logprobs: The engine's log-probs, nats [T].
        eps_clip_low: Lower clip distance of the ratio from 1.
        eps_clip_high: Upper clip distance of the ratio from 1.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
    ratio = importance_ratios(frozen_logprobs, rollout_logprobs, mask)
    inside = (ratio > 1 - eps_clip_low) & (ratio < 1 + eps_clip_high)
    weight = torch.where(inside, ratio, 0.0)
    return _reinforce(weight, logprobs, advantages, mask), (mask & ~inside).to(logprobs.dtype)


def importance_sampling(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, old_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """Return -r A without clipping: the policy gradient with plain importance weights.

    r = exp(logprobs - old_logprobs) is the importance ratio. No token counts as clipped.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
    values = -importance_ratios(logprobs, old_logprobs, mask) * torch.where(mask, advantages, 0.0)
    return values, torch.zeros_like(values)


def cross_entropy(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return -logprobs, whatever the advantages: rejection sampling, if samples are filtered before.

    No token counts as clipped.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Not used.
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
    values = torch.where(mask, -logprobs, 0.0)
    return values, torch.zeros_like(values)


def sapo(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, old_logprobs: Tensor, tau_pos: float, tau_neg: float
) -> tuple[Tensor, Tensor]:
    """Return -(4 / tau) sigmoid(tau (r - 1)) A, where tau = tau_pos if A > 0, else tau_neg (SAPO, arXiv:2511.20347).

    r = exp(logprobs - old_logprobs) is the importance ratio. The sigmoid is a soft gate: its gradient equals that of r
    A at r = 1 and fades with the distance from it. No token counts as clipped. Use it with `sequence_mean`.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].
        tau_pos: Temperature of the gate for positive advantages.
        tau_neg: Temperature of the gate for other advantages.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
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
    """Return -u A, or 0 where p - q is outside [-delta_low, delta_high] and the gradient would move it further out.

    p and q are the trainer's and the engine's probability of the sampled token, and u = exp(logprobs -
    rollout_logprobs). This is DPPO with the binary total variation (arXiv:2602.04879, eq. 12-13, which has one bound).
    The trust region around the policy that sampled bounds probabilities instead of ratios. `tv_threshold` replaces both
    bounds.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        frozen_logprobs: The values of `logprobs` without gradient, nats [T].
        rollout_logprobs: The engine's log-probs, nats [T].
        delta_low: Lower bound of p - q is -delta_low.
        delta_high: Upper bound of p - q.
        tv_threshold: Replaces both bounds; None keeps them.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
    if tv_threshold is not None:
        delta_low = delta_high = tv_threshold
    difference = frozen_logprobs.exp() - rollout_logprobs.exp()
    outside = (difference < -delta_low) | (difference > delta_high)
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
    """Return the loss of `dppo_tv` with a bound on the binary KL divergence instead (arXiv:2602.04879, eq. 14).

    The divergence is q log(q / p) + (1 - q) log((1 - q) / (1 - p)). Tokens where it exceeds `kl_threshold` are masked
    if the gradient would increase it.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        frozen_logprobs: The values of `logprobs` without gradient, nats [T].
        rollout_logprobs: The engine's log-probs, nats [T].
        kl_threshold: Upper bound of the divergence, nats.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
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
    """Return the loss of `clipped_surrogate`, but 0 on the selected tokens (Clip-Cov, arXiv:2505.22617).

    `select_clip_cov_tokens` selects them over the whole mini-batch. Only the selected tokens count as clipped.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].
        selected: Tokens of the declared selection [T] bool.
        eps_clip_low: Lower clip distance of the ratio from 1.
        eps_clip_high: Upper clip distance of the ratio from 1.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
    values, _ = clipped_surrogate(
        logprobs, advantages, mask, old_logprobs=old_logprobs, eps_clip_low=eps_clip_low, eps_clip_high=eps_clip_high
    )
    return torch.where(selected, 0.0, values), (mask & selected).to(logprobs.dtype)


@selects_tokens_with(select_kl_cov_tokens)
def kl_cov(
    logprobs: Tensor, advantages: Tensor, mask: Tensor, *, old_logprobs: Tensor, selected: Tensor, ppo_kl_coef: float
) -> tuple[Tensor, Tensor]:
    """Return -r A, plus ppo_kl_coef |log r| on the selected tokens (KL-Cov, arXiv:2505.22617).

    r = exp(logprobs - old_logprobs) is the importance ratio. `select_kl_cov_tokens` selects the tokens over the whole
    mini-batch. No token counts as clipped.

    Args:
        logprobs: Log-probs of the policy in training, with gradient, nats [T].
        advantages: Advantages A [T].
        mask: Loss tokens [T] bool. Both results are 0 elsewhere.
        old_logprobs: The trainer's log-probs before the step's first update, nats [T].
        selected: Tokens of the declared selection [T] bool.
        ppo_kl_coef: Coefficient of the penalty on selected tokens.

    Returns:
        Loss of each token [T], and 1 where it was clipped or masked, else 0 [T].
    """
    log_ratio = torch.where(mask, logprobs - old_logprobs, 0.0)
    values, was_clipped = importance_sampling(logprobs, advantages, mask, old_logprobs=old_logprobs)
    return values + torch.where(selected & mask, ppo_kl_coef * log_ratio.abs(), 0.0), was_clipped


def _clipped(
    ratio: Tensor, advantages: Tensor, mask: Tensor, eps_clip_low: float, eps_clip_high: float
) -> tuple[Tensor, Tensor]:
    advantages = torch.where(mask, advantages, 0.0)
    unclipped, clipped = ratio * advantages, ratio.clamp(1 - eps_clip_low, 1 + eps_clip_high) * advantages
    return -torch.minimum(unclipped, clipped), ((clipped < unclipped) & mask).to(ratio.dtype)


def _reinforce(weight: Tensor, logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    advantages, logprobs = (torch.where(mask, x, 0.0) for x in (advantages, logprobs))
    return -weight * advantages * logprobs


def _mask_outside_trust_region(
    logprobs: Tensor, frozen: Tensor, rollout: Tensor, advantages: Tensor, mask: Tensor, outside: Tensor
) -> tuple[Tensor, Tensor]:
    """Return -u A, except 0 on tokens that are `outside` the trust region and that A would push further out."""
    further = ((advantages > 0) & (frozen > rollout)) | ((advantages < 0) & (frozen < rollout))
    blocked = outside & further & mask
    values, _ = importance_sampling(logprobs, advantages, mask & ~blocked, old_logprobs=rollout)
    return torch.where(blocked, 0.0, values), blocked.to(logprobs.dtype)


def _sequence_mean(values: Tensor, mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """Return on every token [T] the mean over its sequence's loss tokens."""
    size = len(values)  # an upper bound of the number of sequences that needs no device sync
    sums = values.new_zeros(size).index_add(0, sequence_ids, torch.where(mask, values, 0.0))
    counts = values.new_zeros(size).index_add(0, sequence_ids, mask.to(values.dtype))
    return (sums / counts.clamp(min=1))[sequence_ids]
