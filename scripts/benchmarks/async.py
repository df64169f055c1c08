"""Asynchronous training beside synchronous, on the same slots: steps a second, and what they cost.

    python scripts/benchmarks/async.py [--backends transformers vllm] [--steps 12] [--json FILE] [key=value ...]

One engine and one learner in slots of their own, a core each; the same prompts, seeds and work for every schedule, one
optimizer step on 8 prompts x 8 samples. A synchronous run lets one side wait for the other, so the most that running
both at once can bring is (generation + update) / the longer of the two: the work is such that they take about equally
long, and both are in the table. Answers have all the same length, or are log-normal (sigma 0.8) with the same mean,
drawn from a request's seed.

The runs go one after another, each alone. What is measured begins after two steps, when rollouts are as far ahead as
they may be, and ends with the last step but `max_staleness_steps`: from there on there is nothing left to sample.
Seconds and CPU-seconds, of whole process trees, are those of this window over its steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from gated_run import GATED, LENGTHS
from measure import PASSIVE, Side, about, line
from workload import SMALL, Work, prompt_texts, run_command, save_model, write_prompts

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

WARM_UP = 2
AHEAD = "trainer.fully_async.enabled=true", "trainer.algorithm.off_policy_correction.tis_ratio_type=token"
SCHEDULES = {
    "synchronous": (0, []),
    "staleness 1": (1, [*AHEAD, "trainer.fully_async.max_staleness_steps=1"]),
    "staleness 2": (2, [*AHEAD, "trainer.fully_async.max_staleness_steps=2"]),
}
SIGMAS = {"equal": 0.0, "log-normal": 0.8}
LONGEST = 4
"""Times the mean: where longer answers are cut."""
WORK = {
    "transformers": Work(prompts=8, samples=8, prompt_tokens=121, new_tokens=160),
    "vllm": Work(prompts=8, samples=8, prompt_tokens=121, new_tokens=160),
}
"""Such that generation and update take about equally long on one core each."""
PHASES = ("generate", "score", "update", "publish")


def measure(
    folder: Path, model: Path, backend: str, lengths: str, schedule: str, options: argparse.Namespace
) -> dict[str, Any]:
    folder.mkdir()
    work, (ahead, keys) = WORK[backend], SCHEDULES[schedule]
    last = WARM_UP + options.steps
    total = last + ahead
    write_prompts(folder / "prompts.jsonl", prompt_texts(work.prompts * total, work.prompt_tokens))
    gates = PASSIVE | {GATED: f"{WARM_UP},{last}"}
    if sigma := SIGMAS[lengths]:
        gates[LENGTHS] = f"{work.new_tokens},{sigma}"
        work = replace(work, new_tokens=LONGEST * work.new_tokens)
    overrides = [
        f"generator.backend={backend}",
        "trainer.placement.colocate_all=false",
        "generator.enable_prefix_caching=false",
        *keys,
        *options.overrides,
    ]
    command = run_command(folder, model, work, total, "fsdp2", overrides)
    with Side("run", command, folder, gates) as side:
        side.start()
        side.step()
        window = side.step()
        side.finish()
    rows = [row for row in read_jsonl(folder / "run" / METRICS_FILE) if WARM_UP < row["step"] <= last]
    tokens = [row["rollouts/tokens"] for row in rows]

    def median(name: str) -> float:
        return statistics.median(row.get(name, 0.0) for row in rows)

    return {
        "backend": backend,
        "lengths": lengths,
        "schedule": schedule,
        "tokens": sum(tokens),
        "s": window.wall_s / options.steps,
        "cpu_s": window.total_cpu_s / options.steps,
        "cpu_s_by_role": {role: seconds / options.steps for role, seconds in window.cpu_s.items()},
        **{phase: median(f"timing/{phase}_s") for phase in PHASES},
        "staleness": statistics.fmean(row.get("async/staleness_mean", 0.0) for row in rows),
        "trainer_idle": median("async/trainer_idle"),
        "engines_idle": median("async/engines_idle"),
    }


def show(results: list[dict[str, Any]]) -> None:
    print(
        "\n| engine | lengths | schedule | s a step | times the steps | CPU-s a step | generate, update, publish: s "
        "| mean age | trainer, engines idle |\n" + "| --- " * 9 + "|"
    )
    for row in results:
        (base,) = (
            one
            for one in results
            if (one["backend"], one["lengths"]) == (row["backend"], row["lengths"]) and one["schedule"] == "synchronous"
        )
        phases = ", ".join(f"{row[phase]:.2f}" for phase in ("generate", "update", "publish"))
        idle = f"{row['trainer_idle']:.0%}, {row['engines_idle']:.0%}" if row is not base else ""
        print(
            f"| {row['backend']} | {row['lengths']} | {row['schedule']} | {row['s']:.2f} | {base['s'] / row['s']:.2f} "
            f"| {row['cpu_s']:.2f} ({row['cpu_s'] / base['cpu_s'] - 1:+.1%}) | {phases} | {row['staleness']:.2f} "
            f"| {idle} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=list(WORK), choices=WORK)
    parser.add_argument("--lengths", nargs="+", default=list(SIGMAS), choices=SIGMAS)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more configuration of the runs")
    options = parser.parse_intermixed_args()
    if "synchronous" not in options.schedules:
        parser.error("--schedules: synchronous is what the others are compared with")
    report = about(*(name for name in options.backends if name != "transformers")) | {"cores": os.cpu_count()}
    print(line(report), flush=True)
    results = []
    with tempfile.TemporaryDirectory(prefix="async-") as name:
        folder = Path(name)
        parameters = save_model(folder / "model", SMALL)
        for backend in options.backends:
            for lengths in options.lengths:
                for schedule in options.schedules:
                    run = folder / f"{backend}-{lengths}-{schedule}".replace(" ", "-")
                    results.append(measure(run, folder / "model", backend, lengths, schedule, options))
                    print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    print(f"{parameters:,} parameters, {options.steps} steps")
    show(results)
    if options.json:
        options.json.write_text(json.dumps(report | {"results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
