"""Lines that people read, on stderr or elsewhere."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

_log = logging.getLogger(__name__)


def print_stderr(text: str) -> None:
    """Print lines there, of which nothing is obeyed by a terminal: they may quote what a model or a program wrote.

    If they cannot be written, as on a full disk, they are lost: that ends nothing.
    """
    _log.info("%s", text)
    with suppress(OSError):
        print(escape_multiline(text), file=sys.stderr, flush=True)


def print_stdout(text: str) -> None:
    """Print lines there in the same way: what its encoding does not have is escaped, too."""
    with suppress(OSError, ValueError):  # full, or closed
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(escape_multiline(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)


class EscapingFormatter(logging.Formatter):
    """Formats log records whose text nothing obeys: storage, servers and other machines choose parts of it."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_multiline(super().format(record))


def escape_last_resort_warnings() -> None:
    """Format so what Python shows of loggers without handlers. For command lines, which own their process."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(EscapingFormatter())


def escape_control_chars(text: str) -> str:
    """Make one printable line: terminal escapes, NUL, line ends and direction marks are escaped (`\\x1b`, `\\n`)."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_multiline(text: str) -> str:
    """The same for a text of several lines, which stay lines; tabs become spaces."""
    return (
        text if text.isprintable() else "\n".join(escape_control_chars(line.expandtabs()) for line in text.split("\n"))
    )
