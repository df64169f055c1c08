"""Where the processes of actors print to: a file of the run for each of them."""

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
    """From now on this process, and those that it starts, print to `path`, if its folder is on this node."""
    try:
        file = path.open("ab", buffering=0)
    except OSError:
        return
    with file:
        sys.stdout.flush()
        sys.stderr.flush()
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    before, sys.stdout, sys.stderr = (sys.stdout, sys.stderr), _stream(1), _stream(2)
    for handler in _stream_handlers():  # of libraries that were imported early
        if handler.stream in before:
            handler.setStream(sys.stdout if handler.stream is before[0] else sys.stderr)
    print(f"--- {header}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}", flush=True)
    LogRotator(path).__enter__()  # until the process ends


def _stream_handlers() -> Iterator[logging.StreamHandler[Any]]:
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            yield from (one for one in logger.handlers if isinstance(one, logging.StreamHandler))


@contextmanager
def _log_raylet_output() -> Iterator[None]:
    """Inside, what Ray's raylets say goes to the log: it is no news of a run. Other lines are printed as ever."""
    shown, handlers = ray_worker.print_to_stdstream, list(printers.handlers)
    ray_worker.print_to_stdstream = partial(_show_or_log, shown)
    printers.handlers = [(name, partial(_show_or_log, show)) for name, show in handlers]
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = shown
        printers.handlers = handlers


log_raylet_output = RefCountedContext(_log_raylet_output)


def _show_or_log(show: Callable[..., None], data: Any, **how: Any) -> None:
    if data.get("pid") != _RAYLET:
        show({**data, "lines": [escape_multiline(line) for line in data.get("lines", ())]}, **how)
        return
    for line in data.get("lines", ()):
        log.info("(%s) %s", _RAYLET, line)


def _stream(descriptor: int) -> io.TextIOWrapper:
    raw: Any = _RedactingFile(descriptor, "ab", closefd=False)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


class _RedactingFile(io.FileIO):
    """Without secrets and control characters. What cannot be written is lost: a full disk fails nobody."""

    def write(self, data: Any) -> int:
        text = bytes(data).decode("utf-8", "surrogateescape")
        with suppress(OSError):
            super().write(_shown(redact(text, _credentials())).encode())
        return len(data)


def _shown(text: str) -> str:
    """Without control characters but tabs, line ends and returns, by which a progress bar overwrites itself."""
    return "".join(part if part in "\t\n\r" else escape_control_chars(part) for part in _SEPARATORS.split(text))


@cache
def _credentials() -> dict[str, str]:
    """Those variables: there are hundreds of others, and many lines."""
    return secret_variables()
