"""The names of vLLM and SGLang that skyrl_train uses exist in their CPU builds, as tests/cuda_wheels lists them."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.on_demand
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_used_names_and_signatures_exist(engine: str):
    if find_spec(engine) is None:
        pytest.skip(f"{engine} is not installed; scripts/cpu_engines installs it")
    command = [sys.executable, "-m", "tests.cuda_wheels.check", engine, "--names"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert "checked, 0 failed" in done.stdout
