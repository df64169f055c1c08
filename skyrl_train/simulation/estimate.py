"""What a step and a run will take, from a few steps that were measured; and how to divide the slots for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from skyrl_train.assembly.memory_fit import fits
from skyrl_train.config.hydra import plain
from skyrl_train.config.keys import with_value_at
from skyrl_train.config.presence import Uses, slots_of
from skyrl_train.config.schema import Config
from skyrl_train.config.slots import slots_per_engine
from skyrl_train.config.validate import validate
from skyrl_train.simulation.fit import non_negative, timings_by_throughput, timings_of, unclear
from skyrl_train.simulation.run import Outcome, Split, least_steps, simulate
from skyrl_train.trainer.loop import Intervals
from skyrl_train.trainer.schedule import StepSchedule

PHASES = ("generate", "score", "update", "publish")
"""The parts of a step that have a clock of their own: timing/{phase}_s."""
REST = "rest"
_FIXED = "publish"
"""The phase that takes as long for any number of prompts."""
_LEAST_ROWS = 3
"""Steps, with fewer of which the time of a decode step is not fitted."""
_MOST_DIVISIONS = 3
Keys = list[tuple[str, Any]]
"""Keys of the configuration, each with its value."""


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
    """Whether the steps that were measured had fewer prompts."""


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
    return non_negative(list(zip(counts, tokens, strict=True)), values)


@dataclass(frozen=True)
class RunEstimate:
    """A whole run, without its checkpoints and exports."""

    steps: int
    step_s: float
    evaluations: int
    evaluation_s: float
    start_s: float
    whole_steps: float
    """Steps, a shorter one at the end of an epoch counted as the part that it is."""

    @property
    def seconds(self) -> float:
        return self.start_s + self.whole_steps * self.step_s + self.evaluations * self.evaluation_s


def estimate_run(
    schedule: StepSchedule, intervals: Intervals, step_s: float, evaluation_s: float, start_s: float
) -> RunEstimate:
    """`evaluation_s`: of one evaluation; `start_s`: before the first step."""
    steps = schedule.total_steps
    prompts = sum(map(schedule.prompts_of_step, range(steps)))
    evaluations = sum(intervals.due(intervals.evaluate, step) for step in range(1, steps + 1))
    evaluations += intervals.evaluate_before
    whole = prompts / max(1, schedule.prompts_of_step(0))
    return RunEstimate(steps, step_s, evaluations if evaluation_s else 0, evaluation_s, start_s, whole)


@dataclass(frozen=True)
class Division:
    """Slots divided between engines and trainers, simulated with what was measured."""

    outcomes: list[Outcome]
    """The division that was measured is the first."""
    keys: list[str]
    """`key=value`: what to set for the fastest."""
    assumed: str | None
    """Why engines were taken to be limited by tokens alone; None if what a decode step takes was fitted."""


def divide_slots(cfg: Config, steps: Sequence[MeasuredStep]) -> Division | None:
    """Compare divisions of the configuration's slots; None where there is nothing to divide.

    Tried are all slots colocated, and about a quarter, a half and three quarters of them for engines, synchronous and
    ahead: one step, or as far as configured. Left out is what the configuration's other keys do not allow, and what
    needs more slots.
    """
    asked = asked_split(cfg)
    tried: list[tuple[Split, Keys]] = [(asked, [])]
    tried += [(one, keys_of(cfg, one)) for one in _splits(cfg) if one != asked]
    allowed = [(one, keys) for one, keys in tried if not keys or _is_possible(cfg, _changed(cfg, keys))]
    if len(allowed) < 2:
        return None
    most = max(one.prompts for one in steps)
    rows = [one.row for one in steps if one.prompts == most]
    of_size = with_value_at(cfg, "trainer.train_batch_size", most)
    ran = plain(of_size)
    why_not = unclear(rows, ran) if len(rows) >= _LEAST_ROWS else "there were too few steps of one size"
    timings = timings_of(rows, ran) if why_not is None else timings_by_throughput(rows, ran)
    outcomes = [simulate(of_size, timings, one, least_steps(one.staleness)) for one, _ in allowed]
    best = max(range(len(outcomes)), key=lambda index: outcomes[index].steps_per_hour)
    return Division(outcomes, [f"{key}={_shown(value)}" for key, value in allowed[best][1]], why_not)


def _is_possible(cfg: Config, changed: Config) -> bool:
    """Whether a run accepts it, it fits into memory as planned, and it needs no more slots: models that no longer share
    the policy's have their own."""
    if validate(changed, open_to_names=True) or slots_of(changed, Uses()).total > slots_of(cfg, Uses()).total:
        return False
    return fits(changed)


def asked_split(cfg: Config) -> Split:
    """The division that is configured."""
    placement, ahead = cfg.trainer.placement, cfg.trainer.fully_async
    trainers = placement.policy_num_nodes * placement.policy_num_gpus_per_node
    staleness = ahead.max_staleness_steps if ahead.enabled else 0
    return Split(
        cfg.generator.num_inference_engines,
        trainers,
        staleness,
        over_provisioning=cfg.generator.over_provisioning,
        colocated=placement.colocate_all,
    )


def _splits(cfg: Config) -> Iterator[Split]:
    asked, stride = asked_split(cfg), slots_per_engine(cfg.generator)
    slots = max(asked.engines * stride, asked.trainers)
    if not asked.colocated:
        slots = asked.engines * stride + asked.trainers
    extra = asked.over_provisioning
    yield Split(max(1, slots // stride), slots, over_provisioning=extra, colocated=True)
    most = (slots - 1) // stride
    parts = range(1, _MOST_DIVISIONS + 1)
    for engines in sorted({max(1, round(slots * part / (len(parts) + 1) / stride)) for part in parts if most}):
        apart = Split(min(engines, most), slots - min(engines, most) * stride)
        yield replace(apart, over_provisioning=extra)
        yield replace(apart, staleness=asked.staleness or 1)


def keys_of(cfg: Config, split: Split) -> Keys:
    """What the configuration has this division with."""
    keys: Keys = [
        ("generator.num_inference_engines", split.engines),
        ("trainer.placement.policy_num_nodes", 1),
        ("trainer.placement.policy_num_gpus_per_node", split.trainers),
        ("trainer.placement.colocate_all", split.colocated),
        ("trainer.fully_async.enabled", split.staleness > 0),
    ]
    nodes = cfg.trainer.placement.policy_num_nodes
    if split.trainers % nodes == 0:
        keys[1:3] = [(keys[1][0], nodes), (keys[2][0], split.trainers // nodes)]
    if split.staleness:
        keys.append(("trainer.fully_async.max_staleness_steps", split.staleness))
    return keys


def _changed(cfg: Config, keys: Keys) -> Config:
    for key, value in keys:
        cfg = with_value_at(cfg, key, value)
    return cfg


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
