"""A full disk, simulated by the kernel's limit on the size of a file."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def limit_file_size(file: Path | None, more: int) -> Iterator[None]:
    """Limit every file to the size of `file` plus `more` bytes. A write beyond it is short, then raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = file.stat().st_size if file is not None else 0
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
