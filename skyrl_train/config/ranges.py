"""Ranges of numbers, for `fields.key(range=...)`."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; the ends are in it unless `above` or `below` say otherwise."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        left = value > self.low if self.above else value >= self.low
        return left and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        left = f"{'more than' if self.above else 'at least'} {self.low:g}"
        right = f" and {'less than' if self.below else 'at most'} {self.high:g}"
        return left if self.high == math.inf else left + right


AT_LEAST_ONE = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, above=True)
FRACTION = Range(0, 1)
POSITIVE_FRACTION = Range(0, 1, above=True)
MINUS_ONE_OR_MORE = Range(-1)
LEAST_TEMPERATURE = 0.01
"""The smallest temperature besides 0: logits divided by less overflow, and vLLM would use this value instead."""
