"""Runs a program as a user starts it, with only PATH and HOME in the environment, and watches its processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[3]
_FOLDERS = [folder for folder in os.environ["PATH"].split(os.pathsep) if not folder.startswith(sys.prefix)]
PATH = os.pathsep.join([str(REPOSITORY / ".uv" / "bin"), *_FOLDERS])
"""The user's PATH without an activated environment, with the uv that scripts/bootstrap installs where there is none."""
_SITE = re.compile(r"(/\S+)/lib/python3\.\d+/site-packages/")
_PACKAGE_SOURCES = ("UV_FIND_LINKS", "SSL_CERT_FILE", "SSL_CERT_DIR")


def clean_environment(home: Path) -> dict[str, str]:
    """Return the environment of `env -i` with PATH and HOME."""
    return {"PATH": PATH, "HOME": str(home)}


def installing_environment(home: Path) -> dict[str, str]:
    """Return the environment of a command that creates a virtual environment: with this machine's package sources."""
    cache = subprocess.run(
        [str(shutil.which("uv", path=PATH)), "cache", "dir"], capture_output=True, text=True, check=True
    )
    sources = {name: os.environ[name] for name in _PACKAGE_SOURCES if name in os.environ}
    return clean_environment(home) | sources | {"UV_CACHE_DIR": cache.stdout.strip()}


@dataclass
class Finished:
    """The output of a program, and observations of its child processes."""

    output: str = ""
    site_prefixes: set[str] = field(default_factory=set)
    """Virtual environments whose packages any process had loaded."""
    workers: set[int] = field(default_factory=set)
    """Process ids of Ray's workers."""


def run_watched(command: Sequence[str], env: dict[str, str], cwd: Path, timeout: float = 400) -> Finished:
    """Run a program that must succeed, and watch its processes meanwhile."""
    seen = Finished()
    with subprocess.Popen(
        command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True
    ) as process:
        ended = threading.Event()
        watcher = threading.Thread(target=_watch, args=(psutil.Process(process.pid), seen, ended))
        watcher.start()
        try:
            seen.output, _ = process.communicate(timeout=timeout)
        finally:
            process.kill()
            ended.set()
            watcher.join()
    assert process.returncode == 0, seen.output[-8000:]
    return seen


def _watch(root: psutil.Process, seen: Finished, ended: threading.Event) -> None:
    while not ended.wait(0.5):
        try:
            below = root.children(recursive=True)
        except psutil.NoSuchProcess:
            return
        for process in below:
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text(errors="replace")
                title = " ".join(process.cmdline())
            except (OSError, psutil.Error):
                continue
            seen.site_prefixes |= set(_SITE.findall(maps))
            if title.startswith("ray::"):
                seen.workers.add(process.pid)
