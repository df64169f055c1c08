"""How fast this machine is, for tests of figures that are promised for a certain one."""

from __future__ import annotations

import time

LOOPS = 200_000
REFERENCE_S = 0.027
"""CPU-seconds that `_work` takes on the machine of docs/benchmarks.md."""


def slowness() -> float:
    """How many times longer plain Python takes here than on the machine of docs/benchmarks.md; at least 1."""
    return max(1.0, min(_work() for _ in range(5)) / REFERENCE_S)


def _work() -> float:
    """CPU-seconds of a fixed amount of the interpreter's work: objects, attributes, dictionaries, text."""
    started = time.process_time()
    held: dict[str, list[int]] = {}
    for number in range(LOOPS):
        held.setdefault(str(number % 1000), []).append(number)
    return time.process_time() - started
