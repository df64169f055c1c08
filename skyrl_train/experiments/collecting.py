"""The garbage collector of a run's driver."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (500, 4_000, 10)
"""New objects, less those that went, between two passes over the youngest, and how many of these between two over
those that are older. A pass takes up to a microsecond an object, in which nothing else happens: so it is a small one,
or a rare one. Objects that went count whatever their age: where conversations end as others begin, the youngest are
many more than the first number when their turn comes (with 5,000 it was 100,000 to 200,000)."""


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Inside, cycles are looked for more seldom, and not among what was there before.

    A driver keeps the messages of thousands of conversations, and makes some hundred short-lived objects a turn, almost
    none of them in cycles: with Python's defaults the collector took more than half of its time.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()  # or what is garbage now would stay
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()
