"""Imports of packages that define half a million objects."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterable

PRELOAD_ENV = "SKYRL_PRELOAD"
"""A variable of ours, set for the length of Ray's start: what workers import early, separated by commas."""


def import_without_gc(names: Iterable[str]) -> None:
    """Import modules without garbage collection.

    What a module defines stays as long as the process, yet the collector looks through it again and again while it
    grows: that is a tenth to a fifth of the time of importing torch and transformers.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        for name in names:
            importlib.import_module(name)
    finally:
        if collects:
            gc.enable()
