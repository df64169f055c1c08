"""Where the processes of actors print to: a file of the run for each of them."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from ray._private import worker as ray_worker
from ray._private.ray_logging import global_worker_stdstream_dispatcher as printers

from skyrl_train.config.secrets import redact
from skyrl_train.log_files import KeptShort

log = logging.getLogger(__name__)
_RAYLET = "raylet"


def append_output_to(path: Path, header: str) -> None:
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
    sys.stdout, sys.stderr = _Redacting(1), _Redacting(2)
    print(f"--- {header}, {time.strftime('%Y-%m-%d %H:%M:%S %z')}", flush=True)
    KeptShort(path).__enter__()  # until the process ends


@contextmanager
def raylets_logged() -> Iterator[None]:
    """Inside, what Ray's raylets say goes to the log: it is no news of a run. Other lines are printed as ever."""
    shown, handlers = ray_worker.print_to_stdstream, list(printers.handlers)
    ray_worker.print_to_stdstream = partial(_show_or_log, shown)
    printers.handlers = [(name, partial(_show_or_log, show)) for name, show in handlers]
    try:
        yield
    finally:
        ray_worker.print_to_stdstream = shown
        printers.handlers = handlers


def _show_or_log(show: Callable[..., None], data: Any, **how: Any) -> None:
    if data.get("pid") != _RAYLET:
        show(data, **how)
        return
    for line in data.get("lines", ()):
        log.info("(%s) %s", _RAYLET, line)


class _Redacting(io.TextIOWrapper):
    """Text to a descriptor, without credentials."""

    def __init__(self, descriptor: int):
        raw: Any = _Lossy(descriptor, "ab", closefd=False)
        super().__init__(raw, encoding="utf-8", errors="backslashreplace", write_through=True)

    def write(self, text: str) -> int:
        super().write(redact(text))
        return len(text)


class _Lossy(io.FileIO):
    """Bytes that cannot be written are lost: a full disk does not fail who prints."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError:
            return len(data)
