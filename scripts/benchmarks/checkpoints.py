"""What checkpoints cost a run: none, written while it waits, written in the background (trainer.async_checkpoint).

    python scripts/benchmarks/checkpoints.py [--steps 21] [--every 10] [--repeats 2] [key=value ...]

4 prompts x 8 samples, prompts of 121 tokens, 64 new ones each, a Qwen2 of about 50 million parameters, fp32 on the CPU:
a checkpoint of its weights and both of AdamW's moments is 600 MB. The three kinds of run take turns. A run's time is
from the row of its first step to the row of its last, so it contains all checkpoints but the last one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import HERE, about, line
from workload import MEDIUM, Work, prompt_texts, run_command, save_model, write_prompts

from skyrl_train.report.jsonl import read_jsonl

WORK = Work(prompts=4, samples=8)
KINDS = {
    "no checkpoint": [],
    "written while the run waits": ["trainer.ckpt_interval={every}"],
    "written in the background": ["trainer.ckpt_interval={every}", "trainer.async_checkpoint=true"],
}


def seconds_a_step(folder: Path, model: Path, steps: int, overrides: list[str]) -> float:
    folder.mkdir()
    write_prompts(folder / "prompts.jsonl", prompt_texts(WORK.prompts * steps, WORK.prompt_tokens))
    keys = run_command(folder, model, WORK, steps, "fsdp2", ["trainer.max_ckpts_to_keep=1", *overrides])[2:]
    command = [sys.executable, "-m", "skyrl_train.entrypoints.main_base", *keys]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": path})
    times = {row["step"]: row["time"] for row in read_jsonl(folder / "run" / "metrics.jsonl")}
    return (times[steps] - times[1]) / (steps - 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=21)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    taken: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as name:
        model = Path(name) / "model"
        parameters = save_model(model, MEDIUM)
        for repeat in range(given.repeats):
            for kind, keys in KINDS.items():
                overrides = [key.format(every=given.every) for key in keys] + given.overrides
                folder = Path(name) / f"{repeat}{len(keys)}"
                taken[kind].append(seconds_a_step(folder, model, given.steps, overrides))
    print(line(about()))
    print(f"{parameters:,} parameters, {given.steps} steps, a checkpoint every {given.every}\n")
    print("| checkpoints | seconds a step: median | more than without |\n| --- | --- | --- |")
    without = statistics.median(taken["no checkpoint"])
    for kind, seconds in taken.items():
        median = statistics.median(seconds)
        print(f"| {kind} | {median:.2f} | {median / without - 1:+.1%} |")


if __name__ == "__main__":
    main()
