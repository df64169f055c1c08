"""Estimates of the time of a training step and of a whole run, made from a few measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.trainer.trainer import StepSchedule

PHASES = ("generate", "score", "update", "publish")
"""The parts of a step that have a clock of their own: timing/{phase}_s."""
REST = "rest"
_FIXED = "publish"
"""The phase that takes as long for any number of prompts."""


@dataclass(frozen=True)
class MeasuredStep:
    """A step that was taken."""

    prompts: int
    row: Mapping[str, float]
    """Its metrics."""


@dataclass(frozen=True)
class StepEstimate:
    """A step of `prompts` prompts."""

    prompts: int
    seconds: Mapping[str, float]
    """By phase; REST is what is in none of them."""
    step_s: float
    scaled: bool
    """True if the measured steps had fewer prompts."""


def estimate_step(
    steps: Sequence[MeasuredStep], prompts: int, optimizer_steps: int, *, ahead: bool = False
) -> StepEstimate:
    """The step of `prompts` prompts, with so many optimizer steps.

    Steps of that size are taken as they are: the median of each clock, or the mean where rollouts run ahead, as steps
    are slow and fast in turn there. Without one, each phase is `a * n + b * tokens`
    with what fits the steps best, a and b not below 0: n is the number of optimizer steps for updates, 1 for the
    others; a weight sync takes as long for any number.
    """
    alike = [one.row for one in steps if one.prompts == prompts]
    if alike:
        usual = fmean if ahead else median
        seconds = {phase: usual([_seconds(row, phase) for row in alike]) for phase in PHASES}
        step_s = usual([_seconds(row, "step") for row in alike])
        return StepEstimate(prompts, seconds | {REST: max(0.0, step_s - sum(seconds.values()))}, step_s, False)
    rows = [one.row for one in steps]
    tokens = fmean(one.row["rollouts/tokens"] / one.prompts for one in steps) * prompts
    scaled = {}
    for phase in (*PHASES, REST):
        values = [_seconds(row, phase) for row in rows]
        if phase == _FIXED:
            scaled[phase] = median(values)
            continue
        counts = [row.get("policy/optimizer_steps", 1.0) if phase == "update" else 1.0 for row in rows]
        per_count, per_token = _line(counts, [row["rollouts/tokens"] for row in rows], values)
        scaled[phase] = per_count * (optimizer_steps if phase == "update" else 1) + per_token * tokens
    return StepEstimate(prompts, scaled, sum(scaled.values()), True)


def _seconds(row: Mapping[str, float], phase: str) -> float:
    if phase == REST:
        return max(0.0, _seconds(row, "step") - sum(_seconds(row, other) for other in PHASES))
    return row.get(f"timing/{phase}_s", 0.0)


def _line(counts: Sequence[float], tokens: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Seconds for each of the counts, and for each token; steps of about one size show those for tokens alone."""
    if max(tokens) < 1.5 * min(tokens):
        return 0.0, sum(values) / sum(tokens)
    return fit_non_negative(list(zip(counts, tokens, strict=True)), values)


@dataclass(frozen=True)
class RunEstimate:
    """A whole run, without its checkpoints and exports."""

    steps: int
    step_s: float
    evaluations: int
    evaluation_s: float
    start_s: float
    full_steps: float
    """Steps, a shorter one at the end of an epoch counted as the part that it is."""

    @property
    def seconds(self) -> float:
        return self.start_s + self.full_steps * self.step_s + self.evaluations * self.evaluation_s


def estimate_run(
    schedule: StepSchedule, trainer: TrainerConfig, step_s: float, evaluation_s: float, start_s: float
) -> RunEstimate:
    """`evaluation_s`: of one evaluation; `start_s`: before the first step."""
    steps = schedule.total_steps
    prompts = sum(map(schedule.num_prompts_in_step, range(steps)))
    evaluations = sum(schedule.is_due(trainer.eval_interval, step) for step in range(1, steps + 1))
    evaluations += trainer.eval_before_train
    whole = prompts / max(1, schedule.num_prompts_in_step(0))
    return RunEstimate(steps, step_s, evaluations if evaluation_s else 0, evaluation_s, start_s, whole)


def fit_non_negative(columns: Sequence[tuple[float, float]], values: Sequence[float]) -> tuple[float, float]:
    """Return the two coefficients, neither below 0, that fit the values best as a sum of the two columns."""
    table, target = np.asarray(columns, dtype=float), np.asarray(values, dtype=float)
    found = np.linalg.lstsq(table, target, rcond=None)[0]
    for negative in range(2):
        if found[negative] < 0:
            kept = 1 - negative
            found[negative] = 0.0
            found[kept] = max(0.0, (table[:, kept] @ target) / (table[:, kept] @ table[:, kept]))
            break
    return float(found[0]), float(found[1])
