"""Compare asynchronous with synchronous training on the same cores: time and cost per step.

    python scripts/benchmarks/async.py [--backends transformers vllm] [--steps 12] [--json FILE] [key=value ...]

One engine and one learner run on one core each. Every schedule has the same prompts, seeds and work: one optimizer step
on each batch. In a synchronous run one side waits for the other, so running both at once can speed it up by at most
(generation + the rest of a step) / the longer of the two. Short synchronous runs therefore first search for sizes at
which both take equally long on this machine: the same number of tokens in fewer and longer responses takes longer to
generate, but as long to train on. Responses all have the same length, or log-normal lengths (sigma 0.8) with the same
mean, drawn from the request's seed. The schedule with a second engine shows how much the learner's core can generate
while the learner waits.

The runs execute one after another. The measured window begins after two steps, when rollouts are as far ahead as they
may be. It ends `max_staleness_steps` before the last step, because from there on there is nothing left to sample.
Seconds and CPU-seconds are those of the complete process tree in this window, per step.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gated_run import GATED, LENGTHS, THREADS
from measure import PASSIVE, BenchmarkProcess, environment_info, format_environment_info
from workload import SMALL, Work, prompt_texts, run_command, save_model, write_prompts

from skyrl_train.config.choices import ENGINES
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl


@dataclass(frozen=True)
class Schedule:
    """Number of engines, and the staleness bound in steps (0 is synchronous)."""

    engines: int = 1
    staleness: int = 0


WARM_UP = 2
BASE = "synchronous"
SCHEDULES = {
    BASE: Schedule(),
    "synchronous, two engines": Schedule(engines=2),
    "staleness 1": Schedule(staleness=1),
    "staleness 2": Schedule(staleness=2),
}
LOG_NORMAL = "log-normal"
SIGMAS = {LOG_NORMAL: 0.8, "equal": 0.0}
LONGEST = 4
"""The maximum response length, as a multiple of the mean."""
WORK = {
    LOG_NORMAL: Work(prompts=20, samples=2, prompt_tokens=25, new_tokens=128),
    "equal": Work(prompts=12, samples=2, prompt_tokens=25, new_tokens=200),
}
"""The sizes with which the search for equal times starts."""
TRIES, TRIED_STEPS = 4, 3
NEAR = 0.05
"""The relative difference between generation and the rest of a step at which the search ends."""
MICROBATCH = 512
"""Tokens per micro-batch that fit into a core's cache, because the processes share the memory bandwidth."""
PHASES = ("generate", "score", "update", "publish")


def balanced(folder: Path, model: Path, backend: str, lengths: str, options: argparse.Namespace) -> Work:
    """Search for sizes at which generation takes as long as the rest of a synchronous step; return the best ones."""
    first, tried = WORK[lengths], dict[int, float]()
    tokens, rests = first.prompts * first.new_tokens, list[float]()
    prompts = first.prompts
    short = argparse.Namespace(steps=TRIED_STEPS, overrides=options.overrides)
    while prompts not in tried and len(tried) < TRIES:
        work = replace(first, prompts=prompts, new_tokens=round(tokens / prompts))
        run = folder / f"{backend}-{lengths}-of-{prompts}"
        row = measure(run, model, work, backend, lengths, BASE, short)
        tried[prompts] = row["generate"]
        rests.append(row["s"] - row["generate"])
        print(f"{backend}, {lengths}: {work}: generation {row['generate']:.2f} s, rest {rests[-1]:.2f} s", flush=True)
        rest = statistics.fmean(rests)
        if abs(row["generate"] / rest - 1) < NEAR:
            break
        prompts = max(1, round(_prompts_for(rest, tried)))
    nearest = min(tried, key=lambda prompts: abs(math.log(tried[prompts] / statistics.fmean(rests))))
    return replace(first, prompts=nearest, new_tokens=round(tokens / nearest))


def _prompts_for(seconds: float, tried: dict[int, float]) -> float:
    """Estimate the number of prompts whose generation takes `seconds`.

    The number of decode steps is proportional to 1 / prompts, and each step has a fixed cost and a cost per row.
    """
    (most_prompts, min_s), (fewest_prompts, max_s) = max(tried.items()), min(tried.items())
    if most_prompts == fewest_prompts:
        return most_prompts * min_s / seconds
    step_cost = (max_s - min_s) / (1 / fewest_prompts - 1 / most_prompts)
    row_cost = min_s - step_cost / most_prompts
    if step_cost <= 0:  # lengths are random: a few steps may not show that longer responses take longer
        return fewest_prompts * max_s / seconds
    return step_cost / max(seconds - row_cost, step_cost / (2 * most_prompts))


