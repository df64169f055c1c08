"""Compare the cost of a GRPO step with that of TRL's GRPOTrainer on the same work.

    python scripts/benchmarks/grpo_step.py [--vocabulary 480 32000] [--strategy fsdp2] [--steps 5] [--json FILE]
        [--sides skyrl_train trl trl-passive] [--against COMMIT] [key=value ...]

8 prompts x 8 samples, prompts of exactly 121 tokens, exactly 64 new ones each, one optimizer step on all of them, fp32
on the CPU, a Qwen2 of 2.9 million parameters (hidden size 256, 4 layers) with random weights; a larger vocabulary adds
its embeddings. Both sides have the same prompts, reward function and learning rate, and use all cores. The script
checks in the metrics of both sides that they did this work.

- skyrl_train: the entrypoint as a user starts it, with its defaults (fsdp2, Ray, transformers engine colocated with the
  learner, fingerprints of every weight sync), except for one micro-batch that holds the complete batch, as in TRL, and
  no gradient checkpointing. The command line accepts more keys. A step lasts from one call of a tracker's `log` to the
  next.
- trl: no vLLM, beta=0, gradient_checkpointing=False, num_iterations=1. A step lasts from one `on_log` to the next.
- trl-passive: the same with OMP_WAIT_POLICY=PASSIVE, which the framework sets for its own processes: waiting threads
  sleep. Otherwise they spin for a moment, which counts as CPU time.

`--against` adds a side: the same run with the package of another commit, in a worktree. Without `--sides`, the script
then measures only skyrl_train and this commit.

The sides alternate step by step, and each one waits while the other computes. CPU-seconds are the user and system
time of all processes of a side, Ray's included, during the step. Peak MiB comes from two further steps and counts a
page once that several processes share, such as torch's code; summed RSS counts it in each process. For skyrl_train, generation and
update are the times of the engine's and the learner's process. Results are medians without the first steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from measure import (
    HERE,
    PASSIVE,
    BenchmarkProcess,
    Step,
    environment_info,
    format_environment_info,
    interleave_steps,
    median,
    medians_by_role,
)
from workload import SMALL, Work, assert_did, prompt_texts, run_command, save_model, write_prompts
from worktrees import trees

WARM_UP = 2
WATCHED = 2
"""The number of steps that measure memory instead of time, because measuring one disturbs the other."""
OURS, THEIRS, SLEEPING = "skyrl_train", "trl", "trl-passive"
SIDES = (OURS, THEIRS, SLEEPING)


def compare(options: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """Measure the steps of all sides in turn."""
    work, total = Work(), options.warm_up + options.steps + WATCHED
    with tempfile.TemporaryDirectory(prefix="grpo-step-") as name, ExitStack() as stack:
        packages = stack.enter_context(trees(options.against))
        folder = Path(name)
        model = folder / "model"
        parameters = save_model(model, SMALL.sized(vocabulary))
        write_prompts(folder / "prompts.jsonl", prompt_texts(work.prompts * total, work.prompt_tokens))
        work_options = {"work": asdict(work), "steps": total, "model": str(model), "threads": os.cpu_count()}
        trl = [sys.executable, str(HERE / "trl_grpo.py"), name, json.dumps(work_options)]
        starts: dict[str, tuple[list[str], dict[str, str]]] = {THEIRS: (trl, {}), SLEEPING: (trl, PASSIVE)}
        for commit, tree in packages.items():
            side = OURS if commit == "now" else commit
            run = run_command(folder, model, work, total, options.strategy, options.overrides, side, tree)
            starts[side] = (run, {"PYTHONPATH": str(tree)})
        sides = [
            stack.enter_context(BenchmarkProcess(side, starts[side][0], folder, starts[side][1]))
            for side in options.sides
        ]
        measured = interleave_steps(sides, options.warm_up, options.steps, WATCHED)
        peaks = {
            side.name: {
                "peak_mib": sum(side.peak.values()) / 2**20,
                "peak_rss_mib": side.peak_rss / 2**20,
                "peak_mib_by_role": {role: value / 2**20 for role, value in side.peak.items()},
            }
            for side in sides
        }
    for side, steps in measured.items():
        assert_trl_did(work, steps) if side in (THEIRS, SLEEPING) else assert_did(work, steps)
    return {
        "vocabulary": vocabulary,
        "parameters": parameters,
        "tokens": work.tokens,
        "sides": {name: summary(name, steps) | peaks[name] for name, steps in measured.items()},
        "steps": {name: [asdict(step) for step in steps] for name, steps in measured.items()},
    }


def assert_trl_did(work: Work, steps: list[Step]) -> None:
    counted = [step.reported["num_tokens"] for step in steps]
    grown = {after - before for before, after in pairwise(counted)}
    lengths = {step.reported[f"completions/{end}_length"] for step in steps for end in ("min", "max")}
    assert grown <= {work.tokens} and lengths == {work.new_tokens}, f"{grown} tokens a step, responses of {lengths}"


def summary(name: str, steps: list[Step]) -> dict[str, Any]:
    """Return medians over the steps of a side."""
    by_role = medians_by_role(steps)
    cpu = statistics.median(step.total_cpu_s for step in steps)
    if name not in (THEIRS, SLEEPING):
        generation, update = by_role.get("engine", 0.0), by_role.get("learner", 0.0)
        timings = {key: median(steps, key) for key in sorted(steps[0].reported) if key.startswith("timing/")}
    else:
        generation = median(steps, "generation_cpu_s")
        update = statistics.median(step.total_cpu_s - step.reported["generation_cpu_s"] for step in steps)
        timings = {"timing/generate_s": median(steps, "generation_s")}
    return {
        "cpu_s": cpu,
        "generation_cpu_s": generation,
        "update_cpu_s": update,
        "rest_cpu_s": cpu - generation - update,
        "wall_s": statistics.median(step.wall_s for step in steps),
        "cpu_s_by_role": by_role,
        "timings": timings,
    }


def show(result: dict[str, Any]) -> None:
    sides = result["sides"]
    print(f"\nvocabulary {result['vocabulary']:,}, {result['parameters']:,} parameters, {result['tokens']:,} tokens")
    print("| side | CPU-s | generation | update | rest | seconds | peak MiB | summed RSS |\n" + "| --- " * 8 + "|")
    row = "| {} | {cpu_s:.2f} | {generation_cpu_s:.2f} | {update_cpu_s:.2f} | {rest_cpu_s:.2f} | {wall_s:.2f} |"
    for name, side in sides.items():
        print(row.format(name, **side) + f" {side['peak_mib']:,.0f} | {side['peak_rss_mib']:,.0f} |")
    if OURS not in sides:
        return
    for name in [name for name in sides if name != OURS]:
        keys = ("cpu_s", "generation_cpu_s", "wall_s")
        cpu, generation, wall = (sides[name][key] / sides[OURS][key] for key in keys)
        # TRL's update includes everything but generation: reward, data and metrics.
        others = [sides[side]["update_cpu_s"] + sides[side]["rest_cpu_s"] for side in (name, OURS)]
        update = f"{others[0] / others[1]:.1f} with the rest"
        print(f"| {name} / {OURS} | {cpu:.1f} | {generation:.1f} | {update} | | {wall:.1f} | |")
    by_role = ", ".join(f"{role} {seconds:.2f}" for role, seconds in sides[OURS]["cpu_s_by_role"].items())
    print(f"CPU-s of skyrl_train's processes: {by_role}")
    memory = ", ".join(f"{role} {value:.0f}" for role, value in sides[OURS]["peak_mib_by_role"].items())
    print(f"peak MiB of these processes: {memory}")
    print(
        "seconds of skyrl_train's phases: "
        + ", ".join(f"{key[7:-2]} {s:.2f}" for key, s in sides[OURS]["timings"].items())
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[SMALL.vocabulary])
    parser.add_argument("--strategy", default="fsdp2", help="the value of trainer.strategy")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=WARM_UP)
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="all by default; with --against only skyrl_train")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more configuration of the run")
    options = parser.parse_intermixed_args()
    options.sides = list(options.sides or ([OURS] if options.against else SIDES))
    if options.against:
        options.sides.append(options.against)
    report = environment_info("trl") | {
        "threads": os.cpu_count(),
        "strategy": options.strategy,
        "overrides": options.overrides,
    }
    print(f"{format_environment_info(report)}; {options.strategy}, {report['threads']} threads a process")
    report["results"] = []
    for vocabulary in options.vocabulary:
        report["results"].append(compare(options, vocabulary))
        show(report["results"][-1])
    if options.json:
        options.json.write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
