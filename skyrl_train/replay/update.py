"""What an algorithm makes of a step's batch before any optimizer step: advantages, masks, and weights of tokens.

The log-probs are those that the run kept, so this is an update's very first pass: the policy has not moved, and ratios
to it are 1. What a ratio would clip later depends on where the optimizer goes, which no data tells.

Legend: T tokens, E samples.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skyrl_train.algorithms.advantage_step import TENSORS, AdvantageStep
from skyrl_train.algorithms.advantages import compared
from skyrl_train.algorithms.correction_step import OffPolicyCorrection
from skyrl_train.algorithms.corrections import effective_sample_size
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.reductions import weigh
from skyrl_train.algorithms.registry import advantage_estimators, keywords_of
from skyrl_train.assembly.algorithm import (
    build_advantage_step,
    build_choice,
    build_correction_steps,
    build_objective,
    build_reduction,
)
from skyrl_train.config.schema import Config
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.learner.learner import Choose, mini_batch_rows
from skyrl_train.metrics import Metrics

LONGEST = 0.25
"""Share of the samples that count as the long ones."""


@dataclass(frozen=True)
class Update:
    """What an algorithm makes of a batch."""

    batch: TrainBatch
    """With advantages; with the mask and the importance weights that corrections leave."""
    mask: Tensor
    """[T] bool: the loss mask before corrections."""
    pushes: Tensor
    """[T] minus the gradient of the policy loss by the token's log-prob, summed over the mini-batches: positive where
    a step makes the token likelier. A sample's pushes are as large as its weight in the update."""
    clipped: Tensor
    """[T] share clipped in the first pass; 0 for losses whose ratio is to the policy itself."""
    clipped_by_gap: Tensor | None
    """[T] the same if the policy had moved from the engine's log-probs to the trainer's; None if that is not known."""
    mini_batches: int
    metrics: dict[str, float]
    """The run's own metrics of these steps: advantages/*, mismatch/*, correction/*, policy/kl_*."""

    def numbers(self) -> dict[str, float]:
        """What a table shows of it; see docs/replay.md."""
        batch, counts = self.batch, self.batch.loss_mask
        advantages = replace(batch, loss_mask=self.mask).token_advantages
        assert advantages is not None
        found = dict(self.metrics)
        inside = advantages[self.mask].double()
        if len(inside):
            found["advantages/std"] = float(inside.std(correction=0))
        found["tokens/trained"] = float(counts.sum())
        found["tokens/masked"] = _share(self.mask & ~counts, self.mask)
        if batch.importance_weights is not None and bool(counts.any()):
            found["importance_weights/mean"] = float(batch.importance_weights[counts].double().mean())
        found["clipped/first_pass"] = float(self.clipped[counts].double().mean()) if bool(counts.any()) else 0.0
        if self.clipped_by_gap is not None and bool(counts.any()):
            found["clipped/engine_gap"] = float(self.clipped_by_gap[counts].double().mean())
        return found | self._of_pushes(counts)

    def _of_pushes(self, counts: Tensor) -> dict[str, float]:
        pushes, each = self.pushes.double(), max(self.mini_batches, 1)
        found = {
            "pushes/up": float(pushes.clamp(min=0).sum()) / each,
            "pushes/down": float(-pushes.clamp(max=0).sum()) / each,
        }
        sizes = pushes.abs()
        episodes = self.batch.episodes
        of_samples = episodes.sums(sizes)
        groups = episodes.first(self.batch.group_ids)
        silent = [float(of_samples[groups == group].sum()) == 0 for group in groups.unique()]
        found["groups/without_push"] = sum(silent) / len(silent)
        lengths = episodes.loss_tokens
        if float(sizes.sum()) > 0:
            found["pushes/effective_tokens"] = float(effective_sample_size(sizes[counts]))
            found["pushes/effective_samples"] = float(effective_sample_size(of_samples[lengths > 0]))
            longest = lengths.argsort(descending=True, stable=True)[: max(round(LONGEST * len(lengths)), 1)]
            found["pushes/on_longest_quarter"] = float(of_samples[longest].sum() / of_samples.sum())
        return found