def measure(
    folder: Path, model: Path, work: Work, backend: str, lengths: str, schedule: str, options: argparse.Namespace
) -> dict[str, Any]:
    """Run one schedule, and return its times, costs and metrics per step."""
    folder.mkdir()
    chosen = SCHEDULES[schedule]
    last = WARM_UP + options.steps
    total = last + chosen.staleness
    # Every schedule gets the same prompts in the same order.
    max_steps = last + max(entry.staleness for entry in SCHEDULES.values())
    write_prompts(folder / "prompts.jsonl", prompt_texts(work.prompts * max_steps, work.prompt_tokens))
    gates = PASSIVE | {GATED: f"{WARM_UP},{last}", THREADS: "1"}
    if sigma := SIGMAS[lengths]:
        gates[LENGTHS] = f"{work.new_tokens},{sigma}"
        work = replace(work, new_tokens=LONGEST * work.new_tokens)
    overrides = [
        f"generator.backend={backend}",
        f"generator.num_inference_engines={chosen.engines}",
        "trainer.placement.colocate_all=false",
        f"trainer.max_tokens_per_microbatch={MICROBATCH}",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        f"trainer.fully_async.enabled={str(chosen.staleness > 0).lower()}",
        f"trainer.fully_async.max_staleness_steps={max(1, chosen.staleness)}",
        *options.overrides,
    ]
    command = run_command(folder, model, work, total, "fsdp2", overrides)
    with BenchmarkProcess("run", command, folder, gates) as side:
        side.start()
        side.step()
        window = side.step()
        side.finish()
    rows = [row for row in read_jsonl(folder / "run" / METRICS_FILE) if WARM_UP < row["step"] <= last]

    def mean(name: str) -> float:
        return statistics.fmean(row.get(name, 0.0) for row in rows)

    return {
        "backend": backend,
        "lengths": lengths,
        "schedule": schedule,
        "prompts": work.prompts,
        "tokens": mean("rollouts/tokens"),
        "s": window.wall_s / options.steps,
        "cpu_s": window.total_cpu_s / options.steps,
        "cpu_s_by_role": {role: seconds / options.steps for role, seconds in window.cpu_s.items()},
        **{phase: mean(f"timing/{phase}_s") for phase in PHASES},
        "staleness": mean("async/staleness_mean"),
        "trainer_idle": mean("async/trainer_idle"),
        "engines_idle": mean("async/engines_idle"),
    }


def compare(folder: Path, backend: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all schedules with this engine."""
    model, results = folder / "model", list[dict[str, Any]]()
    for lengths in options.lengths:
        work = balanced(folder, model, backend, lengths, options)
        for schedule in options.schedules:
            run = folder / f"{backend}-{lengths}-{list(SCHEDULES).index(schedule)}"
            results.append(measure(run, model, work, backend, lengths, schedule, options))
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    return results


def show(results: list[dict[str, Any]]) -> None:
    print(
        "\n| engine | lengths | schedule | s per step | speedup | CPU-s per step "
        "| generate, score, update, publish: s | mean age | trainer, engines idle |\n" + "| --- " * 9 + "|"
    )
    for row in results:
        (base,) = (
            other
            for other in results
            if (other["backend"], other["lengths"]) == (row["backend"], row["lengths"]) and other["schedule"] == BASE
        )
        phases = ", ".join(f"{row[phase]:.2f}" for phase in PHASES)
        ahead = SCHEDULES[row["schedule"]].staleness > 0
        idle = f"{row['trainer_idle']:.0%}, {row['engines_idle']:.0%}" if ahead else ""
        print(
            f"| {row['backend']} | {row['lengths']} | {row['schedule']} | {row['s']:.2f} | {base['s'] / row['s']:.2f} "
            f"| {row['cpu_s']:.2f} ({row['cpu_s'] / base['cpu_s'] - 1:+.1%}) | {phases} | {row['staleness']:.2f} "
            f"| {idle} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["transformers", "vllm"], choices=ENGINES)
    parser.add_argument("--lengths", nargs="+", default=list(SIGMAS), choices=SIGMAS)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="further overrides of the runs")
    options = parser.parse_intermixed_args()
    if options.schedules[0] != BASE:
        parser.error(f"--schedules: must start with {BASE!r}, with which the others are compared")
    report = environment_info(*(name for name in options.backends if name != "transformers")) | {
        "cores": os.cpu_count()
    }
    print(format_environment_info(report), flush=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="async-") as name:
        folder = Path(name)
        parameters = save_model(folder / "model", SMALL)
        for backend in options.backends:
            results += compare(folder, backend, options)
    print(f"{parameters:,} parameters, {options.steps} steps")
    show(results)
    if options.json:
        options.json.write_text(json.dumps(report | {"results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
