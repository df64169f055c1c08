"""Redirection of the output of actor processes to log files of the run, one per actor."""

from __future__ import annotations

import io
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from ray._private import worker as ray_worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as printers

from skyrl_train.aio import RefCountedContext
from skyrl_train.config.redaction import redact, secret_variables
from skyrl_train.log_rotation import LogRotator
from skyrl_train.terminal import escape_control_chars, escape_multiline

log = logging.getLogger(__name__)
_RAYLET = "raylet"
_SEPARATORS = re.compile("([\t\n\r])")


def redirect_output(path: Path, header: str) -> None:
    """Redirect stdout and stderr of this process, and of the processes that it starts, to a file.

    Python's own output has secrets and control characters removed. The file is rotated until this process ends. Does
    nothing if the file cannot be opened, for example because its folder is not on this node.

    Args:
        path: File to append to.
        header: Text of the first line, which also has the time.
    """
    try:
        file = path.open("ab", buffering=0)
    except OSError:
        return
    with file:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    redact_output()
    print(f"--- {header}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}", flush=True)
    LogRotator(path).__enter__()  # until the process ends


def redact_output() -> None:
    """Remove secrets and control characters from the output of this process's Python code."""
    previous, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), _stream(1), _stream(2)
    for handler in _stream_handlers():  # libraries that were imported before hold the old streams
        if handler.stream in previous:
            handler.setStream(sys.stdout if handler.stream is previous[0] else sys.stderr)


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from (handler for handler in logger.handlers if isinstance(handler, logging.StreamHandler))


@contextmanager
def _log_raylet_output() -> Iterator[None]:
    """Send the output of Ray's raylets to the log instead of the terminal inside the block.

    Other output is printed as before, with control characters escaped.
    """
    print_original, handlers = ray_worker.print_to_stdstream, list(printers.handlers)
    ray_worker.print_to_stdstream = partial(_print_or_log, print_original)
    printers.handlers = [(name, partial(_print_or_log, show)) for name, show in handlers]
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = print_original
        printers.handlers = handlers


log_raylet_output = RefCountedContext(_log_raylet_output)


def _print_or_log(print_original: Callable[..., None], data: Any, **options: Any) -> None:
    if data.get("pid") != _RAYLET:
        print_original({**data, "lines": [escape_multiline(line) for line in data.get("lines", ())]}, **options)
        return
    for line in data.get("lines", ()):
        log.info("(%s) %s", _RAYLET, line)


def _stream(descriptor: int) -> io.TextIOWrapper:
    raw: Any = _RedactingFile(descriptor, "ab", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


class _RedactingFile(io.FileIO):
    """A raw file whose writes lose secrets and control characters.

    A failed write is ignored: a full disk must not end an actor.
    """

    def write(self, data: Any) -> int:
        text = bytes(data).decode("utf-8", "surrogateescape")
        with suppress(OSError):
            super().write(_escape_text(redact(text, _credentials())).encode())
        return len(data)


def _escape_text(text: str) -> str:
    """Escape control characters except tabs, line ends and the carriage returns of progress bars."""
    return "".join(part if part in "\t\n\r" else escape_control_chars(part) for part in _SEPARATORS.split(text))


@cache
def _credentials() -> dict[str, str]:
    """Return the environment variables that hold secrets. Cached, because every written line needs them."""
    return secret_variables()
