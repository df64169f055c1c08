"""The file engines.json in a run's folder, which holds the number of engines that the run should have."""

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
    """Write the number of engines that the run in `folder` should have.

    The file is replaced atomically: a concurrent reader gets the old number or the new one.

    Raises:
        OSError: The file cannot be written.
    """
    atomic_write_text(folder / ENGINES_FILE, json.dumps({_KEY: number}) + "\n")


def read_target(folder: Path) -> int:
    """Return the number of engines that the run in `folder` should have.

    Raises:
        ConfigError: The file does not hold an integer of at least 1 under its key.
        FileNotFoundError: There is no file.
    """
    file = folder / ENGINES_FILE
    text = file.read_text(errors="replace")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    number = content.get(_KEY) if isinstance(content, dict) else None
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(
            f'{file} holds {text.strip()[:100]!r}. Write {{"{_KEY}": N}}, where N is an integer of at least 1.'
        )
    return number


def target_file_version(folder: Path) -> tuple[int, int] | None:
    """Return a value that changes with every write of the file, even of the same number; None if there is no file."""
    try:
        status = (folder / ENGINES_FILE).stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_ino


@contextmanager
def lock_target_file(folder: Path) -> Iterator[None]:
    """Hold an exclusive lock on the run's folder, so that concurrent read-and-write changes of the number do not
    collide.

    Blocks until the lock is free. Processes that do not use the lock are not stopped.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def fixed_count_reason(*, colocate_all: bool, run_engines_locally: bool) -> str | None:
    """Return the reason why the number of engines of a run cannot change and what to do, or None if it can.

    The text continues a sentence, such as "engines.json has no effect: ...".
    """
    if not run_engines_locally:
        return (
            "its engines are remote servers (generator.run_engines_locally=false), which the run neither starts nor "
            "stops. Stop the run, change generator.remote_inference_engine_urls, and start it again: it resumes."
        )
    if colocate_all:
        return (
            "its engines are time-shared with the trainer on the same GPUs (trainer.placement.colocate_all=true). Stop "
            "the run and start it again with another generator.num_inference_engines, or with "
            "trainer.placement.colocate_all=false, which allows adding and removing engines: it resumes."
        )
    return None
