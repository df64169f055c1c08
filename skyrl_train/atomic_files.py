"""Files that survive a power cut, and what they held when they were written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO


class FileDigest(NamedTuple):
    """What a file held when it was written."""

    size: int
    """Bytes."""
    sha256: str


def digest_file(path: Path, *, fsync: bool) -> FileDigest:
    """Size and SHA-256 of a file; with `sync` it is durable first. Raises OSError."""
    with path.open("rb") as handle:
        if fsync:
            os.fsync(handle.fileno())
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return FileDigest(os.fstat(handle.fileno()).st_size, digest)


def open_exclusive(path: Path) -> BinaryIO:
    """Create a file to write to. Raises FileExistsError if anything has that name: a link is never followed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o666))


def open_lock(path: Path) -> TextIO:
    """Open a file to lock, made if it is missing. Nothing in it is deleted. Raises OSError, also for a link."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "a+", encoding="utf-8", errors="replace", opener=lambda name, _: os.open(name, flags, 0o666))


@contextmanager
def atomic_write(path: Path, temporary: Path | None = None, *, fsync: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file that takes the place of `path` at the end of the block, or is deleted if the block raises.

    Every temporary file that becomes a file of a run is made here. What a killed process left under its name is
    deleted first, and a link there is never followed.

    Args:
        path: File that readers see either as it was or complete.
        temporary: Path of the temporary file, in the same folder. Default: `.NAME.new`.
        sync: True if the file must survive a power cut.

    Raises:
        OSError: If the disk is full or refuses.
    """
    temporary = temporary or path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        with open_exclusive(temporary) as handle:
            yield handle
            handle.flush()
            if fsync:
                os.fsync(handle.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if fsync:
        fsync_folder(path.parent)


def atomic_write_text(path: Path, text: str) -> None:
    """Replace a small file atomically: readers see either the old text or the new one, even after a power cut."""
    with atomic_write(path) as handle:
        handle.write(text.encode())


def fsync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
