"""Lines that people read, on stderr or elsewhere."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

_log = logging.getLogger(__name__)


def to_stderr(text: str) -> None:
    """Print lines there, of which nothing is obeyed by a terminal: they may quote what a model or a program wrote.

    If they cannot be written, as on a full disk, they are lost: that ends nothing.
    """
    _log.info("%s", text)
    with suppress(OSError):
        print(visible_lines(text), file=sys.stderr, flush=True)


def visible(text: str) -> str:
    """Make one printable line: terminal escapes, NUL, line ends and direction marks are escaped (`\\x1b`, `\\n`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def visible_lines(text: str) -> str:
    """The same for a text of several lines, which stay lines."""
    return "\n".join(map(visible, text.split("\n")))
