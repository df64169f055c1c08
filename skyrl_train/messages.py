"""Lines for the person who started a program."""

from __future__ import annotations

import sys
from contextlib import suppress


def to_stderr(line: str) -> None:
    """Print a line there. If it cannot be written, as on a full disk, it is lost: that ends nothing."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
