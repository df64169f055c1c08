"""Lines that people read, on stderr or elsewhere."""

from __future__ import annotations

import sys
from contextlib import suppress


def visible(text: str) -> str:
    """Make one printable line: terminal escapes, NUL, line ends and direction marks are escaped (`\\x1b`, `\\n`)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def to_stderr(line: str) -> None:
    """Print a line there. If it cannot be written, as on a full disk, it is lost: that ends nothing."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)
