"""engines.json in a run's folder, which holds the number of engines that the run should have."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.atomic_files import atomic_write_text
from skyrl_train.errors import ConfigError

ENGINES_FILE = "engines.json"
_KEY = "num_inference_engines"


def write_target(folder: Path, number: int) -> None:
    """Ask the run in `folder` for this many engines. Readers find the old number or the new one."""
    atomic_write_text(folder / ENGINES_FILE, json.dumps({_KEY: number}) + "\n")


def read_target(folder: Path) -> int:
    """Return the number that was asked for. Raises ConfigError for a file without a valid one, FileNotFoundError."""
    file = folder / ENGINES_FILE
    text = file.read_text(errors="replace")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    number = found.get(_KEY) if isinstance(found, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f'{file} holds {text.strip()[:100]!r}. Write {{"{_KEY}": N}}, with a whole N of at least 1.')
    return number


def target_file_version(folder: Path) -> tuple[int, int] | None:
    """Return a value that changes whenever the file is written, even with the same number; None if there is no file."""
    try:
        found = (folder / ENGINES_FILE).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


@contextmanager
def lock_target_file(folder: Path) -> Iterator[None]:
    """Keep other processes from changing the number inside: two that add one engine each add two."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fixed_count_reason(*, colocate_all: bool, run_engines_locally: bool) -> str | None:
    """Return why the number of engines of a run cannot change, and what to do; None if it can."""
    if not run_engines_locally:
        return (
            "its engines are servers elsewhere (generator.run_engines_locally=false), which it neither starts nor "
            "ends. End the run, change generator.remote_inference_engine_urls, and start it again: it resumes."
        )
    if colocate_all:
        return (
            "its engines take turns with the trainer on the same slots (trainer.placement.colocate_all=true). End the "
            "run and start it again with another generator.num_inference_engines, or with "
            "trainer.placement.colocate_all=false, with which engines can be added and removed: it resumes."
        )
    return None
