"""Imports without garbage collection, for packages that define half a million objects."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable

PRELOAD_ENV = "SKYRL_PRELOAD"
"""Environment variable that is set while Ray starts: modules that workers import early, separated by commas."""


def import_without_gc(names: Iterable[str]) -> None:
    """Import modules with the garbage collector disabled.

    Objects of a module live as long as the process, but the collector scans them again and again while their number
    grows. That takes a tenth to a fifth of the time of importing torch and transformers. Raises what an import raises.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        if was_enabled:
            gc.enable()
