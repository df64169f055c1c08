"""What a client knows of one of its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.clock import now
from skyrl_train.engines.base import EngineHealth
from skyrl_train.engines.progress import Progress


class BusyClock:
    """Counts the seconds in which calls were running."""

    def __init__(self) -> None:
        self._running = 0
        self._seconds = self._until = 0.0

    def change(self, calls: int) -> None:
        self._seconds, self._until = self.seconds, now()
        self._running += calls

    @property
    def seconds(self) -> float:
        return self._seconds + (now() - self._until if self._running else 0.0)


@dataclass(eq=False, slots=True)
class EngineRecord:
    """An engine and its state as the client knows it; a replacement under the same name gets a new record."""

    engine: Any
    name: str
    progress: Progress
    busy: BusyClock
    load: int = 0
    """Tokens of running requests: their prompts and max_tokens."""
    cause: str | None = None
    """The first error, after which it gets no more requests; None while it is alive."""
    since: float = field(default_factory=now)
    empty: asyncio.Event | None = None
    """Of one that is to leave, and gets no more requests: set when it has none left."""

    @property
    def takes_requests(self) -> bool:
        return self.cause is None and self.empty is None

    def unload(self, tokens: int, _: object = None) -> None:
        self.load -= tokens
        if self.empty is not None and not self.load:
            self.empty.set()

    def mark_dead(self, error: BaseException) -> None:
        self.cause = self.cause or f"{type(error).__name__}: {error}"


def peaks(every: Sequence[EngineHealth]) -> dict[str, float]:
    """The memory of the engine that needed most, if engines report it (see report/memory.py)."""
    found = [(name, gib) for one in every for name, gib in one.extra.items() if name.endswith("_gib")]
    return {f"memory/engine_{name}": max(gib for n, gib in found if n == name) for name, _ in found}
