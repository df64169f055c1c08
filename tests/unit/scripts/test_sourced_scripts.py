"""Scripts that are meant to be sourced leave the shell that sources them running."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.mark.parametrize("script", ["bootstrap", "cpu_engines"])
def test_subshell_goes_on_after_sourcing(script: str, tmp_path: Path):
    (tmp_path / "uv").symlink_to("/bin/true")  # the environment of the tests stays as it is
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = f"( . {SCRIPTS / script}; echo sourced )"
    done = subprocess.run(["bash", "-c", command], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "sourced\n", done.stderr
