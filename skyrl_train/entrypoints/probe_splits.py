"""Compares splits of a run's slots between engines and trainers, from the steps that a probe measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from skyrl_train.config.keys import replace_value
from skyrl_train.config.predicates import (
    RunComponents,
    count_run_slots,
    gpus_per_engine,
    max_staleness_steps,
    num_ranks,
)
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints.plan_report import align_columns
from skyrl_train.entrypoints.probe_estimate import PHASES, MeasuredStep, fit_non_negative
from skyrl_train.experiment.memory_tuning import fits_in_memory

_MIN_ROWS = 3
"""Minimum number of steps for fitting the time of a decode step."""
_MIN_SPREAD = 0.005
"""Relative spread below which several steps give no more information than one."""
_PARTS = 4
"""Engines get a quarter, a half and three quarters of the slots."""
Keys = list[tuple[str, Any]]
"""Configuration keys, each with its value."""


@dataclass(frozen=True)
class Split:
    """A split of slots between engines and trainers."""

    engines: int
    trainers: int
    max_staleness_steps: int = 0
    """Number of steps by which rollouts run ahead; 0 is synchronous."""
    colocate_all: bool = False
    """True if engines and trainers are colocated: they share slots and work one after the other."""

    def __str__(self) -> str:
        return f"{self.engines} colocated" if self.colocate_all else f"{self.engines} : {self.trainers}"


@dataclass(frozen=True)
class SplitEstimate:
    """Estimated seconds of a training step with a split."""

    split: Split
    generate_s: float
    train_s: float
    """Scoring and updating."""
    step_s: float


@dataclass(frozen=True)
class Comparison:
    """Estimates for several splits of the same slots."""

    estimates: list[SplitEstimate]
    """The configured split comes first."""
    prompts: int
    """Prompts of the steps that the estimates are made from."""
    keys: list[str]
    """`key=value` pairs that configure the fastest split; empty if it is the configured one."""
    proportional_reason: str | None
    """The reason why generation is assumed to scale with the number of engines; None if a decode step was fitted."""


def compare_splits(cfg: Config, steps: Sequence[MeasuredStep], response_lengths: Sequence[int]) -> Comparison | None:
    """Compare splits of the configured slots.

    The candidates are all slots colocated, and a quarter, a half and three quarters of the slots for engines, both
    synchronous and running ahead by the configured number of steps, or one. Candidates are skipped if the
    configuration's other keys rule them out, if they do not fit into memory, or if they need more slots.

    Args:
        cfg: The configuration that was probed.
        steps: The measured steps; those with the most prompts are used.
        response_lengths: Tokens of each response of one step.

    Returns:
        The comparison, or None if there is nothing to compare.
    """
    configured = configured_split(cfg)
    candidates: list[tuple[Split, Keys]] = [(configured, [])]
    candidates += [(split, keys_of(cfg, split)) for split in _splits(cfg) if split != configured]
    possible = [(split, keys) for split, keys in candidates if not keys or _is_possible(cfg, _changed(cfg, keys))]
    if len(possible) < 2:
        return None
    prompts = max(step.prompts for step in steps)
    rows = [step.row for step in steps if step.prompts == prompts]
    reason = _why_not_fitted(cfg, rows)
    decode = _proportional(cfg, rows) if reason is not None else _decode_step(cfg, rows, response_lengths)
    estimates = [_estimate(cfg, rows, decode, split) for split, _ in possible]
    fastest = min(range(len(estimates)), key=lambda index: estimates[index].step_s)
    keys = [f"{key}={_shown(value)}" for key, value in possible[fastest][1]]
    return Comparison(estimates, prompts, keys, reason)


def table(comparison: Comparison) -> Iterator[str]:
    """Yield the lines of a table with the estimated step time of every split. A "<" marks the fastest split."""
    fastest = min(comparison.estimates, key=lambda estimate: estimate.step_s)
    rows = [["", "staleness", "generate, s", "train, s", "step, s", ""]]
    for estimate in comparison.estimates:
        seconds = [f"{value:.3g}" for value in (estimate.generate_s, estimate.train_s, estimate.step_s)]
        rows.append(
            [str(estimate.split), str(estimate.split.max_staleness_steps), *seconds, "<" if estimate is fastest else ""]
        )
    return align_columns(rows, 1)


def _estimate(
    cfg: Config, rows: Sequence[Mapping[str, float]], decode: tuple[float, float], split: Split
) -> SplitEstimate:
    """Estimate a step: the phases add up, except that generation overlaps with training where rollouts run ahead.

    The longest response then has the time of `max_staleness_steps + 1` steps. Scoring and updating scale with the
    number of trainers. A colocated step is assumed to spend the time outside of its phases on offloading models, which
    a split without colocation does not do.
    """
    configured = configured_split(cfg)
    step_s, per_sequence_s = decode
    longest, tokens = _mean(rows, "response/max_tokens"), _mean(rows, "rollouts/tokens")
    generate_s = step_s * longest / (1 + split.max_staleness_steps) + per_sequence_s * tokens / split.engines
    train_s = (_mean(rows, "timing/score_s") + _mean(rows, "timing/update_s")) * configured.trainers / split.trainers
    publish_s = _mean(rows, "timing/publish_s")
    rest_s = max(0.0, _mean(rows, "timing/step_s") - sum(_mean(rows, f"timing/{phase}_s") for phase in PHASES))
    if configured.colocate_all and not split.colocate_all:
        rest_s = 0.0
    overlapping = max(generate_s, train_s + rest_s) if split.max_staleness_steps else generate_s + train_s + rest_s
    return SplitEstimate(split, generate_s, train_s, overlapping + publish_s)


def _decode_step(
    cfg: Config, rows: Sequence[Mapping[str, float]], response_lengths: Sequence[int]
) -> tuple[float, float]:
    """Fit the seconds of a decode step, and those that each sequence of the batch adds to it.

    All sequences of a synchronous step begin at once. So generation has as many decode steps as the longest response
    has tokens, and the batches of an engine add up to its tokens: `generate_s = a * longest + b * tokens / engines`. A
    response of n tokens takes n decode steps, whose batches add up to the sum of min(length, n) over the m responses of
    its engine: on average `response_s = a * mean + b * (mean + (m - 1) * shorter)`, where `shorter` is the mean of the
    shorter one of two responses.
    """
    engines = cfg.generator.num_inference_engines
    ratio = _mean_of_shorter(response_lengths) / fmean(response_lengths)
    columns, seconds = [], []
    for row in rows:
        mean, each = row["response/mean_tokens"], row["rollouts/trajectories"] / engines
        columns += [(row["response/max_tokens"], row["rollouts/tokens"] / engines)]
        columns += [(mean, mean * (1 + (each - 1) * ratio))]
        seconds += [row["timing/generate_s"], row["timing/response_s"]]
    return fit_non_negative(columns, seconds)


def _mean_of_shorter(lengths: Sequence[int]) -> float:
    """Return the mean of the shorter one over all pairs of responses."""
    ordered, count = sorted(lengths), len(lengths)
    return 2 * sum(length * (count - 1 - index) for index, length in enumerate(ordered)) / (count * (count - 1))


def _proportional(cfg: Config, rows: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Return the coefficients of `_decode_step` for generation that scales with the number of engines."""
    busy_s = _mean(rows, "timing/generate_s")
    if cfg.trainer.fully_async.enabled:
        busy_s = fmean(row["timing/step_s"] * (1 - row.get("async/engines_idle", 0.0)) for row in rows)
    return 0.0, busy_s * cfg.generator.num_inference_engines / _mean(rows, "rollouts/tokens")


