"""The wheel of this checkout, built without writing into it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.report.viewer_page import render_page
from tests.support.viewer_page import VIEWER_UNAVAILABLE, viewer_unavailable_reason

ROOT = Path(__file__).parents[2]


def build_wheel(folder: Path) -> Path:
    """Build the wheel in `folder` and return its path."""
    done = build("wheel", copied_source(folder / "source"), folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("skyrl_train-*.whl")
    return wheel


def copied_source(source: Path, with_page: bool = True) -> Path:
    """Copy the sources of packages to a new folder, without viewer/. Skip the test if its page cannot be built.

    `with_page=False` leaves out the built page.
    """
    if viewer_unavailable_reason():
        pytest.skip(VIEWER_UNAVAILABLE)
    render_page()  # builds it
    for name in ("skyrl_train", "config"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    if not with_page:
        shutil.rmtree(source / "skyrl_train" / "report" / "page")
    return source


def build(kind: str, source: Path, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Build a "wheel", an "editable" one, or an "sdist" of the files in `source` into `folder`."""
    code = "import sys; from setuptools import build_meta; getattr(build_meta, 'build_' + sys.argv[1])(sys.argv[2])"
    return subprocess.run(
        [sys.executable, "-c", code, kind, str(folder)],
        cwd=source, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
