"""Whether processes that are not this one's children still run."""

from __future__ import annotations

import time

import psutil


def is_running(pid: int) -> bool:
    """Whether there is a process that has not ended; it may end at any moment."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_exit(pid: int, within_s: float = 20.0) -> bool:
    """Whether the process ends within some seconds."""
    deadline = time.monotonic() + within_s
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
