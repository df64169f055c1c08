"""The quickstart's task learnt with each preset of examples/algorithms: accuracy on 1,000 held-out problems.

    python scripts/benchmarks/algorithms.py [--presets grpo gspo ...] [--steps N] [--seed N] [--json F]

One warm-up, then one run a preset through the real entrypoint, with the quickstart's sizes and two optimizer steps a
batch, so that ratios and clips matter. Greedy accuracy before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from task import prepare, scores_of

PRESETS = Path(__file__).parents[2] / "examples" / "algorithms"
SIZES = [
    "device=cpu",
    "environment.env_class=arithmetic",
    "trainer.epochs=100",
    "trainer.train_batch_size=32",
    "trainer.policy_mini_batch_size=16",
    "trainer.critic_mini_batch_size=16",
    "trainer.max_tokens_per_microbatch=16384",
    "trainer.gradient_checkpointing=false",
    "trainer.policy.optimizer_config.lr=1.0e-4",
    "trainer.policy.optimizer_config.adam_betas=[0.9,0.95]",
    "trainer.policy.optimizer_config.num_warmup_steps=5",
    "trainer.critic.optimizer_config.lr=3.0e-4",
    "trainer.hf_save_interval=-1",
    "trainer.logger=console",
    "generator.n_samples_per_prompt=8",
    "generator.sampling_params.max_generate_length=48",
]
"""What the presets say of GSM8K and its model, for a model of 1.5 million parameters."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # What they share is none, and a teacher would have to be trained first.
    every = sorted({path.stem for path in PRESETS.glob("*.yaml")} - {"gsm8k", "distillation"})
    parser.add_argument("--presets", nargs="+", default=every, choices=every)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory(prefix="algorithms-") as name:
        folder = Path(name)
        model = prepare(folder, arguments.seed)
        for preset in arguments.presets:
            results.append(learn(folder, model, preset, arguments.steps, arguments.seed))
            print(json.dumps(results[-1]), flush=True)
    print("| preset | before | after | rise | seconds |\n| --- | --- | --- | --- | --- |")
    for row in results:
        print("| `{preset}` | {before:.3f} | {after:.3f} | {rise:+.3f} | {seconds:.0f} |".format(**row))
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


def learn(folder: Path, model: Path, preset: str, steps: int, seed: int) -> dict[str, Any]:
    run = folder / preset
    overrides = [
        *SIZES,
        f"data.train_data=['{folder / 'data' / 'train.jsonl'}']",
        f"data.val_data=['{folder / 'data' / 'validation.jsonl'}']",
        f"trainer.policy.model.path={model}",
        f"trainer.ckpt_path={run}",
        f"trainer.export_path={run / 'export'}",
        f"trainer.seed={seed}",
        f"trainer.max_steps={steps}",
        f"trainer.eval_interval={steps}",
        f"trainer.ckpt_interval={steps}",
    ]
    overrides += ["trainer.algorithm.overlong_buffer.len=8"] if preset == "dapo" else []
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_base"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PRESETS), os.environ.get("PYTHONPATH", "")])}
    start = time.perf_counter()
    subprocess.run(
        [*command, "--config-dir", str(PRESETS), "--config-name", preset, *overrides], check=True, env=environment
    )
    seconds = time.perf_counter() - start
    scores = scores_of(run)
    return {
        "preset": preset,
        "before": scores[0],
        "after": scores[-1],
        "rise": scores[-1] - scores[0],
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
