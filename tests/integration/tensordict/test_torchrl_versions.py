"""The oldest release of torchrl that pyproject.toml allows. All other tests run with the newest."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.doc_pages import REPOSITORY

UNIT_TESTS = Path("tests", "unit", "tensordict")
PARTS = ["envs/test_specs.py", "losses/test_grpo.py", "collectors/test_llm_collector.py"]
"""Tests of environments, a loss and a collector: what CI runs."""


@pytest.fixture(scope="module")
def oldest(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment variables for Python with the oldest release, installed in a folder of its own."""
    if shutil.which("uv") is None:
        pytest.skip("needs uv")
    (version,) = re.findall(r'^torchrl = \["torchrl>=([\d.]+),', (REPOSITORY / "pyproject.toml").read_text(), re.M)
    folder = tmp_path_factory.mktemp("torchrl")
    install = ["uv", "pip", "install", "--quiet", "--no-deps", "--target", str(folder), f"torchrl=={version}"]
    subprocess.run([*install, "--python", sys.executable], check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    code = "import torchrl; print(torchrl.__version__)"
    found = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == version
    return environment


@pytest.mark.parametrize("tests", [PARTS, pytest.param(["."], marks=pytest.mark.on_demand)], ids=["parts", "all"])
def test_unit_tests_pass_with_oldest_torchrl(oldest: dict[str, str], tests: list[str]):
    paths = [str(UNIT_TESTS / name) for name in tests]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not on_demand", *paths]
    ran = subprocess.run(command, cwd=REPOSITORY, env=oldest, capture_output=True, text=True, timeout=580)
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]
