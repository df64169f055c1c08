"""Advantage estimators: how good each response, or each token, was compared with others. Nothing here has a gradient.

    estimator(rewards, group_ids, valid, *, ...) -> [B] advantages, the same on all tokens of a response,
                                                    or TokenAdvantages

rewards [B] float32, group_ids [B] (equal for the samples of a prompt), valid [B] bool: failed samples neither count in
any statistic nor get an advantage. An estimator declares what else it needs as keywords: numbers come from the
configuration, and the available tensors are

    mask [T] bool                the sampled tokens of valid sequences
    sequence_ids [T] int64       the sequence (0 to B-1) of a token
    token_rewards [T]            the reward of a turn on the turn's last token, minus KL penalties; sums to `rewards`
    response_lengths [B] int64   number of tokens that count
    values [T]                   the critic's value of the state before each token
    old_logprobs, ref_logprobs [T]

`AdvantageStep` applies an estimator to the batch of a step.

Legend: B sequences, T tokens, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

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
"""Added to a group's divisor."""


def grpo(rewards: Tensor, group_ids: Tensor, valid: Tensor, *, grpo_norm_by_std: bool) -> Tensor:
    """A = r - mean(r of its group), over (std + 1e-6) with `grpo_norm_by_std` (arXiv:2402.03300, section 4.1.2).

    The standard deviation is the unbiased one. A group without information (one valid sample, or equal rewards) gets
    exactly 0.
    """
    group = _GroupStatistics(group_ids, valid)
    centred = group.center(rewards)
    if grpo_norm_by_std:
        variance = group.sums(centred.square()) / (group.counts - 1).clamp(min=1)
        centred = centred / (variance.sqrt() + EPSILON)
    return centred.to(rewards.dtype)


