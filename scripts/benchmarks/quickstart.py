"""The quickstart's task learnt with each engine, colocated and in dedicated slots, and with other learners.

What counts is accuracy on 1,000 held-out problems.

    python scripts/benchmarks/quickstart.py [--backends vllm sglang] [--layouts colocated dedicated]
        [--learners fsdp2 deepspeed lora] [--seed N] [--json F]

One warm-up, then one GRPO run of examples/quickstart for each backend, layout and learner through the real entrypoint,
with a log-prob probe at every sync. Greedy accuracy before and after, and the seconds of the GRPO run.
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", nargs="+", default=["vllm", "sglang"])
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS)
    parser.add_argument("--learners", nargs="+", default=["fsdp2"], choices=LEARNERS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="quickstart-") as name:
        folder = Path(name)
        warm = prepare(folder, arguments.seed)
        for backend in arguments.backends:
            for layout, learner in product(arguments.layouts, arguments.learners):
                results.append(learn(folder, warm, arguments.seed, backend, layout, learner))
                print(json.dumps(results[-1]), flush=True)
    print("| engine | layout | learner | before | after | largest probe gap | seconds |\n|" + " --- |" * 7)
    line = "| {backend} | {layout} | {learner} | {before:.3f} | {after:.3f} | {probe_gap:.1e} | {seconds:.0f} |"
    for row in results:
        print(line.format(**row))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


def learn(folder: Path, warm: Path, seed: int, backend: str, layout: str, learner: str) -> dict[str, Any]:
    run = folder / f"{backend}-{layout}-{learner}"
    overrides = [
        *LEARNERS[learner],
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
    return {
        "backend": backend,
        "layout": layout,
        "learner": learner,
        "before": scores[0],
        "after": scores[-1],
        "probe_gap": max(gaps),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
