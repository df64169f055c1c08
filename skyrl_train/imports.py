"""Imports of packages that define half a million objects."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Iterable


def import_modules(names: Iterable[str]) -> None:
    """Import modules without garbage collection, and exempt from it what is there then (`gc.freeze`).

    What a module defines stays as long as the process, yet the collector looks through it again and again while it
    grows: that is a fifth of the time of importing torch and transformers.
    """
    new = [name for name in names if name not in sys.modules]
    if not new:
        return
    gc.collect()  # what is garbage now would be kept for ever
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in new:
            importlib.import_module(name)
    finally:
        gc.freeze()
        if collects:
            gc.enable()
