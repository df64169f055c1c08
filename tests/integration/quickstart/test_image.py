"""The Docker image works with the commands of docs/get_started/installation.md, if Docker is available."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.doc_pages import REPOSITORY, find_commands

TAG = "skyrl-train-of-the-tests"


def docker(*words: str, folder: Path, timeout: float) -> str:
    done = subprocess.run(
        ["docker", *words], cwd=folder, capture_output=True, text=True, timeout=timeout, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def as_here(words: tuple[str, ...], folder: Path) -> list[str]:
    """Return a command's arguments with a tag for tests, and a test folder as $PWD."""
    return [TAG if word == "skyrl-train" else word.replace("$PWD", str(folder)) for word in words[1:]]


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_it_is_built_and_looks_at_its_machine(tmp_path: Path):
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        pytest.skip("Docker or its daemon is not available")
    (build,) = find_commands(r"docker build -t skyrl-train \.$")
    (run,) = find_commands("docker run .* skyrl-train doctor$")
    tmp_path.chmod(0o777)  # the user of the image is not that of the tests
    docker(*as_here(build.words, tmp_path), folder=REPOSITORY, timeout=3000)
    try:
        said = docker(*as_here(run.words, tmp_path), folder=tmp_path, timeout=300)
    finally:
        docker("image", "rm", "--force", TAG, folder=tmp_path, timeout=60)
    assert "torch" in said and said.splitlines()[-1] == "0 problems"
