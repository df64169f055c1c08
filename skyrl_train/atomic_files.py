"""Atomic and durable writes of files, and digests of their content."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple, TextIO


class FileDigest(NamedTuple):
    """Size and hash of a file's content."""

    size: int
    """Size in bytes."""
    sha256: str
    """SHA-256, in hex."""


def digest_file(path: Path, *, fsync: bool) -> FileDigest:
    """Return size and SHA-256 of a file.

    Args:
        path: File to read.
        fsync: True to make the file's content durable first.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as handle:
        if fsync:
            os.fsync(handle.fileno())
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return FileDigest(os.fstat(handle.fileno()).st_size, digest)


def open_exclusive(path: Path) -> BinaryIO:
    """Create a file and open it for writing. Links are not followed.

    Raises:
        FileExistsError: Something has that name, even a dangling link.
        OSError: The file cannot be created.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "wb", opener=lambda name, _: os.open(name, flags, 0o666))


def open_lock(path: Path) -> TextIO:
    """Open a lock file for reading and appending, and create it if it is missing. Its content is kept.

    Raises:
        OSError: The file cannot be opened, or is a link.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return open(path, "a+", encoding="utf-8", errors="replace", opener=lambda name, _: os.open(name, flags, 0o666))


@contextmanager
def atomic_write(path: Path, temporary: Path | None = None, *, fsync: bool = True) -> Iterator[BinaryIO]:
    """Yield a temporary file that replaces `path` at the end of the block, or is deleted if the block raises.

    A temporary file that a killed process left is deleted first. A link of that name is not followed.

    Args:
        path: File that readers see either as it was or complete.
        temporary: Path of the temporary file, in the same folder. Default: `.NAME.new`.
        fsync: True if the file must survive a power failure.

    Raises:
        OSError: The file cannot be written, for example because the disk is full.
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
    """Replace a small file atomically. Readers see either the old or the new text, even after a power failure.

    Raises:
        OSError: The file cannot be written.
    """
    with atomic_write(path) as handle:
        handle.write(text.encode())


def fsync_folder(folder: Path) -> None:
    """Make the names of files in a folder durable.

    Raises:
        OSError: The folder cannot be opened or synced.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
