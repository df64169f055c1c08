"""The time that waits are measured by."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Return seconds of the running event loop's clock, which tests replace with virtual time, or time.monotonic()."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
