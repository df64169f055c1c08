"""Printing and logging of text that a terminal must not interpret."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

_log = logging.getLogger(__name__)


def print_stderr(text: str) -> None:
    """Print lines to stderr with control characters escaped, because they may quote a model's or a program's output.

    The text also goes to the log. Output errors, for example of a full disk, are ignored.
    """
    _log.info("%s", text)
    with suppress(OSError):
        print(escape_multiline(text), file=sys.stderr, flush=True)


def print_stdout(text: str) -> None:
    """Print lines to stdout with control characters escaped, and characters that its encoding does not have.

    Output errors are ignored.
    """
    with suppress(OSError, ValueError):  # the disk is full, or stdout is closed
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
        print(escape_multiline(text).encode(encoding, "backslashreplace").decode(encoding), flush=True)


class EscapingFormatter(logging.Formatter):
    """A log formatter that escapes control characters: storage, servers and other machines choose parts of the text."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the formatted record, with control characters of each line escaped."""
        return escape_multiline(super().format(record))


def escape_last_resort_warnings() -> None:
    """Escape control characters in what Python prints for loggers without handlers.

    Changes the global `logging.lastResort`, so only for command lines, which own their process.
    """
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(EscapingFormatter())


def escape_control_chars(text: str) -> str:
    r"""Return the text as one printable line: terminal escapes, NUL, line ends and direction marks become `\\x1b`,
    `\\n`, ...
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def escape_multiline(text: str) -> str:
    """Return the text with the control characters of each line escaped. Line ends stay, and tabs become spaces."""
    return (
        text if text.isprintable() else "\n".join(escape_control_chars(line.expandtabs()) for line in text.split("\n"))
    )
