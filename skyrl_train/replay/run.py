"""A replay: step by step through what a run kept, with its own reward and algorithm beside others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from torch import Tensor

from skyrl_train.config.schema import Config
from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.replay.answer import Answer, samples_of
from skyrl_train.replay.rewards import RewardComparison
from skyrl_train.replay.rows import KeptStep, read_step
from skyrl_train.replay.scoring import Score, Scorer, rescored, score_all, scorer_of
from skyrl_train.replay.update import Algorithm, Update, cosine
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from skyrl_train.report.rollout_files import RolloutFiles

SAID_BY_RUN = ("advantages/", "mismatch/", "correction/", "policy/kl_in_reward", "policy/kl_coef")
"""Beginnings of the names of those metrics of a run that a replay computes too."""
_KL = ("use_kl_in_reward", "kl_loss_coef", "kl_estimator_type", "kl_ctrl")
_ADVANTAGES = ("advantage_estimator", "advantage_batch_normalize", "gamma", "lambd", "grpo_norm_by_std", *_KL)


@dataclass(frozen=True)
class Question:
    """What is asked of a run."""

    run: Path
    own: Config
    """The run's configuration."""
    changed: Config
    """What it is compared with; equal to `own` if only rewards are."""
    reward: str | None = None
    """`own`, the name of an environment, or "module:function"; None leaves rewards as they were."""
    steps: Sequence[int] | None = None
    """None: all that were kept."""

    @property
    def compares(self) -> bool:
        """Whether anything is not the run's own."""
        return self.reward is not None or self.own != self.changed


async def replay(question: Question) -> Answer:
    """Raises ConfigError for a run without rollouts, or for what cannot be had of them."""
    files = RolloutFiles(question.run)
    steps = _steps(files, question)
    replayed = _Replay(question)
    async with _scorer(question) as scorer:
        for step in steps:
            try:
                kept = read_step(files, step)
            except (OSError, pa.ArrowInvalid) as error:
                raise DataError(f"{question.run}: the rollouts of step {step} cannot be read: {error}") from error
            if kept.rollouts:
                await replayed.add(kept, scorer)
    return replayed.answer


@asynccontextmanager
async def _scorer(question: Question) -> AsyncIterator[Scorer | None]:
    async with AsyncExitStack() as stack:
        given = question.reward
        yield None if given is None else await stack.enter_async_context(scorer_of(given, question.changed))


def _steps(files: RolloutFiles, question: Question) -> list[int]:
    found = files.steps()
    if not found:
        raise ConfigError(
            f"{question.run}: has no rollouts of any step; a run keeps them with trainer.keep_rollouts=all or sample."
        )
    wanted = found if question.steps is None else [step for step in question.steps if step in found]
    if not wanted:
        raise ConfigError(f"--steps: none of these is among the kept ones, {_ranges(found)}.")
    return wanted


