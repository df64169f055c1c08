"""Weighted sums by name. A mean exists only at flush, so uneven micro-batches and ranks stay exact."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from skyrl_train import trace
from skyrl_train.clock import now


class Metrics:
    """Accumulates means (sum, weight), plain totals and maxima by name.

    Example:
        m = Metrics()
        m.add("reward", 1.0, weight=3); m.add("reward", 0.0)
        m.flush()  # {"reward": 0.75}
    """

    def __init__(self) -> None:
        self._sum: dict[str, float] = defaultdict(float)
        self._weight: dict[str, float] = defaultdict(float)
        self._total: dict[str, float] = defaultdict(float)
        self._max: dict[str, float] = {}
        self.current_phase = ""
        """The innermost `timed` block that is running."""

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add `value` with `weight` to the mean called `name`."""
        self._sum[name] += value * weight
        self._weight[name] += weight

    def add_sum(self, name: str, total: float, weight: float) -> None:
        """Add an already weighted total, such as a masked tensor's sum, with its mask's sum as the weight."""
        self._sum[name] += total
        self._weight[name] += weight

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add to a plain total, which is reported as a sum and not as a mean."""
        self._total[name] += amount

    def update_max(self, name: str, value: float) -> None:
        """Keep the largest value. NaN stays: no number is larger than what was not computed."""
        held = self._max.get(name, value)
        self._max[name] = value if value > held or math.isnan(value) else held

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure the time of a block in seconds, summed under timing/<name>_s; a span of the run's time line."""
        start, around = now(), self.current_phase
        self.current_phase = name
        try:
            with trace.span(name):
                yield
        finally:
            self.current_phase = around
            self.count(f"timing/{name}_s", now() - start)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Plain numbers to send to another process; see `merge`."""
        return {
            "sum": dict(self._sum),
            "weight": dict(self._weight),
            "total": dict(self._total),
            "max": dict(self._max),
        }

    def merge(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Add another accumulator's state. The result is exact, because sums, weights and totals are additive."""
        for name, value in state["sum"].items():
            self._sum[name] += value
            self._weight[name] += state["weight"][name]
        for name, value in state["total"].items():
            self._total[name] += value
        for name, value in state["max"].items():
            self.update_max(name, value)

    def flush(self) -> dict[str, float]:
        """Return the means of all names with a weight, the totals and the maxima, and reset."""
        values = {name: total / self._weight[name] for name, total in self._sum.items() if self._weight[name]}
        values |= self._total | self._max
        for table in (self._sum, self._weight, self._total, self._max):
            table.clear()
        return values


class MetricNameLimit:
    """Bounds the names of metrics that come from outside: files and trackers keep a column for each of them.

    Example:
        limit = NameLimit(most=2, longest=5)
        limit.admits("a"), limit.admits("too long"), limit.admits("b"), limit.admits("c")  # (True, False, True, False)
    """

    def __init__(self, max_names: int, max_length: int):
        """`most`: distinct names that are admitted. `longest`: characters of a name."""
        self._max_names, self._max_length = max_names, max_length
        self._names: set[str] = set()

    def admits(self, name: str) -> bool:
        """True for a name that was admitted before, and for a new one within both limits, which is then known."""
        if name in self._names:
            return True
        if len(name) > self._max_length or len(self._names) >= self._max_names:
            return False
        self._names.add(name)
        return True