@dataclass
class Algorithm:
    """Advantages, corrections, loss and reduction of a configuration, as a run with it has them."""

    advantage_step: AdvantageStep
    corrections: list[OffPolicyCorrection]
    objective: PolicyObjective
    reduction: Callable[..., Tensor]
    choose: Choose | None
    mini_batch_groups: int
    name: str
    reads_values: bool
    """Whether its advantages need a critic's values, which nobody keeps."""
    compares_groups: bool
    """Whether its estimator compares only samples of one prompt; not said of a user's own, of which nobody knows."""

    @classmethod
    def of(cls, cfg: Config) -> Algorithm:
        """Raises ConfigError for a name that is not registered."""
        algorithm = cfg.trainer.algorithm
        step = build_advantage_step(algorithm)
        values = keywords_of(step.estimator).get("values")
        return cls(
            advantage_step=step,
            corrections=build_correction_steps(algorithm),
            # Entropy needs a model; KL with the reference is no part of how the policy loss weighs tokens.
            objective=replace(build_objective(algorithm), kl_estimator=None, entropy_coef=None),
            reduction=build_reduction(cfg),
            choose=build_choice(algorithm),
            mini_batch_groups=cfg.trainer.policy_mini_batch_size,
            name=f"{algorithm.advantage_estimator}, {algorithm.policy_loss_type}, {algorithm.loss_reduction}",
            reads_values=values is True or (values is False and cfg.trainer.critic.model.path is not None),
            compares_groups=compared(advantage_estimators.get(algorithm.advantage_estimator)) == "group",
        )

    def missing(self, batch: TrainBatch, *, advantages_known: bool) -> str | None:
        """What this batch lacks that the algorithm reads, in words; None if nothing."""
        wanted: dict[str, str] = {}
        if not advantages_known:
            needed = keywords_of(self.advantage_step.estimator)
            wanted |= {name: "the advantages" for name in TENSORS if needed.get(name)}
            if self.reads_values:
                wanted["values"] = "the advantages"
            if self.advantage_step.kl is not None:
                wanted |= dict.fromkeys(("old_logprobs", "ref_logprobs"), "the KL penalty on rewards")
        if self.corrections:
            wanted |= dict.fromkeys(("old_logprobs", "rollout_logprobs"), "the off-policy correction")
        if keywords_of(self.objective.policy_loss).get("rollout_logprobs"):
            wanted["rollout_logprobs"] = "the loss"
        known = {"mask", "sequence_ids", "response_lengths"}
        lacking = [name for name in wanted if name not in known and getattr(batch, name) is None]
        return f"{wanted[lacking[0]]} of {self.name} need {lacking[0]}" if lacking else None

    def __call__(self, batch: TrainBatch, advantages: Tensor | None = None, kl_coef: float | None = None) -> Update:
        """
        Args:
            batch: The step's, with the log-probs that were kept.
            advantages: [T], instead of those that the estimator gives.
            kl_coef: Coefficient of the KL penalty on rewards in this step; None goes on from the step before.

        Raises ConfigError if the batch lacks what it reads.
        """
        lacking = self.missing(batch, advantages_known=advantages is not None)
        if lacking is not None:
            raise ConfigError(f"{lacking}, which this run has not kept.")
        metrics = Metrics()
        if kl_coef is not None:
            self.advantage_step.load_state({"kl_coef": kl_coef})
        given = advantages is not None
        batch = batch.with_tokens(advantages=advantages) if given else self.advantage_step(batch, metrics)
        mask = batch.loss_mask
        for correct in self.corrections:
            batch = correct(batch, metrics)
        return self._first_pass(batch, mask, metrics)

    def _first_pass(self, batch: TrainBatch, mask: Tensor, metrics: Metrics) -> Update:
        pushes, clipped = (torch.zeros(len(batch.input_ids)) for _ in range(2))
        gap = torch.zeros_like(pushes) if self._knows_gap(batch) else None
        index = torch.arange(len(batch.input_ids))
        mini_batches = mini_batch_rows(batch, self.mini_batch_groups)
        for rows in mini_batches:
            mini = weigh(batch.select(rows), self.reduction)
            places = torch.cat([index[batch.offsets[row] : batch.offsets[row + 1]] for row in rows])
            now = _logprobs(mini)
            pushes[places], clipped[places] = self._pass(mini, now, now)
            if gap is not None:
                assert mini.rollout_logprobs is not None
                moved = mini.with_tokens(old_logprobs=mini.rollout_logprobs)
                gap[places] = self._pass(moved, now, mini.rollout_logprobs)[1]
        return Update(batch, mask, pushes, clipped, gap, len(mini_batches), metrics.flush())

    def _knows_gap(self, batch: TrainBatch) -> bool:
        known = batch.old_logprobs is not None and batch.rollout_logprobs is not None
        return known and self.objective.reads_old_logprobs

    def _pass(self, mini: TrainBatch, logprobs: Tensor, old_logprobs: Tensor) -> tuple[Tensor, Tensor]:
        """[T] minus the gradient by the log-probs, and which tokens are clipped."""
        if self.choose is not None:
            assert mini.token_advantages is not None
            mini = mini.with_tokens(selected=self.choose(logprobs, old_logprobs, mini.token_advantages, mini.loss_mask))
        leaf = logprobs.clone().requires_grad_()
        values, clipped = self.objective.per_token(mini, leaf)
        assert mini.token_weights is not None
        (gradient,) = torch.autograd.grad((values * mini.token_weights).sum(), leaf)
        return -gradient, clipped.detach().float()


def _logprobs(batch: TrainBatch) -> Tensor:
    """[T] the trainer's, or the engine's in their place, where nobody needed the trainer's in the run."""
    for known in (batch.old_logprobs, batch.rollout_logprobs):
        if known is not None:
            return known
    return torch.zeros(len(batch.input_ids))


def cosine(one: Tensor, other: Tensor) -> float | None:
    """Of two [T]: 1 if they push in the same direction; None if one pushes nothing."""
    sizes = one.double().norm() * other.double().norm()
    return float(one.double() @ other.double() / sizes) if float(sizes) > 0 else None


def _share(part: Tensor, whole: Tensor) -> float:
    return float(part.sum()) / max(int(whole.sum()), 1)
