"""Turns the rewards of a step into an advantage for every sampled token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.advantages import TokenAdvantages, batch_normalised
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController
from skyrl_train.algorithms.registry import AdvantageEstimator, KLEstimator, asked_for
from skyrl_train.data.batch import TrainBatch
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
    """Applies the estimator to the rewards (minus the KL penalty) and spreads the advantages over tokens.

    With batch normalisation, they are then normalised over the batch.
    """

    estimator: AdvantageEstimator
    """Takes only keywords that are in TENSORS."""
    normalise_batch: bool = False
    kl: KLInReward | None = None

    def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """Return the batch with `advantages` (and `returns`, from estimators with a critic) [T], 0 outside the mask."""
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
            advantages, returns = result
        else:
            of_tokens = batch.per_token(
                (result if result.is_floating_point() else result.float())[episodes.of_sequence]
            )
            advantages, returns = of_tokens.masked_fill_(~batch.loss_mask, 0.0), None
        if self.normalise_batch:
            advantages = batch_normalised(advantages, batch.loss_mask)
        describe(advantages, batch.loss_mask, metrics)
        return batch.with_tokens(advantages=advantages, returns=returns)

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


def describe(advantages: Tensor, mask: Tensor, metrics: Metrics) -> None:
    """advantages/*: statistics over the tokens that count."""
    for values, counts in zip(advantages.split(_AT_ONCE), mask.split(_AT_ONCE), strict=True):
        _describe(values[counts].double(), metrics)


def _describe(chosen: Tensor, metrics: Metrics) -> None:
    if len(chosen):
        metrics.add_sum("advantages/mean", float(chosen.sum()), weight=len(chosen))
        metrics.add_sum("advantages/abs_mean", float(chosen.abs().sum()), weight=len(chosen))
        metrics.maximum("advantages/abs_max", float(chosen.abs().max()))
        metrics.add_sum("advantages/zero_fraction", float(torch.count_nonzero(chosen == 0)), weight=len(chosen))
