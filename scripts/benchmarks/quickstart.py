"""The quickstart's task learnt with each engine, colocated and in dedicated slots, with other learners, and while
rollouts run ahead.

What counts is accuracy on 1,000 held-out problems.

    python scripts/benchmarks/quickstart.py [--backends vllm sglang] [--layouts colocated dedicated]
        [--learners fsdp2 deepspeed lora] [--seeds 0 1 2] [--json F]
    python scripts/benchmarks/quickstart.py --backends transformers --layouts dedicated --seeds 0 1 2
        --schedules synchronous "staleness 1" "staleness 2" "staleness 4" "staleness 4, no correction"

One warm-up a seed, then one GRPO run of examples/quickstart for each backend, layout, learner and schedule through the
real entrypoint, with a log-prob probe at every sync. Greedy accuracy before and after, and the seconds of the GRPO run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from task import prepare, quickstart, scores_of

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

LAYOUTS = {"colocated": "true", "dedicated": "false"}
LEARNERS = {
    "fsdp2": ["trainer.strategy=fsdp2"],
    "deepspeed": ["trainer.strategy=deepspeed"],
    "lora": [
        "trainer.policy.model.lora.rank=32",
        "trainer.policy.model.lora.alpha=64",
        "trainer.policy.optimizer_config.lr=1.0e-3",
    ],
}
CORRECTED = [
    "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
    "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=2.0",
]
"""As config/async.yaml has it."""


def _ahead(steps: int) -> list[str]:
    return ["trainer.fully_async.enabled=true", f"trainer.fully_async.max_staleness_steps={steps}"]


SYNCHRONOUS = "synchronous"
SCHEDULES = {
    SYNCHRONOUS: [],
    **{f"staleness {steps}": [*_ahead(steps), *CORRECTED] for steps in (1, 2, 4)},
    "staleness 4, no correction": _ahead(4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["vllm", "sglang"])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--learners", nargs="+", default=["fsdp2"], choices=LEARNERS)
    parser.add_argument("--schedules", nargs="+", default=[SYNCHRONOUS], choices=SCHEDULES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.schedules != [SYNCHRONOUS] and arguments.layouts != ["dedicated"]:
        parser.error("--schedules: rollouts run ahead on slots of their own: --layouts dedicated")
    results = []
    with tempfile.TemporaryDirectory(prefix="quickstart-") as name:
        for seed in arguments.seeds:
            folder = Path(name) / str(seed)
            folder.mkdir()
            warm = prepare(folder, seed)
            axes = arguments.backends, arguments.layouts, arguments.learners, arguments.schedules
            for number, (backend, layout, learner, schedule) in enumerate(product(*axes)):
                results.append(learn(folder / str(number), folder, warm, seed, backend, layout, learner, schedule))
                print(json.dumps(results[-1]), flush=True)
    names = (
        "engine",
        "layout",
        "learner",
        "schedule",
        "seed",
        "before",
        "after",
        "largest probe gap",
        "mean age",
        "seconds",
    )
    print(f"| {' | '.join(names)} |\n|" + " --- |" * len(names))
    line = (
        "| {backend} | {layout} | {learner} | {schedule} | {seed} | {before:.3f} | {after:.3f} | {probe_gap:.1e} "
        "| {age:.2f} | {seconds:.0f} |"
    )
    for row in results:
        print(line.format(**row))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


def learn(
    run: Path, folder: Path, warm: Path, seed: int, backend: str, layout: str, learner: str, schedule: str
) -> dict[str, Any]:
    """One run, in `run`, on the data in `folder` from the model `warm`."""
    overrides = [
        *LEARNERS[learner],
        *SCHEDULES[schedule],
        f"generator.backend={backend}",
        f"trainer.placement.colocate_all={LAYOUTS[layout]}",
        f"trainer.ckpt_path={run}",
        f"trainer.export_path={run / 'export'}",
        "trainer.eval_interval=40",
        "trainer.ckpt_interval=40",
    ]
    start = time.perf_counter()
    quickstart.train(folder, warm, seed, overrides)
    seconds = time.perf_counter() - start
    lines = read_jsonl(run / METRICS_FILE)
    scores = scores_of(run)
    gaps = [line["weights/probe_gap"] for line in lines if "weights/probe_gap" in line]
    ages = [line["async/staleness_mean"] for line in lines if "async/staleness_mean" in line]
    return {
        "backend": backend,
        "layout": layout,
        "learner": learner,
        "schedule": schedule,
        "seed": seed,
        "before": scores[0],
        "after": scores[-1],
        "probe_gap": max(gaps),
        "age": sum(ages) / len(ages) if ages else 0.0,
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
