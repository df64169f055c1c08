"""Corrections for the difference between the policy that sampled (the engine's) and the policy that is trained.

For every token, w = exp(old_logprobs - rollout_logprobs): the trainer's probability before the step, divided by the
engine's. Both are at the sampling temperature and before top-p and top-k, because ratios of truncated distributions
would be biased by the mass that survived. No result has a gradient.

`OffPolicyCorrection` applies the corrections once, to the whole batch before the update. Tokens masked here are
therefore in no denominator, however mini-batches are split. A sequence is there all tokens sampled in an episode, even
if the batch contains the episode as several sequences.

Legend: T tokens, B sequences, E episodes. mask [T] is bool; sequence_ids [T] is int64, 0 to num_sequences - 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.ratios import MAX_LOG_RATIO, importance_ratios, log_ratios
from skyrl_train.config.algorithm import OffPolicyCorrectionConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics


def sequence_ratios(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    num_sequences: int,
    *,
    geometric: bool = False,
) -> Tensor:
    """Return the product of w over each sequence's tokens, or their geometric mean.

    Args:
        old_logprobs: The trainer's log-probs, nats [T].
        rollout_logprobs: The engine's log-probs, nats [T].
        mask: Loss tokens [T].
        sequence_ids: Sequence of each token [T].
        num_sequences: Number of sequences, B.
        geometric: Return the geometric mean instead of the product.

    Returns:
        Ratios [B] float64, between exp(-MAX_LOG_RATIO) and exp(MAX_LOG_RATIO); 1 for a sequence without loss tokens.
    """
    logs = log_ratios(old_logprobs, rollout_logprobs, mask).double()
    sums = logs.new_zeros(num_sequences).index_add(0, sequence_ids, logs)
    if geometric:
        sums = sums / sums.new_zeros(num_sequences).index_add(0, sequence_ids, mask.double()).clamp(min=1)
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncate_ratios(ratios: Tensor, high: float) -> Tensor:
    """Return min(w, high): truncated importance sampling of tokens or sequences (fengyao.notion.site/off-policy-rl)."""
    return ratios.clamp(max=high)


def within_bounds(ratios: Tensor, low: float | None, high: float | None) -> Tensor:
    """Return a bool tensor, True where low <= w <= high. A bound of None always holds.

    Args:
        ratios: Ratios w, any shape.
        low: Lower bound, or None.
        high: Upper bound, or None.
    """
    inside = torch.ones_like(ratios, dtype=torch.bool)
    if low is not None:
        inside &= ratios >= low
    if high is not None:
        inside &= ratios <= high
    return inside


def all_tokens_within_bounds(inside: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """Return a bool tensor [B], True if all loss tokens of a sequence are within bounds.

    Args:
        inside: True for tokens within the bounds [T].
        mask: Loss tokens [T].
        sequence_ids: Sequence of each token [T].
        num_sequences: Number of sequences, B.
    """
    outside = (mask & ~inside).long()
    return outside.new_zeros(num_sequences).index_add(0, sequence_ids, outside) == 0


def effective_sample_size(weights: Tensor) -> Tensor:
    """Return (sum w)^2 / (n sum w^2): the fraction of samples not lost to variance, 1 if all n weights are equal."""
    weights = weights.double()
    return weights.sum().square() / (len(weights) * weights.square().sum()).clamp(min=1e-300)


# -- the correction of a batch -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffPolicyCorrection:
    """A callable that applies `trainer.algorithm.off_policy_correction`: it masks, then weights remaining tokens."""

    settings: OffPolicyCorrectionConfig
    needs_token_rewards = False

    def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """Return the batch with a narrower `loss_mask` and with `importance_weights`, as configured.

        Nothing happens to a batch without `old_logprobs` or `rollout_logprobs`.

        Args:
            batch: The batch of a step.
            metrics: Receives mismatch/* and correction/*.

        Returns:
            The batch. Its `importance_weights` [T] are truncated ratios, or None if `tis_ratio_type` is not set.
        """
        if batch.old_logprobs is None or batch.rollout_logprobs is None:
            return batch
        old, rollout = batch.old_logprobs, batch.rollout_logprobs
        ratios = importance_ratios(old, rollout, batch.loss_mask)
        _record_mismatch_metrics(batch, ratios, metrics)
        mask = self._filter_mask(batch, ratios, metrics)
        if torch.equal(mask, batch.loss_mask):
            mask = batch.loss_mask  # ranks that have computed log-probs already have this tensor
        weights = None
        if self.settings.tis_ratio_type == "token":
            high = self.settings.token_tis_ratio_clip_high
            weights = truncate_ratios(ratios, high)
            _record_fraction(metrics, "correction/truncated_tokens", (ratios > high)[mask])
        elif self.settings.tis_ratio_type == "sequence":
            high = self.settings.sequence_tis_ratio_clip_high
            episodes = batch.episodes
            ratios_of_sequences = sequence_ratios(
                old, rollout, batch.loss_mask, episodes.token_to_episode, episodes.num_episodes
            )
            weights = truncate_ratios(ratios_of_sequences, high)[episodes.token_to_episode].to(old.dtype)
            _record_fraction(
                metrics, "correction/truncated_sequences", (ratios_of_sequences > high)[_has_loss_tokens(batch)]
            )
        return batch.with_tokens(loss_mask=mask, importance_weights=weights)

    def _filter_mask(self, batch: TrainBatch, ratios: Tensor, metrics: Metrics) -> Tensor:
        """Return the loss mask [T] without the sequences and tokens that are too far off-policy."""
        settings, has_loss_tokens, episodes = self.settings, _has_loss_tokens(batch), batch.episodes
        low, high = settings.outlier_token_is_threshold_low, settings.outlier_token_is_threshold_high
        keep = torch.ones(episodes.num_episodes, dtype=torch.bool)
        if low is not None or high is not None:
            inside = all_tokens_within_bounds(
                within_bounds(ratios, low, high), batch.loss_mask, episodes.token_to_episode, episodes.num_episodes
            )
            _record_fraction(metrics, "correction/outlier_sequences", ~inside[has_loss_tokens])
            keep &= inside
        if (metric := settings.sequence_mask_metric) is not None:
            geometric = metric == "geometric"
            ratios_of_sequences = sequence_ratios(
                batch.old_logprobs,  # type: ignore[arg-type]
                batch.rollout_logprobs,  # type: ignore[arg-type]
                batch.loss_mask,
                episodes.token_to_episode,
                episodes.num_episodes,
                geometric=geometric,
            )
            bounds = (
                (settings.geo_mask_low, settings.geo_mask_high)
                if geometric
                else (settings.product_mask_low, settings.product_mask_high)
            )
            inside = within_bounds(ratios_of_sequences, *bounds)
            _record_fraction(metrics, "correction/masked_sequences", ~inside[has_loss_tokens])
            keep &= inside
        mask = batch.loss_mask & keep[episodes.token_to_episode]
        low, high = get_token_mask_bounds(settings)
        if low is not None or high is not None:
            inside = within_bounds(ratios, low, high)
            _record_fraction(metrics, "correction/masked_tokens", ~inside[batch.loss_mask])
            mask = mask & inside
        return mask


def get_token_mask_bounds(settings: OffPolicyCorrectionConfig) -> tuple[float | None, float | None]:
    """Return (lowest, highest) ratio with which a token keeps its place in the loss mask; None for no bound.

    The lowest ratio is `token_mask_is_threshold_low` or 1 - `token_mask_eps_low`, the highest one
    `token_mask_is_threshold_high` or 1 + `token_mask_eps_high`. If both keys of a bound are set, the stricter one
    applies.
    """
    low, high = [settings.token_mask_is_threshold_low], [settings.token_mask_is_threshold_high]
    if settings.token_mask_eps_low is not None:
        low.append(1 - settings.token_mask_eps_low)
    if settings.token_mask_eps_high is not None:
        high.append(1 + settings.token_mask_eps_high)
    return (
        max((bound for bound in low if bound is not None), default=None),
        min((bound for bound in high if bound is not None), default=None),
    )


def _has_loss_tokens(batch: TrainBatch) -> Tensor:
    """Return a bool tensor [E], True for episodes with at least one loss token."""
    return batch.episodes.num_loss_tokens > 0


def _record_fraction(metrics: Metrics, name: str, hits: Tensor) -> None:
    metrics.add_sum(name, float(hits.sum()), weight=max(len(hits), 1))


def _record_mismatch_metrics(batch: TrainBatch, ratios: Tensor, metrics: Metrics) -> None:
    """Record how far the engine's log-probs are from the trainer's, over loss tokens, as mismatch/*. KL is in nats."""
    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    mask = batch.loss_mask
    if not mask.any():
        return
    token_ratios = ratios[mask].double()
    kl = k3(batch.rollout_logprobs, batch.old_logprobs, mask)[mask].double()
    episodes = batch.episodes
    ratios_of_sequences = sequence_ratios(
        batch.old_logprobs, batch.rollout_logprobs, mask, episodes.token_to_episode, episodes.num_episodes
    )
    metrics.add("mismatch/ratio_mean", float(token_ratios.mean()))
    metrics.add("mismatch/ratio_std", float(token_ratios.std(correction=0)))
    metrics.update_max("mismatch/ratio_max", float(token_ratios.max()))
    metrics.add("mismatch/ratio_min", float(token_ratios.min()))
    metrics.add("mismatch/kl", float(kl.mean()))
    metrics.add("mismatch/ess_tokens", float(effective_sample_size(token_ratios)))
    metrics.add("mismatch/ess_sequences", float(effective_sample_size(ratios_of_sequences[_has_loss_tokens(batch)])))