class _Replay:
    """Adds steps to an answer."""

    def __init__(self, question: Question):
        self.question = question
        self.own, self.changed = Algorithm.of(question.own), Algorithm.of(question.changed)
        self.answer = answer = Answer(str(question.run), question.reward, self.own.name, self.changed.name)
        self.keeps_kl = _same(question, _KL)
        self.keeps_advantages = question.reward is None and _same(question, _ADVANTAGES)
        if question.reward is not None:
            answer.rewards = RewardComparison()
        self.rows = _metrics_of(question.run)
        if self.own.reads_values:
            answer.note("values", f"Advantages of {self.own.name} are the kept ones: the critic's values are not kept.")
        if not any(row.get("rollouts/trajectories") for row in self.rows.values()):
            answer.note("metrics", f"{METRICS_FILE} is not there: nothing is compared with what the run recorded.")

    async def add(self, kept: KeptStep, scorer: Scorer | None) -> None:
        """Replay a step."""
        answer, recorded = self.answer, self.rows.get(kept.step, {})
        groups, batch = kept.groups, kept.batch()
        advantages = kept.advantages(batch)
        whole = self._is_whole(kept, recorded)
        if not whole:
            answer.note("sample", _PARTLY)
        if batch.old_logprobs is None:
            answer.note("old_logprobs", _NO_OLD)
        if self.own.corrections and not kept.knows_scored:
            answer.note("scored_spans", _CORRECTED)
        coef = recorded.get("policy/kl_coef")
        old = self.own(batch, advantages if self.own.reads_values else None, coef)
        by_group = self.own.compares_groups and old.batch.advantages is None  # those of tokens are normalised over all
        if not self.own.reads_values and advantages is not None and (whole or by_group):
            self._check(old, advantages)
        if whole:
            self._check_metrics(old.metrics, recorded)
        answer.steps.append(kept.step)
        answer.old.append(old.numbers())
        new, now = None, None
        if self.question.compares:
            changed, now, scores = await self._rescored(kept, groups, batch, scorer)
            reuse = advantages if self.changed.reads_values and self.keeps_advantages else None
            new = self.changed(changed, reuse, coef if self.keeps_kl else None)
            answer.new.append(new.numbers())
            if (same := cosine(old.pushes, new.pushes)) is not None:
                answer.cosines.append(same)
            if answer.rewards is not None and scores is not None:
                answer.rewards.add(groups, now, scores)
        answer.samples.append(samples_of(kept, groups, now, old, new))

    async def _rescored(
        self, kept: KeptStep, groups: list[TrajectoryGroup], batch: TrainBatch, scorer: Scorer | None
    ) -> tuple[TrainBatch, list[TrajectoryGroup], list[Score | None] | None]:
        if scorer is None:
            return batch, groups, None
        scores = await score_all(scorer, [item for group in groups for item in group.trajectories])
        now = rescored(groups, scores, self.question.changed)
        changed, unknown = kept.rescored_batch(now, batch)
        if unknown:
            self.answer.note("unscored", _UNSCORED)
        return changed, now, scores

    def _is_whole(self, kept: KeptStep, recorded: Mapping[str, Any]) -> bool:
        """Whether all that the step trained on was kept; with dynamic sampling, dropped groups are counted as well, and
        repeated ones once. Of a step without metrics, such as one that was interrupted, only the configuration tells.
        """
        counted = recorded.get("rollouts/trajectories")
        samples = self.question.own.generator.n_samples_per_prompt
        others = recorded.get("sampling/dropped", 0) - recorded.get("sampling/repeated", 0)
        if counted is None:
            return self.question.own.trainer.keep_rollouts == "all"
        return counted == len(kept.rollouts) + samples * others

    def _check(self, old: Update, advantages: Tensor) -> None:
        """Compare with the advantages that the run kept, of the tokens that it trained on."""
        computed, counts = old.batch.token_advantages, old.batch.loss_mask
        assert computed is not None
        self.answer.tokens += int(counts.sum())
        self.answer.differing_tokens += int((computed != advantages)[counts].sum())

    def _check_metrics(self, computed: Mapping[str, float], recorded: Mapping[str, Any]) -> None:
        differing = self.answer.differing_metrics
        for name, value in computed.items():
            if name.startswith(SAID_BY_RUN) and recorded.get(name) is not None:
                self.answer.recorded += 1
                if recorded[name] != value:
                    differing[name] = differing.get(name, 0) + 1


_PARTLY = (
    "Of some steps only a part of the rollouts was kept: what is normalised over a step, and weights within a "
    "mini-batch, are those of the kept ones, which the run's were not. trainer.keep_rollouts=all keeps all of them."
)
_NO_OLD = (
    "The trainer's log-probs from before an update are not kept, as in runs of earlier versions; the engine's stand in "
    "for them, so that corrections and the gap between both show nothing."
)
_CORRECTED = (
    "Rollouts of some steps were kept by a version without scored_spans: which tokens the run's off-policy correction "
    "left out is not known, and the loss here is over those that it left in."
)
_UNSCORED = (
    "Some tokens count now that the run kept out of its loss, and so have no log-probs of the trainer; the engine's "
    "stand in for them."
)


def _same(question: Question, keys: Sequence[str]) -> bool:
    own, changed = question.own.trainer.algorithm, question.changed.trainer.algorithm
    return all(getattr(own, key) == getattr(changed, key) for key in keys)


def _metrics_of(run: Path) -> dict[int, dict[str, Any]]:
    try:
        return {row["step"]: row for row in read_jsonl(run / METRICS_FILE)}
    except FileNotFoundError:
        return {}


def _ranges(steps: Sequence[int]) -> str:
    return f"{steps[0]} to {steps[-1]} ({len(steps)} steps)" if len(steps) > 1 else f"{steps[0]}"
