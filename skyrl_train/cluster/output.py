"""Where the processes of actors print to: a file of the run for each of them."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray._private.ray_logging import global_worker_stdstream_dispatcher as printers

from skyrl_train.config.secrets import redact
from skyrl_train.log_files import KeptShort

log = logging.getLogger(__name__)
_RAYS_OWN = ("raylet", "autoscaler")
_PRINTER = "ray_print_logs"
"""Ray's name of what prints lines of workers on the driver's terminal."""


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


def log_rays_own_lines() -> None:
    """What Ray says of itself is no news of a run: it goes to the log. Other lines of workers are printed as before."""
    for name, show in list(printers.handlers):
        if name == _PRINTER and not isinstance(show, _Sorted):
            printers.remove_handler(name)
            printers.add_handler(name, _Sorted(show))


class _Sorted:
    def __init__(self, show: Callable[[Any], None]):
        self._show = show

    def __call__(self, data: Any) -> None:
        if data.get("pid") not in _RAYS_OWN:
            self._show(data)
            return
        for line in data.get("lines", ()):
            log.info("(%s) %s", data["pid"], line)


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
