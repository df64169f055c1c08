"""What a probe found, as lines for people: seconds, hours, and keys to set."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, median, quantiles

from skyrl_train.config.schema import Config
from skyrl_train.entrypoints.plan_table import aligned
from skyrl_train.entrypoints.probe import LIMIT, Passes, Probed
from skyrl_train.entrypoints.probe_division import Comparison, compare_splits, table
from skyrl_train.entrypoints.probe_estimate import (
    PHASES,
    REST,
    RunEstimate,
    StepEstimate,
    estimate_run,
    estimate_step,
)
from skyrl_train.experiment.services import schedule_of

_WORTH = 1.05
"""How many times as fast something must be to be proposed: less is noise."""
_NAMES = {"publish": "weight sync", REST: "the rest"}


def probe_lines(cfg: Config, probed: Probed) -> Iterator[str]:
    """All that a probe says."""
    step = estimated_step(cfg, probed)
    yield ""
    size = f"{probed.prompts:,} prompts"
    if step.scaled:
        sizes = ", ".join(f"{count:,}" for count in sorted({one.prompts for one in probed.steps}))
        size = f"{size}, scaled from steps of {sizes}: one of all would not fit the time"
    yield (
        f"probed: {len(probed.steps)} of {probed.taken} steps count, which took {probed.steps_took_s:.1f} s in all; "
        f"a step of {size}"
    )
    yield from _step_lines(cfg, probed, step)
    yield from _passes_lines(cfg, probed, step)
    yield ""
    yield from _split_lines(compare_splits(cfg, probed.steps, probed.responses))


def estimated_step(cfg: Config, probed: Probed) -> StepEstimate:
    """A whole step of the run."""
    updates = -(-probed.prompts // cfg.trainer.policy_mini_batch_size) * cfg.trainer.update_epochs_per_batch
    return estimate_step(probed.steps, probed.prompts, updates, ahead=cfg.trainer.fully_async.enabled)


def estimated_run(cfg: Config, probed: Probed, step: StepEstimate) -> RunEstimate:
    """The whole run; an evaluation samples as many tokens an answer, and as fast, as training."""
    schedule = schedule_of(cfg.trainer, len(probed.dataset))
    answers = probed.eval_prompts * cfg.generator.eval_n_samples_per_prompt
    evaluation_s = answers * _mean(probed, "response/mean_tokens") / max(_tokens_per_s(probed), 1e-9)
    return estimate_run(schedule, cfg.trainer, step.step_s, evaluation_s, probed.start_s)


def _step_lines(cfg: Config, probed: Probed, step: StepEstimate) -> Iterator[str]:
    run = estimated_run(cfg, probed, step)
    notes = {"generate": f"{_tokens_per_s(probed):,.0f} tokens/s of all engines; {_answers(probed)}"}
    lines = [["", "s a step", "share", ""]]
    for phase in (*PHASES, REST):
        seconds = step.seconds[phase]
        share = f"{seconds / step.step_s:.0%}"
        lines.append([_NAMES.get(phase, phase), f"{seconds:.3g}", share, notes.get(phase, "")])
    lines.append(["step", f"{step.step_s:.3g}", "", ""])
    yield from aligned(lines, 1)
    parts = [f"{run.start_s:.0f} s to start", f"{run.steps:,} steps"]
    if run.evaluations:
        parts.append(f"{run.evaluations:,} evaluations of {run.evaluation_s:.3g} s")
    yield f"the run: {_duration(run.seconds)} ({', '.join(parts)}), checkpoints and exports apart"


def _duration(seconds: float) -> str:
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:.1f} minutes" if seconds >= 60 else f"{seconds:.0f} s"


def _answers(probed: Probed) -> str:
    lengths = sorted(probed.responses)
    ninth = quantiles(lengths, n=10)[-1] if len(lengths) > 1 else lengths[0]
    cut = _mean(probed, "response/truncated_fraction")
    return (
        f"answers of {fmean(lengths):,.0f} tokens in the mean, half up to {median(lengths):,.0f}, "
        f"90 % up to {ninth:,.0f}, the longest {lengths[-1]:,}; {cut:.0%} reached the limit"
    )


def _passes_lines(cfg: Config, probed: Probed, step: StepEstimate) -> Iterator[str]:
    """Sizes of micro-batches, and the fastest that fits."""
    yield ""
    if len(probed.passes) == 1:
        yield f"{LIMIT}: no other size was tried: none fits, or what is learnt would depend on it"
        return
    tokens, configured = probed.passes_tokens, probed.passes[0]
    yield f"micro-batches: scoring and updating {tokens:,} tokens of the last step"
    lines = [[LIMIT, "s", "µs a token", "peak GiB", ""]]
    for one in probed.passes:
        name = f"{one.limit:,}" if one.limit else "as configured"
        shown = [name, f"{one.seconds:.3g}", f"{1e6 * one.seconds / tokens:,.1f}", f"{one.peak_gib or 0:.2f}", ""]
        lines.append(shown if one.peak_gib is not None else [name, "", "", "", "DOES NOT FIT: out of memory"])
    yield from aligned(lines, 1)
    best = best_passes(probed.passes)
    if best is configured:
        yield f"{LIMIT}: leave it as it is; no other size is {_WORTH - 1:.0%} faster"
        return
    times = configured.seconds / best.seconds
    saved = (step.seconds["score"] + step.seconds["update"]) * (1 - 1 / times)
    yield f"set {LIMIT}={best.limit}: {times:.2f} times as fast, {saved:.3g} s less a step"


def best_passes(passes: list[Passes]) -> Passes:
    """The fastest size; the configured one, which is the first, unless another is clearly faster."""
    best = min(passes, key=lambda one: one.seconds)
    return best if passes[0].seconds >= _WORTH * best.seconds else passes[0]


def _split_lines(comparison: Comparison | None) -> Iterator[str]:
    if comparison is None:
        yield "engines : trainers: nothing to divide: one slot, or the configuration allows no other division"
        return
    yield f"engines : trainers, computed from steps of {comparison.prompts:,} prompts; the first is as configured"
    if comparison.proportional is not None:
        yield f"Engines are taken to bring tokens in proportion to their number, as {comparison.proportional}."
    yield from table(comparison)
    fastest = min(one.step_s for one in comparison.estimates)
    if not comparison.keys or comparison.estimates[0].step_s < _WORTH * fastest:
        yield f"leave it as it is: no other division is {_WORTH - 1:.0%} faster"
    else:
        yield f"set {' '.join(comparison.keys)}"


def _tokens_per_s(probed: Probed) -> float:
    return _mean(probed, "engines/tokens_per_s")


def _mean(probed: Probed, name: str) -> float:
    values = [one.row[name] for one in probed.steps if name in one.row]
    return fmean(values) if values else math.nan
