"""From a step's rewards to an advantage on every sampled token."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.algorithms.advantages import batch_normalised
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, kl_penalised_rewards
from skyrl_train.algorithms.registry import AdvantageEstimator, KLEstimator
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics


@dataclass
class KLInReward:
    """`trainer.algorithm.use_kl_in_reward`: a penalty on the reward instead of a term of the loss."""

    estimator: KLEstimator
    controller: FixedKLController | AdaptiveKLController


@dataclass
class AdvantageStep:
    """Rewards (less the KL penalty) through the estimator, spread over tokens, normalised over the batch if asked."""

    estimator: AdvantageEstimator
    norm_by_std: bool
    normalise_batch: bool
    kl: KLInReward | None = None

    def __call__(self, batch: TrainBatch, metrics: Metrics) -> TrainBatch:
        """The batch with `advantages` [T] float32, 0 outside the loss mask."""
        rewards = batch.rewards
        if self.kl is not None:
            assert batch.old_logprobs is not None and batch.ref_logprobs is not None, "KL in the reward needs both"
            kl = self.kl.estimator(batch.old_logprobs, batch.ref_logprobs, batch.loss_mask)
            rewards = kl_penalised_rewards(rewards, kl, batch.sequence_ids, self.kl.controller.coef)
            tokens = batch.per_sequence_sum(batch.loss_mask.float())
            means = (batch.per_sequence_sum(kl) / tokens.clamp(min=1))[tokens > 0]
            mean_kl = float(means.mean()) if len(means) else 0.0
            metrics.add("policy/kl_in_reward", mean_kl)
            metrics.add("policy/kl_coef", self.kl.controller.coef)
            self.kl.controller.update(mean_kl, len(batch))
        values = self.estimator(rewards, batch.group_ids, batch.status, norm_by_std=self.norm_by_std)
        advantages = batch.per_token(values) * batch.loss_mask
        if self.normalise_batch:
            advantages = batch_normalised(advantages, batch.loss_mask)
        return batch.with_tokens(advantages=advantages)

    def state(self) -> dict[str, float]:
        """What a resumed run needs: the adapted KL coefficient."""
        return {} if self.kl is None else {"kl_coef": self.kl.controller.coef}

    def load_state(self, state: dict[str, float]) -> None:
        if self.kl is not None:
            self.kl.controller.coef = state.get("kl_coef", self.kl.controller.coef)
