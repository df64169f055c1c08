"""Check the CUDA wheels of the engines (docs/contributing/gpu_checks.md). Requires uv, a C compiler and 15 GB."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ENGINES = ("vllm", "sglang")
MIN_FREE_GB = 15
"""Disk space for an environment and its download."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/check_cuda_wheels", description=__doc__)
    parser.add_argument("engine", nargs="?", choices=(*ENGINES, "both"), default="both")
    parser.add_argument("--python", default="3.11", help="Python version of the environments: 3.11 or 3.12")
    arguments = parser.parse_args()
    results = {engine: check(engine, arguments.python) for engine in ENGINES if arguments.engine in (engine, "both")}
    for engine, has_passed in results.items():
        print(f"{engine}: {'all checks passed' if has_passed else 'some checks failed, see MISS above'}")
    return 0 if all(results.values()) else 1


def check(engine: str, python: str) -> bool:
    """Create an environment, run the checks in it, and delete it; return True if all passed."""
    with tempfile.TemporaryDirectory(prefix="skyrl-cuda-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        free = shutil.disk_usage(folder).free / 1e9
        if free < MIN_FREE_GB:
            print(
                f"{folder} has {free:.0f} GB of free space, but {MIN_FREE_GB} are needed. Set TMPDIR to a larger disk."
            )
            return False
        interpreter = make_environment(folder / "environment", engine, python)
        make_driver(folder / "driver")
        (folder / "tmp").mkdir()
        environment = os.environ | {
            "PYTHONPATH": str(REPOSITORY),
            "LD_LIBRARY_PATH": str(folder / "driver"),
            "TMPDIR": str(folder / "tmp"),  # Engines leave files there.
            "HF_HUB_OFFLINE": "1",
            "WANDB_MODE": "offline",
        }
        done = subprocess.run(
            [interpreter, "-m", "tests.cuda_wheels.check", engine], cwd=REPOSITORY, env=environment, check=False
        )
        return done.returncode == 0


def make_environment(folder: Path, engine: str, python: str) -> str:
    """Install what `uv run --extra` installs from the package index alone; return the environment's Python."""
    environment = {name: value for name, value in os.environ.items() if name not in ("UV_FIND_LINKS", "PIP_FIND_LINKS")}
    interpreter = str(folder / "bin" / "python")
    extras = ["--extra", engine, "--extra", "flash-attn"]
    commands = (
        ["uv", "venv", "--quiet", "--python", python, str(folder)],
        ["uv", "pip", "install", "--python", interpreter, "-r", "pyproject.toml", *extras],
    )
    for command in commands:
        print("$", *command, flush=True)
        done = subprocess.run(command, cwd=REPOSITORY, env=environment, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
    return interpreter


def make_driver(folder: Path) -> None:
    folder.mkdir()
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("driver.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source], check=True)
    shutil.copy(library, folder / "libnvidia-ml.so.1")


if __name__ == "__main__":
    sys.exit(main())
