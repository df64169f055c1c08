"""Advantage estimators: how much better each response, or each token, was than its alternatives.

    estimator(rewards, group_ids, valid, *, ...) -> advantages [B], the same on all tokens of a response,
                                                    or TokenAdvantages

rewards [B] are float32. group_ids [B] are equal for the samples of one prompt. valid [B] is bool: failed samples
neither count in any statistic nor get an advantage. No result has a gradient. An estimator declares its other inputs as
keyword-only parameters. Numbers come from the configuration, and the available tensors are

    mask [T] bool                the sampled tokens of valid sequences
    sequence_ids [T] int64       the sequence (0 to B-1) of a token
    token_rewards [T]            the reward of a turn on the turn's last token, minus KL penalties; sums to `rewards`
    response_lengths [B] int64   number of loss tokens
    values [T]                   the critic's value of the state before each token
    old_logprobs [T]             the trainer's log-probs before the step's first update
    ref_logprobs [T]             the reference model's log-probs
    rollout_logprobs [T]         the engine's log-probs

`AdvantageCalculator` applies an estimator to the batch of a step.

Legend: B sequences, T tokens, S sampled tokens, G groups. Loss tokens are the tokens in the batch's loss mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController
from skyrl_train.algorithms.registry import (
    AdvantageEstimator,
    KLEstimator,
    TokenAdvantages,
    get_keyword_parameters,
    select_keyword_arguments,
)
from skyrl_train.data.batch import TrainBatch, pack
from skyrl_train.metrics import Metrics

EPSILON = 1e-6
"""Added to the standard deviation of a group before the division."""


def grpo(rewards: Tensor, group_ids: Tensor, valid: Tensor, *, grpo_norm_by_std: bool) -> Tensor:
    """Return A = r - mean(r of its group) (GRPO, arXiv:2402.03300, section 4.1.2).

    With `grpo_norm_by_std`, the result is divided by (std + 1e-6), where std is the group's unbiased standard
    deviation. A group without information (one valid sample, or equal rewards) gets exactly 0.

    Args:
        rewards: Rewards [B].
        group_ids: Group of each sample [B].
        valid: False for failed samples [B]; they get 0.
        grpo_norm_by_std: Divide by the standard deviation of the group.

    Returns:
        Advantages [B], in the dtype of `rewards`.
    """
    group = _GroupStatistics(group_ids, valid)
    centered = group.center(rewards)
    if grpo_norm_by_std:
        variance = group.sums(centered.square()) / (group.counts - 1).clamp(min=1)
        centered = centered / (variance.sqrt() + EPSILON)
    return centered.to(rewards.dtype)


def dr_grpo(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Return A = r - mean(r of its group), [B] (Dr. GRPO, arXiv:2503.20783).

    Use it with the reduction `seq_mean_token_sum_norm`. Failed samples get 0.

    Args:
        rewards: Rewards [B].
        group_ids: Group of each sample [B].
        valid: False for failed samples [B]; they do not count.
    """
    return grpo(rewards, group_ids, valid, grpo_norm_by_std=False)