def _why_not_fitted(cfg: Config, rows: Sequence[Mapping[str, float]]) -> str | None:
    """Return why these steps do not show how long a decode step takes; None if they do."""
    generator = cfg.generator
    has_wide_engines = gpus_per_engine(generator) * generator.inference_engine_data_parallel_size > 1
    per_engine = max(row["rollouts/trajectories"] for row in rows) / generator.num_inference_engines
    is_queued = per_engine > generator.max_num_seqs
    per_longest = [row["rollouts/tokens"] / max(1.0, row["response/max_tokens"]) for row in rows]
    is_uniform = pstdev(per_longest) <= _MIN_SPREAD * fmean(per_longest)
    reasons = {
        "there were too few steps of one size": len(rows) < _MIN_ROWS,
        "the run is asynchronous": cfg.trainer.fully_async.enabled,
        "its engines have several accelerators each": has_wide_engines,
        "its episodes have several turns": any(row.get("episode/max_turns", 1) > 1 for row in rows),
        "it sampled groups that no step trained on": any(
            row.get("sampling/dropped") or row.get("sampling/cancelled") for row in rows
        ),
        "its engines had more sequences than run at a time (generator.max_num_seqs)": is_queued,
        "its responses are equally long, or equally distributed in each step": is_uniform,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def configured_split(cfg: Config) -> Split:
    """Return how the configuration splits the run's accelerators between engines and trainer."""
    placement = cfg.trainer.placement
    trainers, staleness = num_ranks(placement, "policy"), max_staleness_steps(cfg.trainer)
    return Split(cfg.generator.num_inference_engines, trainers, staleness, colocate_all=placement.colocate_all)


def _splits(cfg: Config) -> Iterator[Split]:
    configured, slots_per_engine = configured_split(cfg), gpus_per_engine(cfg.generator)
    slots = max(configured.engines * slots_per_engine, configured.trainers)
    if not configured.colocate_all:
        slots = configured.engines * slots_per_engine + configured.trainers
    yield Split(max(1, slots // slots_per_engine), slots, colocate_all=True)
    max_engines = (slots - 1) // slots_per_engine
    engine_counts = (
        {max(1, round(slots * quarter / _PARTS / slots_per_engine)) for quarter in range(1, _PARTS)}
        if max_engines
        else set()
    )
    for engines in sorted({min(count, max_engines) for count in engine_counts}):
        split = Split(engines, slots - engines * slots_per_engine)
        yield split
        yield replace(split, max_staleness_steps=configured.max_staleness_steps or 1)


def keys_of(cfg: Config, split: Split) -> Keys:
    """Return the keys that configure this split."""
    nodes = cfg.trainer.placement.policy_num_nodes
    if split.trainers % nodes:
        nodes = 1
    keys: Keys = [
        ("generator.num_inference_engines", split.engines),
        ("trainer.placement.policy_num_nodes", nodes),
        ("trainer.placement.policy_num_gpus_per_node", split.trainers // nodes),
        ("trainer.placement.colocate_all", split.colocate_all),
        ("trainer.fully_async.enabled", split.max_staleness_steps > 0),
    ]
    if split.max_staleness_steps:
        keys.append(("trainer.fully_async.max_staleness_steps", split.max_staleness_steps))
    return keys


def _is_possible(cfg: Config, changed: Config) -> bool:
    """True if a run accepts the changed configuration, it fits into memory, and it needs no more slots.

    Models that no longer share the policy's slots need their own.
    """
    if (
        validate(changed, allow_unregistered_names=True)
        or count_run_slots(changed, RunComponents()).total > count_run_slots(cfg, RunComponents()).total
    ):
        return False
    return fits_in_memory(changed)


def _changed(cfg: Config, keys: Keys) -> Config:
    for key, value in keys:
        cfg = replace_value(cfg, key, value)
    return cfg


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _mean(rows: Sequence[Mapping[str, float]], name: str) -> float:
    return fmean(row.get(name, 0.0) for row in rows)
