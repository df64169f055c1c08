"""Formats a probe's result as lines of text: seconds, hours, and keys to set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, median, quantiles

from skyrl_train.config.schema import Config
from skyrl_train.entrypoints.plan_report import align_columns
from skyrl_train.entrypoints.probe import LIMIT, MicroBatchTiming, ProbeResult
from skyrl_train.entrypoints.probe_estimate import (
    PHASES,
    REST,
    RunEstimate,
    StepEstimate,
    estimate_run,
    estimate_step,
)
from skyrl_train.entrypoints.probe_splits import Comparison, compare_splits, table
from skyrl_train.experiment.run_resources import build_schedule

_MIN_SPEEDUP = 1.05
"""Minimum speedup for which a setting is suggested. Less is noise."""
_NAMES = {"publish": "weight sync", REST: "the rest"}


def probe_lines(cfg: Config, result: ProbeResult) -> Iterator[str]:
    """Yield the lines of a probe's report."""
    step = estimated_step(cfg, result)
    yield ""
    size = f"{result.prompts:,} prompts"
    if step.scaled:
        sizes = ", ".join(f"{count:,}" for count in sorted({measured.prompts for measured in result.steps}))
        size = f"{size}, scaled from steps of {sizes}, because a complete step would not fit the time"
    yield (
        f"probe: {len(result.steps)} of {result.num_steps} steps count; all steps took {result.steps_took_s:.1f} s. "
        f"Estimate for a step of {size}:"
    )
    yield from _step_lines(cfg, result, step)
    yield from _timing_lines(cfg, result, step)
    yield ""
    yield from _split_lines(compare_splits(cfg, result.steps, result.responses))


def estimated_step(cfg: Config, result: ProbeResult) -> StepEstimate:
    """Return the estimate of a complete step of the run."""
    updates = -(-result.prompts // cfg.trainer.policy_mini_batch_size) * cfg.trainer.update_epochs_per_batch
    return estimate_step(result.steps, result.prompts, updates, ahead=cfg.trainer.fully_async.enabled)


def estimated_run(cfg: Config, result: ProbeResult, step: StepEstimate) -> RunEstimate:
    """Return the estimate of the time of the complete run.

    An evaluation is assumed to sample as many tokens per answer, and as fast, as training.

    Args:
        cfg: The configuration of the complete run.
        result: The result of the probe, with its metrics and its start-up time.
        step: The estimate of one training step.
    """
    schedule = build_schedule(cfg.trainer, len(result.dataset))
    answers = result.eval_answers
    evaluation_s = answers * _mean(result, "response/mean_tokens") / max(_tokens_per_s(result), 1e-9)
    return estimate_run(schedule, cfg.trainer, step.step_s, evaluation_s, result.start_s)


def _step_lines(cfg: Config, result: ProbeResult, step: StepEstimate) -> Iterator[str]:
    run = estimated_run(cfg, result, step)
    notes = {"generate": f"{_tokens_per_s(result):,.0f} tokens/s on all engines; {_answers(result)}"}
    lines = [["", "s per step", "share", ""]]
    for phase in (*PHASES, REST):
        seconds = step.seconds[phase]
        share = f"{seconds / step.step_s:.0%}"
        lines.append([_NAMES.get(phase, phase), f"{seconds:.3g}", share, notes.get(phase, "")])
    lines.append(["step", f"{step.step_s:.3g}", "", ""])
    yield from align_columns(lines, 1)
    parts = [f"{run.start_s:.0f} s to start", f"{run.steps:,} steps"]
    if run.evaluations:
        parts.append(f"{run.evaluations:,} evaluations of {run.evaluation_s:.3g} s")
    yield f"the run: {_duration(run.seconds)} ({', '.join(parts)}), without checkpoints and exports"


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} s"


def _answers(result: ProbeResult) -> str:
    lengths = sorted(result.responses)
    percentile_90 = quantiles(lengths, n=10)[-1] if len(lengths) > 1 else lengths[0]
    truncated = _mean(result, "response/truncated_fraction")
    return (
        f"answers have {fmean(lengths):,.0f} tokens on average (median {median(lengths):,.0f}, "
        f"90th percentile {percentile_90:,.0f}, maximum {lengths[-1]:,}); {truncated:.0%} reached the limit"
    )


def _timing_lines(cfg: Config, result: ProbeResult, step: StepEstimate) -> Iterator[str]:
    """Yield the timings of micro-batch sizes, and the fastest one that fits."""
    yield ""
    if len(result.timings) == 1:
        yield f"{LIMIT}: no other size was tried, because none fits or the update would depend on it"
        return
    tokens, configured = result.timed_tokens, result.timings[0]
    yield f"micro-batches: scoring and updating {tokens:,} tokens of the last step"
    lines = [[LIMIT, "s", "µs per token", "peak GiB", ""]]
    for timing in result.timings:
        name = f"{timing.limit:,}" if timing.limit else "as configured"
        row = [
            name,
            f"{timing.seconds:.3g}",
            f"{1e6 * timing.seconds / tokens:,.1f}",
            f"{timing.peak_gib or 0:.2f}",
            "",
        ]
        lines.append(row if timing.peak_gib is not None else [name, "", "", "", "DOES NOT FIT: out of memory"])
    yield from align_columns(lines, 1)
    best = best_timing(result.timings)
    if best is configured:
        yield f"{LIMIT}: leave it unchanged; no other size is {_MIN_SPEEDUP - 1:.0%} faster"
        return
    speedup = configured.seconds / best.seconds
    saved = (step.seconds["score"] + step.seconds["update"]) * (1 - 1 / speedup)
    yield f"set {LIMIT}={best.limit}: {speedup:.2f} times as fast, saves {saved:.3g} s per step"


def best_timing(timings: list[MicroBatchTiming]) -> MicroBatchTiming:
    """Return the fastest timing, or the configured one, which is the first, unless another is clearly faster."""
    best = min(timings, key=lambda timing: timing.seconds)
    return best if timings[0].seconds >= _MIN_SPEEDUP * best.seconds else timings[0]


def _split_lines(comparison: Comparison | None) -> Iterator[str]:
    if comparison is None:
        yield "engines : trainers: no other split, because there is one slot or the configuration allows no other"
        return
    yield f"engines : trainers, estimated from steps of {comparison.prompts:,} prompts; the first is as configured"
    if comparison.proportional_reason is not None:
        yield f"Generation is assumed to scale with the number of engines, because {comparison.proportional_reason}."
    yield from table(comparison)
    fastest = min(estimate.step_s for estimate in comparison.estimates)
    if not comparison.keys or comparison.estimates[0].step_s < _MIN_SPEEDUP * fastest:
        yield f"leave the split unchanged: no other one is {_MIN_SPEEDUP - 1:.0%} faster"
    else:
        yield f"set {' '.join(comparison.keys)}"


def _tokens_per_s(result: ProbeResult) -> float:
    return _mean(result, "engines/tokens_per_s")


def _mean(result: ProbeResult, name: str) -> float:
    values = [step.row[name] for step in result.steps if name in step.row]
    return fmean(values) if values else math.nan
