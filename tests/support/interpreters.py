"""Virtual environments of programs that cannot be installed beside this package, for tests on demand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

UV = shutil.which("uv", path=os.pathsep.join([os.environ["PATH"], str(Path(__file__).parents[2] / ".uv" / "bin")]))
needs_uv = pytest.mark.skipif(UV is None, reason="needs uv")


@contextmanager
def installed(name: str, *packages: str, python: str = sys.executable) -> Iterator[Path]:
    """Yield a folder that every user can read, with a new virtual environment `name` in it.

    Args:
        name: Folder of the virtual environment.
        packages: Requirements to install, from the package index or the cache of uv.
        python: The interpreter.
    """
    assert UV is not None
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        environment = f"{folder}/{name}"
        subprocess.run([UV, "venv", "--quiet", "--python", python, environment], check=True)
        subprocess.run([UV, "pip", "install", "--quiet", "--python", environment, *packages], check=True)
        yield Path(folder)
