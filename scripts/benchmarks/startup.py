"""Measure the seconds from the command to the first step of a tiny run, with `uv run` and `python`, and by phase.

    python scripts/benchmarks/startup.py --repeats 5

Each command runs as a user starts it, with only PATH, HOME and the package indexes in its environment. The repository's
environment must exist. The phases come from `startup_phases.py`, which is the entrypoint with a clock.
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
        sys.exit("uv is neither on PATH nor in .uv/bin. Run scripts/bootstrap.")
    commands = {"python -m": [sys.executable, *MODULE], "uv run -m": [uv, "run", *MODULE]}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    phases: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        arguments = tiny_run(Path(folder))
        for repeat in range(repeats + 1):
            for name, command in commands.items():
                elapsed_s = to_first_step([*command, *arguments], Path(folder) / f"{repeat}{name.partition(' ')[0]}")
                if repeat:  # the first run of each command fills the caches
                    seconds[name].append(elapsed_s)
            phase_seconds = measure_phases(arguments, Path(folder) / f"{repeat}phases")
            if repeat:
                phases.append(phase_seconds)
    print("| started by | seconds to the first step: median | min | max |\n| --- | --- | --- | --- |")
    for name, times in seconds.items():
        print(f"| `{name}` | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |")
    print("\n| phase | seconds: median |\n| --- | --- |")
    for phase in phases[0]:
        print(f"| {phase} | {statistics.median(run[phase] for run in phases):.2f} |")
    without_ray = [sum(run.values()) - run["ray.init"] for run in phases]
    print(f"| all without ray.init | {statistics.median(without_ray):.2f} |")
    gaps = [under_uv - under_python for under_python, under_uv in zip(*seconds.values(), strict=True)]
    print(f"\n`uv run` takes {statistics.median(gaps):+.2f} s (median of {repeats} pairs)")


def tiny_run(folder: Path) -> list[str]:
    """Write the data and model of a tiny run to a folder, and return its overrides.

    The run has one step of 4 prompts x 4 samples of 16 tokens, a random model of two layers, and no evaluation.
    """
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


def measure_phases(arguments: list[str], folder: Path) -> dict[str, float]:
    """Start a run once, and return the seconds of each phase."""
    folders = [f"trainer.ckpt_path={folder}", f"trainer.export_path={folder}-exports"]
    script = Path(__file__).with_name("startup_phases.py")
    done = subprocess.run(
        [sys.executable, str(script), *arguments, *folders], env=clean_environment(), capture_output=True, text=True
    )
    if done.returncode != 0:
        sys.exit(done.stderr[-4000:])
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def clean_environment() -> dict[str, str]:
    """Return a user's environment: PATH, HOME, and the package indexes of this machine."""
    index = ("PIP_", "UV_FIND_LINKS", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_EXTRA_INDEX", "SSL_CERT_")
    variables = {name: value for name, value in os.environ.items() if name.startswith(index)}
    return variables | {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"], "PYTHONUNBUFFERED": "1"}


def to_first_step(command: list[str], folder: Path) -> float:
    """Run a command, and return the seconds from its start to the output line of its first step."""
    folders = [f"trainer.ckpt_path={folder}", f"trainer.export_path={folder}-exports"]
    began = time.monotonic()
    with subprocess.Popen(
        [*command, *folders],
        cwd=REPOSITORY,
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step 1/1 "):
                elapsed_s = time.monotonic() - began
                process.stdout.read()
                return elapsed_s
    sys.exit(f"{' '.join(command[:4])} ... ended with status {process.returncode} before its first step.")


if __name__ == "__main__":
    main()
