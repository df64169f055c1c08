"""The speed of this machine, for tests of performance figures, and its address."""

from __future__ import annotations

import socket
import time

import psutil
import pytest

LOOPS = 200_000
REFERENCE_S = 0.027
"""CPU-seconds of `_work` on the machine of docs/contributing/benchmarks.md."""


def slowness() -> float:
    """Return the factor by which plain Python is slower here than on the benchmarks page's machine; at least 1."""
    return max(1.0, min(_work() for _ in range(5)) / REFERENCE_S)


def network_address() -> str:
    """Return the first address of this machine that others can reach. Skip the test if there is none."""
    found = [one for name in psutil.net_if_addrs().values() for one in name if one.family == socket.AF_INET]
    own = [one.address for one in found if not one.address.startswith("127.")]
    return own[0] if own else pytest.skip("this machine has no network interface")


def _work() -> float:
    """Return the CPU-seconds of a fixed amount of interpreter work: objects, attributes, dictionaries, text."""
    started = time.process_time()
    held: dict[str, list[int]] = {}
    for number in range(LOOPS):
        held.setdefault(str(number % 1000), []).append(number)
    return time.process_time() - started
