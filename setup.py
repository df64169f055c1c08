"""Puts the page of `report` and `watch` into wheels and source archives; all else is in pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist
from setuptools.errors import SetupError

ROOT = Path(__file__).parent
PAGE = [ROOT / "skyrl_train" / "report" / "page" / name for name in ("page.js", "page.css")]
NOT_BUILT = "the page of `skyrl-train report` is not built: install Node.js 18 or later and run scripts/viewer."


def build_page(needed: bool) -> None:
    """From viewer/, where that and npm are: a source archive has what was built from it.

    Raises SetupError if there is none in the end and it is needed; all other commands work without.
    """
    if (ROOT / "viewer").is_dir() and shutil.which("npm"):
        try:
            subprocess.run(["bash", str(ROOT / "scripts" / "viewer")])
        except OSError as error:
            print(f"scripts/viewer: {error}", file=sys.stderr)
    if all(path.is_file() for path in PAGE):
        return
    if needed or os.environ.get("SKYRL_NEEDS_PAGE") == "1":
        raise SetupError(NOT_BUILT)
    print(f"warning: {NOT_BUILT} The rest works without.", file=sys.stderr)


class BuildWithPage(build_py):
    def run(self) -> None:
        if not self.editable_mode:  # a checkout builds it when it is asked for
            build_page(needed=False)
        super().run()


class ArchiveWithPage(sdist):
    def run(self) -> None:
        build_page(needed=True)
        super().run()


setup(cmdclass={"build_py": BuildWithPage, "sdist": ArchiveWithPage})
