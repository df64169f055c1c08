"""Seconds from Enter to the first step of a tiny run, under `uv run` and under `python`, one after the other in turn.

    python scripts/benchmarks/startup.py --repeats 5

Each is started as a user does, in an environment of PATH and HOME alone; the repository's environment must be there.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from skyrl_train.environments.tasks.arithmetic import generate
from skyrl_train.testing.tiny_models import save_tiny_model

REPOSITORY = Path(__file__).resolve().parents[2]
MODULE = ["-m", "skyrl_train.entrypoints.main_base"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    uv = shutil.which("uv", path=os.pathsep.join([os.environ["PATH"], str(REPOSITORY / ".uv" / "bin")]))
    if uv is None:
        sys.exit("uv is neither on PATH nor in .uv/bin: run scripts/bootstrap")
    commands = {"python -m": [sys.executable, *MODULE], "uv run -m": [uv, "run", *MODULE]}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        arguments = tiny_run(Path(folder))
        for repeat in range(repeats + 1):
            for name, command in commands.items():
                took = to_first_step([*command, *arguments], Path(folder) / f"{repeat}{name.partition(' ')[0]}")
                if repeat:  # the first of each fills the caches
                    seconds[name].append(took)
    print("| started by | seconds to the first step: median | least | most |\n| --- | --- | --- | --- |")
    for name, found in seconds.items():
        print(f"| `{name}` | {statistics.median(found):.2f} | {min(found):.2f} | {max(found):.2f} |")
    gaps = [under_uv - under_python for under_python, under_uv in zip(*seconds.values(), strict=True)]
    print(f"\n`uv run` takes {statistics.median(gaps):+.2f} s (median of {repeats} pairs)")


def tiny_run(folder: Path) -> list[str]:
    """Overrides of one step: 4 prompts x 4 samples of 16 tokens, a random model of two layers, no evaluation."""
    rows = "".join(json.dumps(row) + "\n" for row in generate(24, 2, 9, 0, "train"))
    (folder / "train.jsonl").write_text(rows)
    return [
        f"data.train_data=['{folder}/train.jsonl']",
        "data.val_data=[]",
        f"trainer.policy.model.path={save_tiny_model(folder / 'model')}",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.max_tokens_per_microbatch=2048",
        "trainer.algorithm.use_kl_loss=false",
        "trainer.max_steps=1",
        "trainer.ckpt_interval=-1",
        "trainer.logger=console",
        "generator.backend=transformers",
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=16",
        "environment.env_class=arithmetic",
    ]


def to_first_step(command: list[str], folder: Path) -> float:
    """Seconds from the start of the process to the line of its first step."""
    folders = [f"trainer.ckpt_path={folder}", f"trainer.export_path={folder}-exports"]
    environment = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONUNBUFFERED": "1"}
    began = time.monotonic()
    with subprocess.Popen(
        [*command, *folders],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/1 "):
                took = time.monotonic() - began
                process.stdout.read()
                return took
    sys.exit(f"{' '.join(command[:4])} ... ended without a step, with status {process.returncode}")


if __name__ == "__main__":
    main()