def dr_grpo(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """A = r - mean(r of its group) (Dr. GRPO, arXiv:2503.20783), to be used with `seq_mean_token_sum_norm`."""
    return grpo(rewards, group_ids, valid, grpo_norm_by_std=False)


def rloo(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """A = r - mean(r of the others in its group) (arXiv:2402.14740, eq. 6); 0 for a sample without others."""
    group = _GroupStatistics(group_ids, valid)
    return (group.center(rewards) * group.counts / (group.counts - 1).clamp(min=1)).to(rewards.dtype)


def maxrl(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """A = (r - m) / max(m, 1 / n), m = mean(r of its group of n): maximum-likelihood RL (arXiv:2602.02710).

    Meant for rewards of 0 and 1: m is then the pass rate, and at least 1 / n if any sample passes. The lower bound
    matters only for other rewards, if penalties bring m near 0 or below. A group of equal rewards gets 0.
    """
    group = _GroupStatistics(group_ids, valid)
    floor = 1 / group.counts.clamp(min=1)
    return (group.center(rewards) / torch.maximum(group.means(rewards), floor)).to(rewards.dtype)


def opo(rewards: Tensor, group_ids: Tensor, valid: Tensor, *, response_lengths: Tensor) -> Tensor:
    """A = r - b, b = sum(length r) / sum(length) over its group: the optimal baseline (arXiv:2505.23585).

    Exactly 0 if all rewards of a group are equal, and for a group of one sample.
    """
    group = _GroupStatistics(group_ids, valid)
    centred = group.center(rewards)  # b shifts with the rewards: equal ones give exactly 0
    lengths = response_lengths.double() * valid
    baseline = group.sums(lengths * centred) / group.sums(lengths).clamp(min=1)
    return torch.where(valid, centred - baseline, 0.0).to(rewards.dtype)


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
    """`reinforce++`: discounted sum of rewards from each token on, normalised over the batch (arXiv:2501.03262)."""
    returns = _discounted_sums(token_rewards, mask, sequence_ids, gamma)
    return TokenAdvantages(batch_normalize(returns, mask, correction=1), returns)


def reinforce_pp_baseline(
    rewards: Tensor, group_ids: Tensor, valid: Tensor, *, mask: Tensor, sequence_ids: Tensor
) -> TokenAdvantages:
    """`reinforce++_baseline`: r - mean(r of its group), normalised over the batch's tokens (arXiv:2501.03262)."""
    centred = _GroupStatistics(group_ids, valid).center(rewards).to(rewards.dtype)
    return TokenAdvantages(batch_normalize(torch.where(mask, centred[sequence_ids], 0.0), mask, correction=1))


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
    """Generalised advantage estimation (arXiv:1506.02438, eq. 16), normalised over the batch's tokens.

    delta_t = r_t + gamma V_{t+1} - V_t, A_t = sum over k of (gamma lambd)^k delta_{t+k}, V = 0 after the last token;
    returns are A + V, before A is normalised. Steps are sampled tokens: an environment's tokens between two turns
    belong to the step before them.
    """
    sampled = values[mask].double()
    rows = sequence_ids[mask]
    following = torch.cat([sampled[1:], sampled.new_zeros(min(1, len(sampled)))])
    following[:-1][rows[1:] != rows[:-1]] = 0.0
    deltas = token_rewards[mask].double() + gamma * following - sampled
    advantages = _scatter_to_tokens(suffix_sums(deltas, rows, gamma * lambd), mask).to(values.dtype)
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
    """A_t = ref_logprobs - old_logprobs: on-policy distillation with the reference as teacher; rewards are ignored.

    With this advantage, the policy gradient descends the reverse KL divergence KL(policy || teacher), token by token
    (arXiv:2306.13649, with samples of the student only).
    """
    return TokenAdvantages(torch.where(mask, ref_logprobs - old_logprobs, 0.0))


ComparisonScope = Literal["group", "step"]
"""Among which samples an estimator compares rewards: those of one prompt, or all of a step."""
_COMPARE_GROUPS = (grpo, dr_grpo, rloo, maxrl, opo, reinforce_pp_baseline)


def get_comparison_scope(estimator: Callable[..., Any]) -> ComparisonScope | None:
    """Among which samples an estimator compares rewards; None if it reads none.

    Of a user's own estimator "step" is assumed: what compares groups learns nothing from a step of equal rewards
    either.
    """
    if estimator is distillation:
        return None
    return "group" if estimator in _COMPARE_GROUPS else "step"


def batch_normalize(advantages: Tensor, mask: Tensor, *, correction: int = 0) -> Tensor:
    """(A - mean) / std over the tokens that count (`trainer.algorithm.advantage_batch_normalize`).

    advantages [T], mask [T] bool; 0 outside the mask. The variance, at least 1e-8, is the sum of squares over
    n - `correction`: as in SkyRL, 1 where an estimator normalises its own advantages, and 0 for the configuration key.
    """
    count = mask.sum().clamp(min=1)
    freedom = (count - correction).clamp(min=1)
    wide = torch.where(mask, advantages.double(), 0.0)  # float32 rounding over 1e-4 would be noticeable
    centred = torch.where(mask, wide - wide.sum() / count, 0.0)
    return (centred * (centred.square().sum() / freedom).clamp(min=1e-8).rsqrt()).to(advantages.dtype)


class _GroupStatistics:
    """Statistics of each sample's group over its valid samples; every result is [B] float64.

    In float64, the mean of equal float32 rewards is exact; a rounding error divided by 1e-6 would be an advantage.
    """

    def __init__(self, group_ids: Tensor, valid: Tensor):
        _, self._groups = group_ids.unique(return_inverse=True)  # [B], 0..G-1
        self._valid = valid
        self.counts = self.sums(torch.ones_like(group_ids, dtype=torch.float64))

    def sums(self, values: Tensor) -> Tensor:
        inside = torch.where(self._valid, values.double(), 0.0)
        zeros = inside.new_zeros(len(inside))  # G <= B: avoids a device sync for the number of groups
        return zeros.index_add(0, self._groups, inside)[self._groups]

    def means(self, values: Tensor) -> Tensor:
        return self.sums(values) / self.counts.clamp(min=1)

    def center(self, values: Tensor) -> Tensor:
        """Values minus their group's mean; 0 for invalid samples."""
        return torch.where(self._valid, values.double() - self.means(values), 0.0)


MAX_PADDED_ELEMENTS = 1 << 20
"""Places of a rectangle of sequences, unless one sequence alone is longer."""


def suffix_sums(values: Tensor, rows: Tensor, factor: float) -> Tensor:
    """[S] s_t = v_t + factor * s_{t+1} within each sequence; `values`: of all sampled tokens, `rows`: their sequences.

    Sequences of about one length are summed side by side, so that one long answer does not make all of them long.
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
        which = longest_first.indices[begin:end]
        columns = torch.arange(length, device=values.device)[:, None]
        there, places = columns < counts[which], columns + starts[which]  # (L, B')
        sums = torch.where(there, values[places.clamp(max=len(values) - 1)], 0.0)
        for column in range(length - 2, -1, -1):
            sums[column] += factor * sums[column + 1]
        result[places[there]] = sums[there]
        begin = end
    return result


def _scatter_to_tokens(sampled: Tensor, mask: Tensor) -> Tensor:
    """[S] -> [T], 0 outside the mask."""
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
"""The tensors that estimators may take as keywords."""
_STATISTICS_CHUNK_TOKENS = 1 << 20
"""Tokens whose statistics are summed at a time: they are float64 then."""


@dataclass
class KLInReward:
    """`trainer.algorithm.use_kl_in_reward`: a KL penalty on the reward of every token instead of a loss term."""

    estimator: KLEstimator
    controller: FixedKLController | AdaptiveKLController


@dataclass
class AdvantageCalculator:
    """Applies the estimator to the rewards (minus the KL penalty).

    With batch normalisation, advantages are then normalised over the tokens of the batch.
    """

    estimator: AdvantageEstimator
    """Takes only keywords that are in TENSORS."""
    advantage_batch_normalize: bool = False
    kl: KLInReward | None = None

    @property
    def needs_token_rewards(self) -> bool:
        return "token_rewards" in get_keyword_parameters(self.estimator)

    def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """Return the batch with `sequence_advantages` [B], if all tokens of a sequence have the same one, or with
        `advantages` (and `returns`, from estimators with a critic) [T], 0 outside the mask."""
        episodes = batch.episodes  # an estimator sees an episode as one sequence, even if it consists of several
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
        groups, valid = episodes.first_per_episode(batch.group_ids), episodes.first_per_episode(batch.status)
        wanted = {name: tensor() for name, tensor in select_keyword_arguments(self.estimator, tensors).items()}
        result = self.estimator(rewards, groups, valid, **wanted)
        if isinstance(result, TokenAdvantages):
            batch = replace(batch, advantages=result.advantages, returns=result.returns, sequence_advantages=None)
        else:
            numbers = result if result.is_floating_point() else result.float()
            numbers = numbers[episodes.sequence_to_episode]
            batch = replace(batch, advantages=None, returns=None, sequence_advantages=numbers)
        if self.advantage_batch_normalize and (advantages := batch.token_advantages) is not None:
            advantages = batch_normalize(advantages, batch.loss_mask)
            batch = replace(batch, advantages=advantages, sequence_advantages=None)
        record_advantage_metrics(batch, metrics)
        return batch

    def kl_penalty(self, kl: KLInReward, batch: TrainBatch, metrics: Metrics) -> Tensor:
        """[T] coefficient times KL; also updates the KL controller."""
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
        """The state that a resumed run needs: the adapted KL coefficient."""
        return {} if self.kl is None else {"kl_coef": self.kl.controller.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        if self.kl is not None:
            self.kl.controller.coef = float(state.get("kl_coef", self.kl.controller.coef))


def record_advantage_metrics(batch: TrainBatch, metrics: Metrics) -> None:
    """advantages/*: statistics over the tokens that count."""
    for chosen in _iterate_advantages(batch):
        if not len(chosen):
            continue
        metrics.add_sum("advantages/mean", float(chosen.sum()), weight=len(chosen))
        metrics.add_sum("advantages/abs_mean", float(chosen.abs().sum()), weight=len(chosen))
        metrics.update_max("advantages/abs_max", float(chosen.abs().max()))
        metrics.add_sum("advantages/zero_fraction", float(torch.count_nonzero(chosen == 0)), weight=len(chosen))


def _iterate_advantages(batch: TrainBatch) -> Iterator[Tensor]:
    """The advantages of the tokens that count, in order, some at a time: float64."""
    if batch.advantages is not None:
        for values, counts in zip(
            batch.advantages.split(_STATISTICS_CHUNK_TOKENS),
            batch.loss_mask.split(_STATISTICS_CHUNK_TOKENS),
            strict=True,
        ):
            yield values[counts].double()
    elif batch.sequence_advantages is not None:
        tokens = batch.num_loss_tokens
        for rows in pack(tokens.tolist(), None, _STATISTICS_CHUNK_TOKENS):
            chosen = slice(rows[0], rows[-1] + 1)
            yield torch.repeat_interleave(batch.sequence_advantages[chosen].double(), tokens[chosen])
