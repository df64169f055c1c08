"""The parts, cheapest and most telling first. A part imports what it needs when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.gpu_check.report import Report, Setting


@dataclass(frozen=True)
class Part:
    """`run` of a module of this package, or the function named after a colon."""

    name: str
    what: str
    module: str

    def load(self) -> Callable[[Setting, Report], None]:
        module, _, function = self.module.partition(":")
        found: Callable[[Setting, Report], None] = getattr(
            importlib.import_module(f"tests.gpu_check.{module}"), function or "run"
        )
        return found


PARTS = (
    Part("environment", "machine, versions, imports", "environment"),
    Part("attention", "packed attention against SDPA", "attention"),
    Part("groups", "single-rank NCCL, deadlines", "groups"),
    Part("ipc", "200 syncs through shared memory while copies are late", "ipc"),
    Part("sync", "a colocated sync of 1.5B parameters", "ipc:run_large"),
)
