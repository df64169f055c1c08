"""Files that processes of a run write what they print to: appended to, kept short, and never a reason to fail."""

from __future__ import annotations

import os
import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from skyrl_train.atomic_files import atomic_write

MAX_LOG_BYTES = 32 * 2**20
"""Size at which a file is emptied; what it held is kept beside it."""
BACKUP_COUNT = 2
"""How many earlier parts of a file are kept: NAME.1 is the latest of them."""
POLL_INTERVAL_S = 10.0
_ATTEMPT = re.compile(r"attempt_(\d+)")


def archive_previous_attempt(folder: Path, *others: Path) -> None:
    """Make `folder`, and move what an earlier attempt of the run left there to `attempt_1`, `attempt_2`, ...

    `others`: files of the attempt that are elsewhere, and are moved with it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries = list(folder.iterdir())
    files = [path for path in (*entries, *others) if path.is_file()]
    if not files:
        return
    numbers = [int(found[1]) for path in entries if (found := _ATTEMPT.fullmatch(path.name))]
    apart = folder / f"attempt_{max(numbers, default=0) + 1}"
    apart.mkdir()
    for path in files:
        path.replace(apart / path.name)


class LogRotator:
    """Inside, files that this process or others append to are kept short."""

    def __init__(self, *paths: Path):
        self._left = threading.Event()
        self._watches = [
            threading.Thread(target=_rotate_periodically, args=(path, self._left), name="log file", daemon=True)
            for path in paths
        ]

    def __enter__(self) -> LogRotator:
        for watch in self._watches:
            watch.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._left.set()
        for watch in self._watches:
            watch.join()


def rotate(path: Path) -> None:
    """Empty a file that is over its limit, and keep what it held. It stays the file that others have open."""
    with suppress(OSError):  # not there yet, or no room for a copy: next time
        if path.stat().st_size < MAX_LOG_BYTES:
            return
        with atomic_write(path.with_name(f"{path.name}.1"), fsync=False) as copy:
            with path.open("rb") as source:
                shutil.copyfileobj(source, copy)
            for number in range(BACKUP_COUNT, 1, -1):
                with suppress(FileNotFoundError):
                    path.with_name(f"{path.name}.{number - 1}").replace(path.with_name(f"{path.name}.{number}"))
        os.truncate(path, 0)  # whoever appends goes on at its new end


def _rotate_periodically(path: Path, left: threading.Event) -> None:
    while not left.wait(POLL_INTERVAL_S):
        rotate(path)
