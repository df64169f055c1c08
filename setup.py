"""Puts the page of `report` and `watch` into wheels and source archives; all else is in pyproject.toml."""

from __future__ import annotations

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import SetupError

ROOT = Path(__file__).parent
PAGE = [ROOT / "skyrl_train" / "report" / "page" / name for name in ("page.js", "page.css")]


def build_page() -> None:
    """From viewer/, where that is: a source archive has what was built from it."""
    if (ROOT / "viewer").is_dir() and subprocess.run([ROOT / "scripts" / "viewer"]).returncode == 0:
        return
    if not all(path.is_file() for path in PAGE):
        raise SetupError(
            "the page of `skyrl-train report` is not built: install Node.js 20 or later and run scripts/viewer."
        )


class BuildWithPage(build_py):
    def run(self) -> None:
        if not self.editable_mode:  # a checkout builds it when it is asked for
            build_page()
        super().run()


class ArchiveWithPage(sdist):
    def run(self) -> None:
        build_page()
        super().run()


setup(cmdclass={"build_py": BuildWithPage, "sdist": ArchiveWithPage})
