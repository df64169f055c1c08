"""Turns the rewards of a step into an advantage for every sampled token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skyrl_train.algorithms.advantages import TokenAdvantages, batch_normalised
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController
from skyrl_train.algorithms.registry import AdvantageEstimator, KLEstimator, asked_for, keywords_of
from skyrl_train.data.batch import TrainBatch, pack
from skyrl_train.metrics import Metrics

TENSORS = frozenset(
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
_AT_ONCE = 1 << 20
"""Tokens whose statistics are summed at a time: they are float64 then."""


@dataclass
class KLInReward:
    """`trainer.algorithm.use_kl_in_reward`: a KL penalty on the reward of every token instead of a loss term."""

    estimator: KLEstimator
    controller: FixedKLController | AdaptiveKLController


@dataclass
class AdvantageStep:
    """Applies the estimator to the rewards (minus the KL penalty).

    With batch normalisation, advantages are then normalised over the tokens of the batch.
    """

    estimator: AdvantageEstimator
    """Takes only keywords that are in TENSORS."""
    advantage_batch_normalize: bool = False
    kl: KLInReward | None = None

    @property
    def reads_token_rewards(self) -> bool:
        return "token_rewards" in keywords_of(self.estimator)

    def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """Return the batch with `sequence_advantages` [B], if all tokens of a sequence have the same one, or with
        `advantages` (and `returns`, from estimators with a critic) [T], 0 outside the mask."""
        episodes = batch.episodes  # an estimator sees an episode as one sequence, even if it consists of several
        rewards, token_rewards = episodes.first(batch.rewards), batch.token_rewards
        if self.kl is not None:
            penalty = self.kl_penalty(self.kl, batch, metrics)
            rewards = rewards - episodes.sums(penalty).to(rewards.dtype)
            token_rewards = None if token_rewards is None else token_rewards - penalty.to(token_rewards.dtype)
        tensors = {
            "mask": lambda: batch.loss_mask,
            "sequence_ids": lambda: episodes.of_token,
            "token_rewards": lambda: token_rewards,
            "response_lengths": lambda: episodes.loss_tokens,
            "values": lambda: batch.values,
            "old_logprobs": lambda: batch.old_logprobs,
            "ref_logprobs": lambda: batch.ref_logprobs,
            "rollout_logprobs": lambda: batch.rollout_logprobs,
        }
        groups, valid = episodes.first(batch.group_ids), episodes.first(batch.status)
        wanted = {name: tensor() for name, tensor in asked_for(self.estimator, tensors).items()}
        result = self.estimator(rewards, groups, valid, **wanted)
        if isinstance(result, TokenAdvantages):
            batch = replace(batch, advantages=result.advantages, returns=result.returns, sequence_advantages=None)
        else:
            numbers = result if result.is_floating_point() else result.float()
            numbers = numbers[episodes.of_sequence]
            batch = replace(batch, advantages=None, returns=None, sequence_advantages=numbers)
        if self.advantage_batch_normalize and (advantages := batch.token_advantages) is not None:
            advantages = batch_normalised(advantages, batch.loss_mask)
            batch = replace(batch, advantages=advantages, sequence_advantages=None)
        describe(batch, metrics)
        return batch

    def kl_penalty(self, kl: KLInReward, batch: TrainBatch, metrics: Metrics) -> Tensor:
        """[T] coefficient times KL; also updates the KL controller."""
        assert batch.old_logprobs is not None and batch.ref_logprobs is not None, "KL in the reward needs both"
        nats = kl.estimator(
            batch.old_logprobs,
            batch.ref_logprobs,
            batch.loss_mask,
            **asked_for(kl.estimator, {"frozen_logprobs": batch.old_logprobs, "old_logprobs": batch.rollout_logprobs}),
        )
        episodes = batch.episodes
        tokens = episodes.sums(batch.loss_mask.float())
        means = (episodes.sums(nats) / tokens.clamp(min=1))[tokens > 0]
        mean_kl = float(means.mean()) if len(means) else 0.0
        penalty = kl.controller.coef * nats
        metrics.add("policy/kl_in_reward", mean_kl)
        metrics.add("policy/kl_coef", kl.controller.coef)
        kl.controller.update(mean_kl, episodes.count)
        return penalty

    def state(self) -> dict[str, float]:
        """The state that a resumed run needs: the adapted KL coefficient."""
        return {} if self.kl is None else {"kl_coef": self.kl.controller.coef}

    def load_state(self, state: dict[str, float]) -> None:
        if self.kl is not None:
            self.kl.controller.coef = float(state.get("kl_coef", self.kl.controller.coef))


def describe(batch: TrainBatch, metrics: Metrics) -> None:
    """advantages/*: statistics over the tokens that count."""
    for chosen in _counting(batch):
        if not len(chosen):
            continue
        metrics.add_sum("advantages/mean", float(chosen.sum()), weight=len(chosen))
        metrics.add_sum("advantages/abs_mean", float(chosen.abs().sum()), weight=len(chosen))
        metrics.maximum("advantages/abs_max", float(chosen.abs().max()))
        metrics.add_sum("advantages/zero_fraction", float(torch.count_nonzero(chosen == 0)), weight=len(chosen))


def _counting(batch: TrainBatch) -> Iterator[Tensor]:
    """The advantages of the tokens that count, in order, some at a time: float64."""
    if batch.advantages is not None:
        for values, counts in zip(batch.advantages.split(_AT_ONCE), batch.loss_mask.split(_AT_ONCE), strict=True):
            yield values[counts].double()
    elif batch.sequence_advantages is not None:
        tokens = batch.loss_tokens
        for rows in pack(tokens.tolist(), None, _AT_ONCE):
            chosen = slice(rows[0], rows[-1] + 1)
            yield torch.repeat_interleave(batch.sequence_advantages[chosen].double(), tokens[chosen])
