"""The file in a run's folder that says how many engines the run should have: both ends of it."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skyrl_train.durable import write_durably
from skyrl_train.errors import ConfigError

ENGINES_FILE = "engines.json"
_KEY = "num_inference_engines"


def write_wanted(folder: Path, number: int) -> None:
    """Ask the run in `folder` for this many engines; what reads the file finds the old number or the new one."""
    write_durably(folder / ENGINES_FILE, json.dumps({_KEY: number}) + "\n")


def read_wanted(folder: Path) -> int:
    """The number that was asked for. Raises ConfigError for a file that does not say one, FileNotFoundError."""
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


def stamp(folder: Path) -> tuple[int, int] | None:
    """Another one whenever the file was written, with the same number too; None if there is no file."""
    try:
        found = (folder / ENGINES_FILE).stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ino


@contextmanager
def changing(folder: Path) -> Iterator[None]:
    """Inside, no other process that asks so changes the number: two who add one engine each add two."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def why_fixed(*, colocate_all: bool, run_engines_locally: bool) -> str | None:
    """Why the number of engines of a run cannot change, and what to do; None if it can."""
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