def rloo(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Return A = r - mean(r of the other samples in its group), [B] (RLOO, arXiv:2402.14740, eq. 6).

    A sample that is alone in its group gets 0, and so do failed samples.

    Args:
        rewards: Rewards [B].
        group_ids: Group of each sample [B].
        valid: False for failed samples [B]; they do not count.
    """
    group = _GroupStatistics(group_ids, valid)
    return (group.center(rewards) * group.counts / (group.counts - 1).clamp(min=1)).to(rewards.dtype)


def maxrl(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Return A = (r - m) / max(m, 1 / n), [B], with m = mean(r) over its group of n (MaxRL, arXiv:2602.02710).

    This is maximum-likelihood RL, meant for rewards of 0 and 1: m is then the pass rate, and is at least 1 / n if any
    sample passes. The lower bound 1 / n matters only for other rewards, when penalties bring m near 0 or below. A group
    of equal rewards gets 0, and so do failed samples.

    Args:
        rewards: Rewards [B].
        group_ids: Group of each sample [B].
        valid: False for failed samples [B]; they do not count.
    """
    group = _GroupStatistics(group_ids, valid)
    floor = 1 / group.counts.clamp(min=1)
    return (group.center(rewards) / torch.maximum(group.means(rewards), floor)).to(rewards.dtype)


def opo(rewards: Tensor, group_ids: Tensor, valid: Tensor, *, response_lengths: Tensor) -> Tensor:
    """Return A = r - b, [B], with b = sum(length * r) / sum(length) over its group (OPO, arXiv:2505.23585).

    b is the optimal baseline. The result is exactly 0 if all rewards of a group are equal, for a group of one sample,
    and for failed samples.

    Args:
        rewards: Rewards [B].
        group_ids: Group of each sample [B].
        valid: False for failed samples [B].
        response_lengths: Number of loss tokens of each sample [B].
    """
    group = _GroupStatistics(group_ids, valid)
    centered = group.center(rewards)  # b shifts with the rewards, so equal rewards give exactly 0
    lengths = response_lengths.double() * valid
    baseline = group.sums(lengths * centered) / group.sums(lengths).clamp(min=1)
    return torch.where(valid, centered - baseline, 0.0).to(rewards.dtype)


def reinforce_pp(
    rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    *,
    token_rewards: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    gamma: float,
) -> TokenAdvantages:
    """Return the discounted sum of rewards from each token on, normalized over the batch (`reinforce++`).

    The source is REINFORCE++ (arXiv:2501.03262). The normalization is `batch_normalize` with the unbiased variance.

    Args:
        rewards: Not used.
        group_ids: Not used.
        valid: Not used; the mask excludes failed samples.
        token_rewards: Rewards of tokens [T].
        mask: Loss tokens [T] bool.
        sequence_ids: Sequence of each token [T].
        gamma: Discount per sampled token.

    Returns:
        Advantages [T], and the discounted sums themselves as returns [T].
    """
    returns = _discounted_sums(token_rewards, mask, sequence_ids, gamma)
    return TokenAdvantages(batch_normalize(returns, mask, correction=1), returns)


def reinforce_pp_baseline(
    rewards: Tensor, group_ids: Tensor, valid: Tensor, *, mask: Tensor, sequence_ids: Tensor
) -> TokenAdvantages:
    """Return r - mean(r of its group) on each token, normalized over the batch (`reinforce++_baseline`).

    The source is REINFORCE++ (arXiv:2501.03262). The normalization over the loss tokens is `batch_normalize` with the
    unbiased variance.

    Args:
        rewards: Rewards [B].
        group_ids: Group of each sample [B].
        valid: False for failed samples [B].
        mask: Loss tokens [T] bool.
        sequence_ids: Sequence of each token [T].

    Returns:
        Advantages [T], without returns.
    """
    centered = _GroupStatistics(group_ids, valid).center(rewards).to(rewards.dtype)
    return TokenAdvantages(batch_normalize(torch.where(mask, centered[sequence_ids], 0.0), mask, correction=1))


def gae(
    rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    *,
    token_rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    gamma: float,
    lambd: float,
) -> TokenAdvantages:
    """Return generalized advantage estimates (GAE, arXiv:1506.02438, eq. 16), normalized over the batch.

        delta_t = r_t + gamma V_{t+1} - V_t, and V = 0 after the last token
        A_t = sum over k of (gamma lambd)^k delta_{t+k}

    Returns are A + V, before A is normalized. Steps are sampled tokens: an environment's tokens between two turns
    belong to the step before them.

    Args:
        rewards: Not used.
        group_ids: Not used.
        valid: Not used; the mask excludes failed samples.
        token_rewards: Rewards of tokens, r [T].
        values: The critic's values, V [T].
        mask: Loss tokens [T] bool.
        sequence_ids: Sequence of each token [T].
        gamma: Discount per sampled token.
        lambd: The lambda of GAE: 0 for one-step estimates, 1 for Monte Carlo returns.

    Returns:
        Normalized advantages [T] and returns [T], both 0 outside the mask.
    """
    sampled = values[mask].double()
    sampled_sequence_ids = sequence_ids[mask]
    next_values = torch.cat([sampled[1:], sampled.new_zeros(min(1, len(sampled)))])
    next_values[:-1][sampled_sequence_ids[1:] != sampled_sequence_ids[:-1]] = 0.0
    deltas = token_rewards[mask].double() + gamma * next_values - sampled
    advantages = _scatter_to_tokens(suffix_sums(deltas, sampled_sequence_ids, gamma * lambd), mask).to(values.dtype)
    returns = torch.where(mask, advantages + values, 0.0)
    return TokenAdvantages(batch_normalize(advantages, mask, correction=1), returns)


def distillation(
    rewards: Tensor,
    group_ids: Tensor,
    valid: Tensor,
    *,
    old_logprobs: Tensor,
    ref_logprobs: Tensor,
    mask: Tensor,
) -> TokenAdvantages:
    """Return A_t = ref_logprobs - old_logprobs: on-policy distillation with the reference model as teacher.

    With this advantage, the policy gradient descends the reverse KL divergence KL(policy || teacher), token by token
    (arXiv:2306.13649, with samples of the student only). Rewards are ignored.

    Args:
        rewards: Not used.
        group_ids: Not used.
        valid: Not used; the mask excludes failed samples.
        old_logprobs: The policy's log-probs, nats [T].
        ref_logprobs: The teacher's log-probs, nats [T].
        mask: Loss tokens [T] bool.

    Returns:
        Advantages [T], 0 outside the mask.
    """
    return TokenAdvantages(torch.where(mask, ref_logprobs - old_logprobs, 0.0))


class ComparisonScope(StrEnum):
    """The set of samples whose rewards an estimator compares."""

    GROUP = "group"
    """The samples of one prompt."""
    STEP = "step"
    """All samples of a step."""


_COMPARE_GROUPS = (grpo, dr_grpo, rloo, maxrl, opo, reinforce_pp_baseline)


def get_comparison_scope(estimator: Callable[..., Any]) -> ComparisonScope | None:
    """Return the set of samples whose rewards an estimator compares.

    Args:
        estimator: An advantage estimator.

    Returns:
        GROUP or STEP; None if the estimator ignores rewards. A user's own estimator counts as STEP: even if it compares
        groups, a step of equal rewards has no training signal for it.
    """
    if estimator is distillation:
        return None
    return ComparisonScope.GROUP if estimator in _COMPARE_GROUPS else ComparisonScope.STEP


def batch_normalize(advantages: Tensor, mask: Tensor, *, correction: int = 0) -> Tensor:
    """Return (A - mean) / std over the loss tokens (`trainer.algorithm.advantage_batch_normalize`).

    Args:
        advantages: Advantages [T].
        mask: Loss tokens [T] bool.
        correction: The variance is the sum of squares over n - `correction`. As in SkyRL, it is 1 in estimators that
            normalize their own advantages, and 0 for the configuration key.

    Returns:
        Normalized advantages [T], 0 outside the mask. The variance is at least 1e-8.
    """
    count = mask.sum().clamp(min=1)
    degrees_of_freedom = (count - correction).clamp(min=1)
    masked = torch.where(mask, advantages.double(), 0.0)  # float32 rounding, divided by a std of 1e-4, would show
    centered = torch.where(mask, masked - masked.sum() / count, 0.0)
    return (centered * (centered.square().sum() / degrees_of_freedom).clamp(min=1e-8).rsqrt()).to(advantages.dtype)


class _GroupStatistics:
    """Statistics of each sample's group over its valid samples; every result is [B] float64.

    In float64, the mean of equal float32 rewards is exact. A rounding error divided by EPSILON would be an advantage.
    """

    def __init__(self, group_ids: Tensor, valid: Tensor):
        _, self._groups = group_ids.unique(return_inverse=True)  # [B], 0..G-1
        self._valid = valid
        self.counts = self.sums(torch.ones_like(group_ids, dtype=torch.float64))

    def sums(self, values: Tensor) -> Tensor:
        valid_values = torch.where(self._valid, values.double(), 0.0)
        zeros = valid_values.new_zeros(len(valid_values))  # G <= B: avoids a device sync for the number of groups
        return zeros.index_add(0, self._groups, valid_values)[self._groups]

    def means(self, values: Tensor) -> Tensor:
        return self.sums(values) / self.counts.clamp(min=1)

    def center(self, values: Tensor) -> Tensor:
        """Return values minus their group's mean; 0 for invalid samples."""
        return torch.where(self._valid, values.double() - self.means(values), 0.0)


MAX_PADDED_ELEMENTS = 1 << 20
"""Maximum size of a padded array of sequences, unless a single sequence is longer."""


def suffix_sums(values: Tensor, rows: Tensor, factor: float) -> Tensor:
    """Return s_t = v_t + factor * s_{t+1} within each sequence [S].

    Sequences of similar length are padded and summed together, so that one long response does not pad all others.

    Args:
        values: Values of the sampled tokens [S].
        rows: Sequence of each sampled token [S]; the tokens of a sequence are consecutive.
        factor: Discount per token.
    """
    result = torch.zeros_like(values)
    _, counts = torch.unique_consecutive(rows, return_counts=True)
    starts = counts.cumsum(0) - counts
    longest_first = torch.sort(counts, descending=True, stable=True)
    begin, lengths = 0, longest_first.values.tolist()
    while begin < len(lengths):
        end, length = begin + 1, lengths[begin]
        while end < len(lengths) and 2 * lengths[end] >= length and (end + 1 - begin) * length <= MAX_PADDED_ELEMENTS:
            end += 1
        batch = longest_first.indices[begin:end]
        offsets = torch.arange(length, device=values.device)[:, None]
        is_token, indices = offsets < counts[batch], offsets + starts[batch]  # (L, B')
        sums = torch.where(is_token, values[indices.clamp(max=len(values) - 1)], 0.0)
        for offset in range(length - 2, -1, -1):
            sums[offset] += factor * sums[offset + 1]
        result[indices[is_token]] = sums[is_token]
        begin = end
    return result


def _scatter_to_tokens(sampled: Tensor, mask: Tensor) -> Tensor:
    """Place values of sampled tokens [S] at their tokens [T], with 0 outside the mask."""
    result = torch.zeros(len(mask), dtype=sampled.dtype, device=sampled.device)
    result[mask] = sampled
    return result


def _discounted_sums(values: Tensor, mask: Tensor, sequence_ids: Tensor, factor: float) -> Tensor:
    sums = suffix_sums(values[mask].double(), sequence_ids[mask], factor)
    return _scatter_to_tokens(sums, mask).to(values.dtype)


# -- advantages of a batch ---------------------------------------------------------------------------------------------


ESTIMATOR_TENSORS = frozenset(
    {
        "mask",
        "sequence_ids",
        "token_rewards",
        "response_lengths",
        "values",
        "old_logprobs",
        "ref_logprobs",
        "rollout_logprobs",
    }
)
"""Names of the tensors that estimators may take as keyword-only parameters."""
_STATISTICS_CHUNK_TOKENS = 1 << 20
"""Number of tokens whose statistics are computed at a time, to bound the memory of their float64 copies."""


@dataclass
class KLInReward:
    """The settings of `trainer.algorithm.use_kl_in_reward`: a KL penalty on token rewards instead of a loss term."""

    estimator: KLEstimator
    controller: FixedKLController | AdaptiveKLController


@dataclass
class AdvantageCalculator:
    """A callable that turns the rewards of a batch into advantages.

    It subtracts the KL penalty from the rewards, if one is configured, and applies the estimator. With
    `advantage_batch_normalize`, it then normalizes the advantages over the loss tokens of the batch.
    """

    estimator: AdvantageEstimator
    """All its keyword-only parameters without default are bound or in ESTIMATOR_TENSORS."""
    advantage_batch_normalize: bool = False
    kl: KLInReward | None = None

    @property
    def needs_token_rewards(self) -> bool:
        """True if the estimator takes `token_rewards`."""
        return "token_rewards" in get_keyword_parameters(self.estimator)

    def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """Return the batch with advantages, and record metrics.

        An estimator treats an episode as one sequence, even if the batch contains it as several sequences. With a KL
        penalty, the call also updates the KL controller.

        Args:
            batch: The batch of a step, with the tensors that the estimator and the KL penalty take.
            metrics: Receives advantages/* and, with a KL penalty, policy/kl_in_reward and policy/kl_coef.

        Returns:
            The batch with `sequence_advantages` [B], if the estimator returns one advantage per sample. Otherwise with
            `advantages` [T] and, from estimators with a critic, `returns` [T], both 0 outside the mask. With batch
            normalization it is always `advantages`.
        """
        episodes = batch.episodes
        rewards, token_rewards = episodes.first_per_episode(batch.rewards), batch.token_rewards
        if self.kl is not None:
            penalty = self.kl_penalty(self.kl, batch, metrics)
            rewards = rewards - episodes.sum_per_episode(penalty).to(rewards.dtype)
            token_rewards = None if token_rewards is None else token_rewards - penalty.to(token_rewards.dtype)
        tensors = {
            "mask": lambda: batch.loss_mask,
            "sequence_ids": lambda: episodes.token_to_episode,
            "token_rewards": lambda: token_rewards,
            "response_lengths": lambda: episodes.num_loss_tokens,
            "values": lambda: batch.values,
            "old_logprobs": lambda: batch.old_logprobs,
            "ref_logprobs": lambda: batch.ref_logprobs,
            "rollout_logprobs": lambda: batch.rollout_logprobs,
        }
        group_ids, valid = episodes.first_per_episode(batch.group_ids), episodes.first_per_episode(batch.status)
        arguments = {name: tensor() for name, tensor in select_keyword_arguments(self.estimator, tensors).items()}
        result = self.estimator(rewards, group_ids, valid, **arguments)
        if isinstance(result, TokenAdvantages):
            batch = replace(batch, advantages=result.advantages, returns=result.returns, sequence_advantages=None)
        else:
            per_episode = result if result.is_floating_point() else result.float()
            per_sequence = per_episode[episodes.sequence_to_episode]
            batch = replace(batch, advantages=None, returns=None, sequence_advantages=per_sequence)
        if self.advantage_batch_normalize and (advantages := batch.token_advantages) is not None:
            advantages = batch_normalize(advantages, batch.loss_mask)
            batch = replace(batch, advantages=advantages, sequence_advantages=None)
        record_advantage_metrics(batch, metrics)
        return batch

    def kl_penalty(self, kl: KLInReward, batch: TrainBatch, metrics: Metrics) -> Tensor:
        """Return the KL penalty of each token and update the KL controller.

        Args:
            kl: The estimator and the controller of the coefficient.
            batch: A batch with `old_logprobs` and `ref_logprobs` [T].
            metrics: Receives the mean KL of an episode (policy/kl_in_reward) and the coefficient (policy/kl_coef).

        Returns:
            Coefficient times KL, nats [T]. The coefficient is the one before the update.
        """
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None, "KL in the reward needs both"
        nats = kl.estimator(
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.loss_mask,
            **select_keyword_arguments(
                kl.estimator, {"frozen_logprobs": batch.old_logprobs, "old_logprobs": batch.rollout_logprobs}
            ),
        )
        episodes = batch.episodes
        tokens = episodes.sum_per_episode(batch.loss_mask.float())
        means = (episodes.sum_per_episode(nats) / tokens.clamp(min=1))[tokens > 0]
        mean_kl = float(means.mean()) if len(means) else 0.0
        penalty = kl.controller.coef * nats
        metrics.add("policy/kl_in_reward", mean_kl)
        metrics.add("policy/kl_coef", kl.controller.coef)
        kl.controller.update(mean_kl, episodes.num_episodes)
        return penalty

    def state_dict(self) -> dict[str, float]:
        """Return the state that a resumed run needs: the KL coefficient as "kl_coef", or {} without a KL penalty."""
        return {} if self.kl is None else {"kl_coef": self.kl.controller.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the state that `state_dict` returned; missing keys keep their current values."""
        if self.kl is not None:
            self.kl.controller.coef = float(state.get("kl_coef", self.kl.controller.coef))


def record_advantage_metrics(batch: TrainBatch, metrics: Metrics) -> None:
    """Record statistics of the advantages of loss tokens as advantages/*; nothing for a batch without advantages."""
    for values in _iterate_advantages(batch):
        if not len(values):
            continue
        metrics.add_sum("advantages/mean", float(values.sum()), weight=len(values))
        metrics.add_sum("advantages/abs_mean", float(values.abs().sum()), weight=len(values))
        metrics.update_max("advantages/abs_max", float(values.abs().max()))
        metrics.add_sum("advantages/zero_fraction", float(torch.count_nonzero(values == 0)), weight=len(values))


def _iterate_advantages(batch: TrainBatch) -> Iterator[Tensor]:
    """Yield the advantages of the loss tokens in order, in float64, one chunk of tokens at a time."""
    if batch.advantages is not None:
        for values, mask in zip(
            batch.advantages.split(_STATISTICS_CHUNK_TOKENS),
            batch.loss_mask.split(_STATISTICS_CHUNK_TOKENS),
            strict=True,
        ):
            yield values[mask].double()
    elif batch.sequence_advantages is not None:
        tokens = batch.num_loss_tokens
        for rows in pack(tokens.tolist(), None, _STATISTICS_CHUNK_TOKENS):
            sequences = slice(rows[0], rows[-1] + 1)
            yield torch.repeat_interleave(batch.sequence_advantages[sequences].double(), tokens[sequences])
