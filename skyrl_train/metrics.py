"""Accumulation of metrics. Means are formed only at `flush`, so that uneven micro-batches and ranks stay exact."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from skyrl_train import trace
from skyrl_train.clock import now

if TYPE_CHECKING:
    from torch import Tensor


class Metrics:
    """An accumulator of weighted means, totals and maxima by name.

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
        self._deferred: list[tuple[Tensor, Callable[[list[float]], None]]] = []
        self.current_phase = ""
        """Name of the innermost running `timed` block, or ""."""

    def add(self, name: str, value: float, weight: float = 1.0) -> None:
        """Add `value` with `weight` to the mean called `name`."""
        self._sum[name] += value * weight
        self._weight[name] += weight

    def add_sum(self, name: str, total: float, weight: float) -> None:
        """Add a total that is already weighted to the mean called `name`.

        Args:
            name: Name of the metric.
            total: Weighted sum of values, for example of a masked tensor.
            weight: Sum of the weights, for example of the mask.
        """
        self._sum[name] += total
        self._weight[name] += weight

    def defer(self, numbers: Tensor, record: Callable[[list[float]], None]) -> None:
        """Record numbers that a device has yet to compute, so that the host does not wait for them now.

        Args:
            numbers: Numbers [n] float64. All numbers that are deferred at a time must be on the same device.
            record: A function of the numbers that adds them to these metrics. `flush` and `to_dict` call it. What it
                refers to stays in memory until then, so it must not refer to tensors.
        """
        self._deferred.append((numbers, record))

    def _record_deferred(self) -> None:
        if not self._deferred:
            return
        from torch import cat  # most processes with metrics have no torch

        deferred, self._deferred = self._deferred, []
        numbers = iter(cat([numbers for numbers, _ in deferred]).tolist())
        for tensor, record in deferred:
            record([next(numbers) for _ in range(len(tensor))])

    def count(self, name: str, amount: float = 1.0) -> None:
        """Add `amount` to the total called `name`, which is reported as a sum and not as a mean."""
        self._total[name] += amount

    def update_max(self, name: str, value: float) -> None:
        """Set the maximum called `name` to `value` if `value` is larger. NaN replaces any value and stays."""
        current = self._max.get(name, value)
        self._max[name] = value if value > current or math.isnan(value) else current

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a block: add its seconds to the total timing/<name>_s, and record a span of the run's trace."""
        start, outer_phase = now(), self.current_phase
        self.current_phase = name
        try:
            with trace.span(name):
                yield
        finally:
            self.current_phase = outer_phase
            self.count(f"timing/{name}_s", now() - start)

    def to_dict(self) -> dict[str, dict[str, float]]:
        """Return the state as plain numbers, which can be sent to another process and passed to `merge`."""
        self._record_deferred()
        return {
            "sum": dict(self._sum),
            "weight": dict(self._weight),
            "total": dict(self._total),
            "max": dict(self._max),
        }

    def merge(self, state: Mapping[str, Mapping[str, float]]) -> None:
        """Add the state of another accumulator, from `to_dict`. Means stay exact."""
        for name, value in state["sum"].items():
            self._sum[name] += value
            self._weight[name] += state["weight"][name]
        for name, value in state["total"].items():
            self._total[name] += value
        for name, value in state["max"].items():
            self.update_max(name, value)

    def flush(self) -> dict[str, float]:
        """Return means, totals and maxima by name, and reset all of them. Means without weight are left out."""
        self._record_deferred()
        values = {name: total / self._weight[name] for name, total in self._sum.items() if self._weight[name]}
        values |= self._total | self._max
        for table in (self._sum, self._weight, self._total, self._max):
            table.clear()
        return values


class MetricNameLimit:
    """A limit on the names of metrics from outside, because files and trackers keep a column for each of them.

    Example:
        limit = MetricNameLimit(max_names=2, max_length=5)
        limit.admits("a"), limit.admits("too long"), limit.admits("b"), limit.admits("c")  # (True, False, True, False)
    """

    def __init__(self, max_names: int, max_length: int):
        """Create a limit that admits no name yet.

        Args:
            max_names: Number of distinct names that are admitted.
            max_length: Number of characters of a name.
        """
        self._max_names, self._max_length = max_names, max_length
        self._names: set[str] = set()

    def admits(self, name: str) -> bool:
        """Return True for a name that was admitted before, and for a new name within both limits, which is then
        admitted.
        """
        if name in self._names:
            return True
        if len(name) > self._max_length or len(self._names) >= self._max_names:
            return False
        self._names.add(name)
        return True
