"""Times of the phases of an engine's start, for the log and the trace of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from skyrl_train import trace

TRACE_TRACK = "start"


class StartupTimer:
    """The phases of a start, in order. Each is also a span of the trace."""

    def __init__(self) -> None:
        """Start the clock."""
        self._begin = time.time()
        self.phases: dict[str, float] = {}
        """Seconds of each phase."""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record the time of the body as a phase."""
        begin = time.time()
        yield
        self.record(name, begin, time.time())

    def record(self, name: str, begin: float, end: float) -> None:
        """Record a phase between two Unix times."""
        self.phases[name] = self.phases.get(name, 0.0) + end - begin
        trace.add_span(name, begin, end=end, track=TRACE_TRACK)

    def split(self, name: str, parts: Mapping[str, float]) -> None:
        """Count these parts of a phase, by name in seconds, as phases of their own."""
        self.phases[name] = max(0.0, self.phases[name] - sum(parts.values()))
        self.phases |= parts

    def finish(self) -> dict[str, float]:
        """Return the phases, and as `other` the remaining time since the start of the clock."""
        return {**self.phases, "other": max(0.0, time.time() - self._begin - sum(self.phases.values()))}


def describe_startup(total_s: float, phases: Mapping[str, float]) -> str:
    """Return a line such as "ready after 20.1 s: process and imports 9.0, weights 10.2, other 0.9".

    Args:
        total_s: Seconds until the engine was ready.
        phases: Seconds by phase, from `StartupTimer.finish`. The process's own start has the rest of the time.
    """
    process_s = max(0.0, total_s - sum(phases.values()))
    times = {"process and imports": process_s, **phases}
    return f"ready after {total_s:.1f} s: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in times.items())
