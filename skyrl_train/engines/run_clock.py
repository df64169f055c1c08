"""How long requests have run: time in which they wait for others before them does not count against a deadline."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable

from skyrl_train import trace


class RunClock:
    """The clocks of an engine's requests, in order of arrival.

    A request's clock starts once fewer than `slots` of those before it are unfinished: an engine that runs so many at a
    time then has room for it. If it started on arrival, the long answers of a large batch would be cut for having
    waited, and training would learn that answers are short.
    """

    def __init__(self, slots: int):
        self._slots = slots
        self._waiting: dict[str, float | None] = {}
        """Request id -> seconds it may run; in order."""
        self._running: dict[str, tuple[float, float]] = {}
        """Request id -> time.monotonic() of its start and of its deadline."""

    def add(self, requests: Iterable[tuple[str, float | None]]) -> None:
        """(request id, seconds that it may run; None: as long as it takes) of requests that arrive, in order."""
        self._waiting |= dict(requests)
        self._start()

    def remove(self, request_id: str) -> float:
        """A request is finished; returns the seconds that it has run, a span of the run's time line."""
        self._waiting.pop(request_id, None)
        started, _ = self._running.pop(request_id, (math.inf, 0.0))
        if started < math.inf and trace.on():
            trace.add("request", trace.unix(started), row="requests", overlaps=True, id=request_id)
        self._start()
        return max(0.0, time.monotonic() - started)

    def late(self) -> list[str]:
        """The requests whose deadline has passed."""
        now = time.monotonic()
        return [request_id for request_id, (_, expires) in self._running.items() if expires <= now]

    def next_deadline(self) -> float:
        """time.monotonic() at which the next request will be late; infinity for never."""
        return min((expires for _, expires in self._running.values()), default=math.inf)

    def _start(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) < self._slots:
            request_id = next(iter(self._waiting))
            seconds = self._waiting.pop(request_id)
            self._running[request_id] = now, math.inf if seconds is None else now + seconds
