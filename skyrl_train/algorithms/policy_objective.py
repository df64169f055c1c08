"""The objective of a policy update: policy loss, KL and entropy of one micro-batch, summed to a scalar."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.ratios import importance_ratios
from skyrl_train.algorithms.registry import KLEstimator, PolicyLoss, get_keyword_parameters, select_keyword_arguments
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics

POLICY_LOSS_TENSORS = frozenset({"frozen_logprobs", "old_logprobs", "rollout_logprobs", "sequence_ids", "selected"})
"""Names of the tensors that losses and KL estimators may take as keyword-only parameters."""


@dataclass(frozen=True)
class PolicyObjective:
    """The function that a policy update minimizes.

        loss = sum_t w_t (c_t policy_loss_t + kl_loss_coef kl_t - entropy_loss_coef H_t)

    w are the batch's `token_weights`, c its `importance_weights` (1 if there are none). An objective is pickled and
    sent to workers, so its functions must be module-level functions, which pickle by name.
    """

    policy_loss: PolicyLoss
    """All its keyword-only parameters without default are bound or in POLICY_LOSS_TENSORS."""
    kl_estimator: KLEstimator | None = None
    """None: no KL term in the loss, and no reference model needed."""
    kl_loss_coef: float = 0.0
    entropy_loss_coef: float | None = None
    """None: no entropy bonus; entropy is still reported."""
    report_mismatch: bool = True
    """True to report mismatch/*. False if a correction reports them for the whole batch, before it masks tokens."""

    @property
    def needs_entropy(self) -> bool:
        """True, even without a bonus: a run must show if its entropy collapses."""
        return True

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the loss or the KL estimator takes the policy's log-probs from before the step's first update."""
        parameters = (
            get_keyword_parameters(self.policy_loss),
            get_keyword_parameters(self.kl_estimator) if self.kl_estimator else {},
        )
        return any("old_logprobs" in keywords for keywords in parameters)

    def __call__(
        self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, mini_batch_tokens: int, metrics: Metrics
    ) -> Tensor:
        """Return the scalar to backpropagate for one micro-batch, to be summed over micro-batches and ranks.

        Values outside loss_mask are not read. If the loss takes old_logprobs and the batch has none, the update is
        on-policy, with ratio 1. If the loss does not take them and the batch has none, no ratio is reported.

        Args:
            batch: A micro-batch with `token_weights` and advantages.
            logprobs: The policy's log-probs with gradient, nats [T].
            entropy: Entropies, nats [T]; None if they were not computed. An entropy bonus needs them.
            mini_batch_tokens: Number of loss tokens of the whole mini-batch. The micro-batch's weight in the metrics is
                its own number of loss tokens divided by this.
            metrics: Receives policy/*, mismatch/* and rollout/*.

        Returns:
            The loss of this micro-batch [].
        """
        mask, weights = batch.loss_mask, batch.token_weights
        assert weights is not None, "assign_loss_weights comes before the update"
        tensors = _tensors(batch, logprobs)
        old_logprobs = tensors["old_logprobs"]
        assert old_logprobs is not None
        values, clipped = self.compute_token_losses(batch, logprobs, tensors)
        policy_loss = (values * weights).sum()
        terms = [policy_loss]
        token_sums = {"policy/clip_ratio": clipped}
        if self.kl_estimator is not None:
            assert batch.ref_logprobs is not None, "a KL term in the loss needs the reference model's log-probs"
            kl = self.kl_estimator(
                logprobs, batch.ref_logprobs, mask, **select_keyword_arguments(self.kl_estimator, tensors)
            )
            terms.append(self.kl_loss_coef * (kl * weights).sum())
            token_sums["policy/kl"] = kl.detach()
        if entropy is not None:
            entropy = torch.where(mask, entropy, 0.0)
            token_sums["policy/entropy"] = entropy.detach()
        if self.entropy_loss_coef is not None:
            assert entropy is not None, "an entropy bonus needs the entropy"
            terms.append(-self.entropy_loss_coef * (entropy * weights).sum())
        loss = torch.stack(terms).sum()
        with torch.no_grad():
            losses = {"policy/policy_loss": policy_loss, "policy/loss": loss}
            maxima = {}
            if batch.old_logprobs is not None or self.needs_old_logprobs:
                ratio = torch.where(mask, importance_ratios(logprobs, old_logprobs, mask), 0.0)
                token_sums["policy/ratio"] = maxima["policy/ratio_max"] = ratio
            if batch.rollout_logprobs is not None and self.report_mismatch:
                ratio = torch.where(mask, importance_ratios(old_logprobs, batch.rollout_logprobs, mask), 0.0)
                token_sums["mismatch/ratio_mean"] = maxima["mismatch/ratio_max"] = ratio
                token_sums["mismatch/kl"] = k3(batch.rollout_logprobs, old_logprobs, mask)
            _record(batch, old_logprobs, losses, token_sums, maxima, mini_batch_tokens, metrics)
        return loss

    def compute_token_losses(
        self, batch: TrainBatch, logprobs: Tensor, tensors: Mapping[str, Tensor | None] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the policy loss of each token times its importance weight [T], and 1 where it was clipped [T].

        Args:
            batch: A batch with advantages.
            logprobs: The policy's log-probs, nats [T].
            tensors: The values of POLICY_LOSS_TENSORS by name; by default those of the batch.
        """
        advantages = batch.token_advantages
        assert advantages is not None, "advantages are computed before the loss"
        arguments = select_keyword_arguments(
            self.policy_loss, _tensors(batch, logprobs) if tensors is None else tensors
        )
        values, clipped = self.policy_loss(logprobs, advantages, batch.loss_mask, **arguments)
        if batch.importance_weights is not None:
            values = values * torch.where(batch.loss_mask, batch.importance_weights, 0.0)
        return values, clipped


def _tensors(batch: TrainBatch, logprobs: Tensor) -> dict[str, Tensor | None]:
    """Return the tensors of POLICY_LOSS_TENSORS by name."""
    frozen = logprobs.detach()
    return {
        "frozen_logprobs": frozen,
        "old_logprobs": frozen if batch.old_logprobs is None else batch.old_logprobs,
        "rollout_logprobs": batch.rollout_logprobs,
        "sequence_ids": batch.sequence_ids,
        "selected": batch.selected,
    }


def _record(
    batch: TrainBatch,
    old_logprobs: Tensor,
    losses: dict[str, Tensor],
    token_sums: dict[str, Tensor],
    maxima: dict[str, Tensor],
    mini_batch_tokens: int,
    metrics: Metrics,
) -> None:
    """Record means weighted by tokens, and losses that sum to the loss of the mini-batch.

    rollout/* compares the engine's log-probs with the trainer's for the same tokens; importance ratios absorb the
    difference.
    """
    mask = batch.loss_mask
    sums = {name: per_token.sum() for name, per_token in token_sums.items()}
    if batch.rollout_logprobs is not None:
        mismatch = torch.where(mask, batch.rollout_logprobs - old_logprobs, 0.0)
        sums["rollout/logprob_diff"] = mismatch.abs().sum()
        sums["rollout/kl"] = k3(batch.rollout_logprobs, old_logprobs, mask).sum()
        maxima["rollout/logprob_diff_max"] = mismatch.abs()
    numbers = [mask.sum(), *losses.values(), *sums.values(), *(per_token.max() for per_token in maxima.values())]
    # Only names: until the metrics are read, a tensor would keep the graph of its micro-batch in memory.
    loss_names, sum_names, maximum_names = [*losses], [*sums], [*maxima]

    def record(computed: list[float]) -> None:
        tokens, *values = computed
        if not tokens:
            return
        remaining = iter(values)
        for name in loss_names:
            metrics.add_sum(name, next(remaining), weight=tokens / mini_batch_tokens)
        for name in sum_names:
            metrics.add_sum(name, next(remaining), weight=tokens)
        for name in maximum_names:
            metrics.update_max(name, next(remaining))

    metrics.defer(torch.stack([number.double() for number in numbers]), record)
