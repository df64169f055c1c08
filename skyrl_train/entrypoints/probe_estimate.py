"""Estimates of the time of a training step and of a whole run, made from a few measured steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import numpy as np

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.trainer.trainer import StepSchedule

PHASES = ("generate", "score", "update", "publish")
"""The phases of a step that have a clock of their own: timing/{phase}_s."""
REST = "rest"
_FIXED = "publish"
"""The phase whose time does not depend on the number of prompts."""


@dataclass(frozen=True)
class MeasuredStep:
    """The measurements of one step."""

    prompts: int
    row: Mapping[str, float]
    """The step's metrics."""


@dataclass(frozen=True)
class StepEstimate:
    """Estimated times of a step with `prompts` prompts."""

    prompts: int
    seconds: Mapping[str, float]
    """Seconds by phase. REST is the time outside of all phases."""
    step_s: float
    scaled: bool
    """True if the estimate is extrapolated from steps with other numbers of prompts."""


def estimate_step(
    steps: Sequence[MeasuredStep], prompts: int, optimizer_steps: int, *, ahead: bool = False
) -> StepEstimate:
    """Estimate the times of a step.

    If steps of that size were measured, each phase is their median, or their mean where rollouts run ahead, because
    slow and fast steps alternate there. Otherwise each phase is `a * n + b * tokens`, fitted to all steps with a, b >=
    0, where n is the number of optimizer steps for updates and 1 for other phases. A weight sync takes the same time
    for any size.

    Args:
        steps: The measured steps; at least one.
        prompts: Number of prompts of the step.
        optimizer_steps: Number of optimizer steps of the step.
        ahead: True if rollouts run ahead of training.
    """
    same_size = [step.row for step in steps if step.prompts == prompts]
    if same_size:
        average = fmean if ahead else median
        seconds = {phase: average([_seconds(row, phase) for row in same_size]) for phase in PHASES}
        step_s = average([_seconds(row, "step") for row in same_size])
        return StepEstimate(prompts, seconds | {REST: max(0.0, step_s - sum(seconds.values()))}, step_s, False)
    rows = [step.row for step in steps]
    tokens = fmean(step.row["rollouts/tokens"] / step.prompts for step in steps) * prompts
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
    """Fit the seconds per count and per token. Steps of about one size only show the seconds per token."""
    if max(tokens) < 1.5 * min(tokens):
        return 0.0, sum(values) / sum(tokens)
    return fit_non_negative(list(zip(counts, tokens, strict=True)), values)


@dataclass(frozen=True)
class RunEstimate:
    """Estimated times of a complete run without its checkpoints and exports."""

    steps: int
    step_s: float
    evaluations: int
    evaluation_s: float
    start_s: float
    full_steps: float
    """Number of steps, where a shorter one at the end of an epoch counts as the fraction that it is."""

    @property
    def seconds(self) -> float:
        """Seconds of the complete run."""
        return self.start_s + self.full_steps * self.step_s + self.evaluations * self.evaluation_s


def estimate_run(
    schedule: StepSchedule, trainer: TrainerConfig, step_s: float, evaluation_s: float, start_s: float
) -> RunEstimate:
    """Estimate the times of a complete run.

    Args:
        schedule: The run's schedule.
        trainer: The settings of training, for the number of evaluations.
        step_s: Seconds of a complete step.
        evaluation_s: Seconds of one evaluation; 0 if there is none.
        start_s: Seconds before the first step.
    """
    steps = schedule.total_steps
    prompts = sum(map(schedule.num_prompts_in_step, range(steps)))
    evaluations = sum(schedule.is_due(trainer.eval_interval, step) for step in range(1, steps + 1))
    evaluations += trainer.eval_before_train
    whole = prompts / max(1, schedule.num_prompts_in_step(0))
    return RunEstimate(steps, step_s, evaluations if evaluation_s else 0, evaluation_s, start_s, whole)


def fit_non_negative(columns: Sequence[tuple[float, float]], values: Sequence[float]) -> tuple[float, float]:
    """Fit values as a non-negative combination of two columns by least squares.

    Args:
        columns: The two values of each row.
        values: The value to fit for each row.

    Returns:
        The two coefficients.
    """
    table, target = np.asarray(columns, dtype=float), np.asarray(values, dtype=float)
    coefficients = np.linalg.lstsq(table, target, rcond=None)[0]
    for negative in range(2):
        if coefficients[negative] < 0:
            other = 1 - negative
            coefficients[negative] = 0.0
            coefficients[other] = max(0.0, (table[:, other] @ target) / (table[:, other] @ table[:, other]))
            break
    return float(coefficients[0]), float(coefficients[1])
