"""A run's numbers as columns over steps, thinned for a page."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_METRICS = 10_000
"""Columns of a run; later names are left out."""
MAX_VALUES = 100_000_000
"""Steps times columns; later steps are left out: each takes a place in every column, whatever its line has."""
_MAX_VALUE = 1e100
"""Larger numbers are shown as none: the range of a chart with both signs of the largest floats is not finite."""
_MAX_TIME = 1e11
"""Unix seconds."""
_NO_METRICS = frozenset({"step", "time"})


class MetricSeries:
    """One column of 8 bytes a step for every metric; NaN where a step has none, or one that cannot be shown."""

    def __init__(self) -> None:
        self._steps, self._times = array("q"), array("d")
        self._columns: dict[str, array[float]] = {}

    @property
    def last_step(self) -> int:
        """0 before the first."""
        return self._steps[-1] if self._steps else 0

    @property
    def longest_s(self) -> float:
        """The longest that one of the last steps took, by the times of the rows; 0 if there is no such step."""
        latest = [time for time in self._times[-6:] if np.isfinite(time)]
        return max([after - before for before, after in pairwise(latest)], default=0.0)

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in a line of metrics.jsonl. A step that is taken again replaces what there was from it on."""
        while self._steps and self._steps[-1] >= line["step"]:
            self._steps.pop()
            for column in (self._times, *self._columns.values()):
                column.pop()
        size = len(self._steps)
        if size * len(self._columns) >= MAX_VALUES:
            return
        self._steps.append(line["step"])
        self._times.append(_number(line.get("time"), _MAX_TIME))
        news = [name for name in line if name not in _NO_METRICS and name not in self._columns]
        for name in news[: MAX_METRICS - len(self._columns)]:
            self._columns[name] = array("d", [np.nan]) * size
        for name, column in self._columns.items():
            column.append(_number(line.get(name)))

    def thinned(
        self, most: int, digits: int | None = None, more: Mapping[str, Mapping[int, float]] | None = None
    ) -> dict[str, Any]:
        """At most `most` points, each of `steps_per_point` steps in a row: their mean, for maxima the greatest.

        A point stands at the last of its steps. `digits`: significant ones that are kept of numbers. `more`: columns
        beside the run's own, by step.
        """
        columns = {name: np.array(column) for name, column in self._columns.items()}
        for name, values in (more or {}).items():
            columns.setdefault(name, np.array([_number(values.get(step)) for step in self._steps], float))
        size = len(self._steps)
        width = max(1, -(-size // max(1, most)))
        first = np.arange(0, size, width)
        last = np.minimum(first + width, size) - 1
        names = sorted(columns, key=_place)
        return {
            "steps": [self._steps[at] for at in last],
            "times": [self._times[at] for at in last],
            "steps_per_point": width,
            "columns": {name: _values(_pooled(name, columns[name], first), digits) for name in names},
        }


def _pooled(name: str, values: NDArray[np.float64], first: NDArray[np.int64]) -> NDArray[np.float64]:
    if len(first) == len(values):
        return values
    there = np.isfinite(values)
    if "max" in re.split(r"[^a-z0-9]+", name.rpartition("/")[2].replace("_", " ")):  # eval/minimax/... is none
        greatest: NDArray[np.float64] = np.maximum.reduceat(np.where(there, values, -np.inf), first)
        return greatest
    count = np.add.reduceat(there.astype(float), first)
    total = np.add.reduceat(np.where(there, values, 0.0), first)
    return np.divide(total, count, out=np.full(len(first), np.nan), where=count > 0)


def _values(values: NDArray[np.float64], digits: int | None) -> list[float | None]:
    found = [value if np.isfinite(value) else None for value in values.tolist()]
    return found if digits is None else [value and float(f"{value:.{digits}g}") for value in found]


def _place(name: str) -> tuple[str, ...]:
    return tuple(name.split("/"))


def _number(value: Any, most: float = _MAX_VALUE) -> float:
    """The number, or NaN for what is none of at most this size."""
    return float(value) if isinstance(value, int | float) and abs(value) <= most else float("nan")
