"""Benchmarks run to their tables, whatever the figures are on a busy machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts" / "benchmarks"
SHORT = ["--backends", "transformers", "--lengths", "equal", "--schedules", "synchronous", "staleness 1"]


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "arguments", "row"),
    [
        ("grpo_step.py", ["--against", "HEAD", "--steps", "1"], "| HEAD / skyrl_train | "),
        ("async.py", [*SHORT, "--steps", "1"], "| transformers | equal | staleness 1 | "),
    ],
)
def test_a_benchmark_of_runs_ends_with_its_table(script: str, arguments: list[str], row: str):
    path = os.pathsep.join([str(SCRIPTS.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, str(SCRIPTS / script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=280, env=os.environ | {"PYTHONPATH": path}, check=False
    )
    assert done.returncode == 0 and row in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
