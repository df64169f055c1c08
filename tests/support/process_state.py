"""Checks of processes that are not children of this one."""

from __future__ import annotations

import time

import psutil


def is_running(pid: int) -> bool:
    """True if the process exists and has not ended. It may end at any moment."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_for_exit(pid: int, within_s: float = 20.0) -> bool:
    """True if the process ends within some seconds."""
    deadline = time.monotonic() + within_s
    while is_running(pid):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
