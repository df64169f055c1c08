"""A program as a user starts it, in an environment with PATH and HOME and nothing else, and watched meanwhile."""

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
_FOLDERS = [folder for folder in os.environ["PATH"].split(os.pathsep) if not folder.startswith(sys.prefix)]
PATH = os.pathsep.join([str(REPOSITORY / ".uv" / "bin"), *_FOLDERS])
"""The user's, with the uv that scripts/bootstrap gets where there is none; no environment is activated."""
_SITE = re.compile(r"(/\S+)/lib/python3\.\d+/site-packages/")
_PACKAGE_SOURCES = ("UV_FIND_LINKS", "SSL_CERT_FILE", "SSL_CERT_DIR")


def clean_environment(home: Path) -> dict[str, str]:
    """`env -i` with PATH and HOME."""
    return {"PATH": PATH, "HOME": str(home)}


def installing_environment(home: Path) -> dict[str, str]:
    """The same for a command that makes an environment: with where this machine gets its packages from."""
    cache = subprocess.run(
        [str(shutil.which("uv", path=PATH)), "cache", "dir"], capture_output=True, text=True, check=True
    )
    sources = {name: os.environ[name] for name in _PACKAGE_SOURCES if name in os.environ}
    return clean_environment(home) | sources | {"UV_CACHE_DIR": cache.stdout.strip()}


@dataclass
class Finished:
    """What a program printed, and what was seen of the processes below it."""

    output: str = ""
    site_prefixes: set[str] = field(default_factory=set)
    """Of every process, the environments whose packages it had loaded."""
    workers: set[int] = field(default_factory=set)
    """Processes of Ray's workers."""


def run_watched(command: Sequence[str], env: dict[str, str], cwd: Path, timeout: float = 400) -> Finished:
    """Run to the end, which must be good; look into its processes all the while."""
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
