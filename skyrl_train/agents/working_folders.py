"""Removal of the working folders of agents, in which an agent may have left anything."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path


def make_writable(folder: Path) -> None:
    """Give the owner of a folder all rights."""
    folder.chmod(stat.S_IMODE(folder.stat().st_mode) | stat.S_IRWXU)


def remove_folder(folder: Path) -> None:
    """Remove a folder, also if folders in it are not writable, such as those of Go's modules."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        with suppress(OSError):
            make_writable(folder)
            for parent, names, _ in os.walk(folder):
                for path in (Path(parent, name) for name in names):
                    if not path.is_symlink():
                        make_writable(path)
        shutil.rmtree(folder, ignore_errors=True)
