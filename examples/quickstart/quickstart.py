"""Train a model from scratch with SFT and GRPO on a laptop, through the real entrypoints.

1. Generate word problems. No expression is in both splits.
2. Create a tokenizer and a small model.
3. Warm the model up (`main_sft`) on two kinds of demonstrations: some work step by step, most only state an answer.
   The model then knows the format, and mostly answers without steps.
4. Train with GRPO (`main_base`). Only right answers are rewarded. Answers with steps are right more often, so the model
   learns to write steps, and to write them correctly.
5. Compare greedy accuracy on held-out problems before and after, and plot the reward.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from model import MODEL_TYPES, save_model

from skyrl_train.environments.tasks.arithmetic import generate
from skyrl_train.report.curve import write_reward_curve
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

HERE = Path(__file__).parent
OPERATIONS, MAX_VALUE = 4, 4
STEPWISE = 0.4
"""Fraction of demonstrations that work step by step."""


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--operations", type=int, default=OPERATIONS, help="operations in a problem; fewer are easier")
    parser.add_argument("--model-type", default="llama", choices=MODEL_TYPES, help="architecture of the model")
    arguments = parser.parse_args()
    run = Path(arguments.output).resolve()
    if run.exists():
        sys.exit(f"--output {run} exists already. Choose another folder, or remove it.")
    texts = write_data(run / "data", arguments.seed, arguments.operations)
    parameters = save_model(run / "model", texts, arguments.seed, arguments.model_type)
    print(f"quickstart: {parameters:,} parameters, warming up on {len(texts):,} demonstrations", flush=True)
    model = warm_up(run, arguments.seed, arguments.warm_up_steps)
    train(run, model, arguments.seed, arguments.overrides)
    metrics = run / "grpo" / METRICS_FILE
    curve = write_reward_curve(run / "grpo", run / "reward.png")
    scores = [line["eval/arithmetic/avg_score"] for line in read_jsonl(metrics) if "eval/arithmetic/avg_score" in line]
    print(f"quickstart: reward curve {curve}, metrics {metrics}, samples {run / 'grpo' / 'samples.jsonl'}")
    seconds = time.time() - psutil.Process().create_time()  # including the time of imports
    print(f"quickstart: eval accuracy {scores[0]:.3f} -> {scores[-1]:.3f} in {seconds:.0f} s, run at {run}")


def make_parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--output", default=f"runs/quickstart-{time.strftime('%Y%m%d-%H%M%S')}", help="new folder for the run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--warm-up-steps", type=int, help="maximum number of SFT steps; fewer are faster but teach less"
    )
    parser.add_argument(
        "overrides", nargs="*", help="key=value for the GRPO run, e.g. trainer.policy.optimizer_config.lr=0"
    )
    return parser


def write_data(folder: Path, seed: int, operations: int) -> list[str]:
    """Write demonstrations, training and validation problems; return the texts that a tokenizer must cover."""
    folder.mkdir(parents=True)
    rng = random.Random(seed)
    rows = generate(12_000, operations, MAX_VALUE, seed, "train")
    demonstrations = []
    for row in rows:
        answer = row["extra_info"]["answer" if rng.random() < STEPWISE else "direct"]
        demonstrations.append({"messages": [*row["prompt"], {"role": "assistant", "content": answer}]})
    write_jsonl(folder / "demonstrations.jsonl", demonstrations)
    write_jsonl(folder / "train.jsonl", generate(4_000, operations, MAX_VALUE, seed + 1, "train"))
    write_jsonl(folder / "validation.jsonl", generate(256, operations, MAX_VALUE, seed + 2, "validation"))
    return [row["prompt"][0]["content"] + "\n" + row["extra_info"]["answer"] for row in rows]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def warm_up(run: Path, seed: int, steps: int | None) -> Path:
    """Run supervised fine-tuning; return the exported model's path."""
    overrides = [
        f"data.train_data=['{run / 'data' / 'demonstrations.jsonl'}']",
        f"trainer.policy.model.path={run / 'model'}",
        f"trainer.ckpt_path={run / 'sft'}",
        f"trainer.export_path={run / 'sft' / 'export'}",
        f"trainer.seed={seed}",
        *max_steps_override(steps),
    ]
    run_entrypoint("main_sft", "warm_up", overrides)
    return next((run / "sft" / "export").glob("global_step_*/policy"))


def max_steps_override(steps: int | None) -> list[str]:
    """Return the override that limits a run to `steps` steps; none if `steps` is None."""
    return [] if steps is None else [f"trainer.max_steps={steps}"]


def train(run: Path, model: Path, seed: int, overrides: list[str]) -> None:
    """Run GRPO, with an evaluation before and after."""
    defaults = [
        f"data.train_data=['{run / 'data' / 'train.jsonl'}']",
        f"data.val_data=['{run / 'data' / 'validation.jsonl'}']",
        f"trainer.policy.model.path={model}",
        f"trainer.ckpt_path={run / 'grpo'}",
        f"trainer.export_path={run / 'grpo' / 'export'}",
        f"trainer.seed={seed}",
    ]
    run_entrypoint("main_base", "grpo", [*defaults, *overrides])


def run_entrypoint(entrypoint: str, preset: str, overrides: list[str]) -> None:
    """Start an entrypoint as a user would, with one of the presets in this folder."""
    module = f"skyrl_train.entrypoints.{entrypoint}"
    subprocess.run(
        [sys.executable, "-m", module, "--config-dir", str(HERE), "--config-name", preset, *overrides], check=True
    )


if __name__ == "__main__":
    main()
