"""Log files of a run's processes: appended to, limited in size, and never a reason for a run to fail."""

from __future__ import annotations

import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from skyrl_train.atomic_files import atomic_write

MAX_LOG_BYTES = 32 * 2**20
"""Size at which a file is emptied, after its content was copied."""
BACKUP_COUNT = 2
"""Number of copies that are kept. NAME.1 is the latest."""
POLL_INTERVAL_S = 10.0
_ATTEMPT = re.compile(r"attempt_(\d+)")


def archive_previous_attempt(folder: Path, *others: Path) -> None:
    """Create `folder`, and move the files of an earlier attempt of the run to `attempt_1`, `attempt_2`, ... in it.

    Args:
        folder: Folder of log files.
        *others: Other files of the attempt, which are moved as well.

    Raises:
        OSError: A folder cannot be created or a file cannot be moved.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(folder.iterdir())
    files = [path for path in (*entries, *others) if path.is_file()]
    if not files:
        return
    numbers = [int(match[1]) for path in entries if (match := _ATTEMPT.fullmatch(path.name))]
    archive = folder / f"attempt_{max(numbers, default=0) + 1}"
    archive.mkdir()
    for path in files:
        path.replace(archive / path.name)


class LogRotator:
    """A context that keeps log files short, to which this process or others append.

    A thread per file checks its size every 10 s and rotates it.
    """

    def __init__(self, *paths: Path):
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=_rotate_periodically, args=(path, self._stop), name="log file", daemon=True)
            for path in paths
        ]

    def __enter__(self) -> LogRotator:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def rotate(path: Path) -> None:
    """Copy a file that has reached its size limit to NAME.1, then empty it. Processes that have it open keep appending
    to it.

    Earlier copies are renamed, and the oldest is replaced. Errors of the file system are ignored.
    """
    with suppress(OSError):  # the file does not exist yet, or the disk is full: the next check tries again
        if path.stat().st_size < MAX_LOG_BYTES:
            return
        with atomic_write(path.with_name(f"{path.name}.1"), fsync=False) as copy:
            with path.open("rb") as source:
                shutil.copyfileobj(source, copy)
            for number in range(BACKUP_COUNT, 1, -1):
                with suppress(FileNotFoundError):
                    path.with_name(f"{path.name}.{number - 1}").replace(path.with_name(f"{path.name}.{number}"))
        os.truncate(path, 0)  # processes that append continue at its new end


def _rotate_periodically(path: Path, stop: threading.Event) -> None:
    while not stop.wait(POLL_INTERVAL_S):
        rotate(path)
