"""Corrections for the difference between the policy that sampled (the engine's) and the one that is trained.

For every token, w = exp(old_logprobs - rollout_logprobs): the trainer's probability before the step, divided by the
engine's, both at the sampling temperature and before top-p and top-k (ratios of truncated distributions would be biased
by the mass that survived). Tensors are [T]; mask is bool; sequence_ids is int64, 0 to num_sequences - 1. Nothing here
has a gradient.

`OffPolicyCorrection` applies them once, to the whole batch before the update: tokens masked here are in no denominator,
however mini-batches are cut. There, a sequence consists of all tokens sampled in an episode, even if the batch contains
it as several sequences.

Legend: T tokens, B sequences.
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
    """[B] the product of w over a sequence's tokens, or their geometric mean; 1 for a sequence without tokens."""
    logs = log_ratios(old_logprobs, rollout_logprobs, mask).double()
    sums = logs.new_zeros(num_sequences).index_add(0, sequence_ids, logs)
    if geometric:
        sums = sums / sums.new_zeros(num_sequences).index_add(0, sequence_ids, mask.double()).clamp(min=1)
    return sums.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncate_ratios(ratios: Tensor, high: float) -> Tensor:
    """min(w, high): truncated importance sampling, of tokens or of sequences (fengyao.notion.site/off-policy-rl)."""
    return ratios.clamp(max=high)


def within_bounds(ratios: Tensor, low: float | None, high: float | None) -> Tensor:
    """bool: low <= w <= high; a bound of None always holds."""
    kept = torch.ones_like(ratios, dtype=torch.bool)
    if low is not None:
        kept &= ratios >= low
    if high is not None:
        kept &= ratios <= high
    return kept


def all_tokens_within_bounds(kept: Tensor, mask: Tensor, sequence_ids: Tensor, num_sequences: int) -> Tensor:
    """[B] bool: every token of the sequence that counts is inside the bounds, given by kept [T] bool."""
    outside = (mask & ~kept).long()
    return outside.new_zeros(num_sequences).index_add(0, sequence_ids, outside) == 0


def effective_sample_size(weights: Tensor) -> Tensor:
    """(sum w)^2 / (n sum w^2), 1 if all n weights are equal: the share of samples that is not lost to variance."""
    weights = weights.double()
    return weights.sum().square() / (len(weights) * weights.square().sum()).clamp(min=1e-300)


# -- the correction of a batch -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffPolicyCorrection:
    """`trainer.algorithm.off_policy_correction`: first masks, then weights for the remaining tokens."""

    settings: OffPolicyCorrectionConfig
    needs_token_rewards = False

    def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """Return the batch with a narrower `loss_mask` and with `importance_weights`, as configured."""
        if batch.old_logprobs is None or batch.rollout_logprobs is None:
            return batch
        old, rollout = batch.old_logprobs, batch.rollout_logprobs
        ratios = importance_ratios(old, rollout, batch.loss_mask)
        _record_mismatch_metrics(batch, ratios, metrics)
        mask = self._filter_mask(batch, ratios, metrics)
        if torch.equal(mask, batch.loss_mask):
            mask = batch.loss_mask  # which ranks that have scored the batch have already
        weights = None
        if self.settings.tis_ratio_type == "token":
            high = self.settings.token_tis_ratio_clip_high
            weights = truncate_ratios(ratios, high)
            _record_fraction(metrics, "correction/truncated_tokens", (ratios > high)[mask])
        elif self.settings.tis_ratio_type == "sequence":
            high = self.settings.sequence_tis_ratio_clip_high
            episodes = batch.episodes
            of_sequences = sequence_ratios(
                old, rollout, batch.loss_mask, episodes.token_to_episode, episodes.num_episodes
            )
            weights = truncate_ratios(of_sequences, high)[episodes.token_to_episode].to(old.dtype)
            _record_fraction(metrics, "correction/truncated_sequences", (of_sequences > high)[_has_loss_tokens(batch)])
        return batch.with_tokens(loss_mask=mask, importance_weights=weights)

    def _filter_mask(self, batch: TrainBatch, ratios: Tensor, metrics: Metrics) -> Tensor:
        """[T] the loss mask without the sequences and tokens that are too far off-policy."""
        settings, counting, episodes = self.settings, _has_loss_tokens(batch), batch.episodes
        low, high = settings.outlier_token_is_threshold_low, settings.outlier_token_is_threshold_high
        keep = torch.ones(episodes.num_episodes, dtype=torch.bool)
        if low is not None or high is not None:
            kept = all_tokens_within_bounds(
                within_bounds(ratios, low, high), batch.loss_mask, episodes.token_to_episode, episodes.num_episodes
            )
            _record_fraction(metrics, "correction/outlier_sequences", ~kept[counting])
            keep &= kept
        if (metric := settings.sequence_mask_metric) is not None:
            geometric = metric == "geometric"
            of_sequences = sequence_ratios(
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
            kept = within_bounds(of_sequences, *bounds)
            _record_fraction(metrics, "correction/masked_sequences", ~kept[counting])
            keep &= kept
        mask = batch.loss_mask & keep[episodes.token_to_episode]
        low, high = get_token_mask_bounds(settings)
        if low is not None or high is not None:
            kept = within_bounds(ratios, low, high)
            _record_fraction(metrics, "correction/masked_tokens", ~kept[batch.loss_mask])
            mask = mask & kept
        return mask


def get_token_mask_bounds(settings: OffPolicyCorrectionConfig) -> tuple[float | None, float | None]:
    """Least and greatest ratio of a token that is not masked; None is no bound. Of two ways to write one, both hold."""
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
    """[E] bool: samples with at least one token that counts."""
    return batch.episodes.num_loss_tokens > 0


def _record_fraction(metrics: Metrics, name: str, hits: Tensor) -> None:
    metrics.add_sum(name, float(hits.sum()), weight=max(len(hits), 1))


def _record_mismatch_metrics(batch: TrainBatch, ratios: Tensor, metrics: Metrics) -> None:
    """mismatch/*: how far the engine's log-probs are from the trainer's, over tokens that count; KL in nats."""
    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    mask = batch.loss_mask
    if not mask.any():
        return
    inside_mask = ratios[mask].double()
    kl = k3(batch.rollout_logprobs, batch.old_logprobs, mask)[mask].double()
    episodes = batch.episodes
    of_sequences = sequence_ratios(
        batch.old_logprobs, batch.rollout_logprobs, mask, episodes.token_to_episode, episodes.num_episodes
    )
    metrics.add("mismatch/ratio_mean", float(inside_mask.mean()))
    metrics.add("mismatch/ratio_std", float(inside_mask.std(correction=0)))
    metrics.update_max("mismatch/ratio_max", float(inside_mask.max()))
    metrics.add("mismatch/ratio_min", float(inside_mask.min()))
    metrics.add("mismatch/kl", float(kl.mean()))
    metrics.add("mismatch/ess_tokens", float(effective_sample_size(inside_mask)))
    metrics.add("mismatch/ess_sequences", float(effective_sample_size(of_sequences[_has_loss_tokens(batch)])))
