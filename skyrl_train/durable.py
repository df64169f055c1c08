"""Files that survive a power cut, and what they held when they were written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import NamedTuple


class Written(NamedTuple):
    """What a file held when it was written."""

    size: int
    """Bytes."""
    sha256: str


def describe(path: Path, *, sync: bool) -> Written:
    """Size and SHA-256 of a file; with `sync` it is durable first. Raises OSError."""
    with path.open("rb") as handle:
        if sync:
            os.fsync(handle.fileno())
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
        return Written(os.fstat(handle.fileno()).st_size, digest)


def write_durably(path: Path, text: str) -> None:
    """Replace a small file atomically: readers see either the old text or the new one, even after a power cut."""
    temporary = path.with_name(f".{path.name}.new")
    with temporary.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
