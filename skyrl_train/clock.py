"""The clock by which waits are measured."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Return the time in seconds of the running event loop's clock, or of time.monotonic() without a running loop.

    Tests replace the event loop's clock with virtual time. Only differences of two values are meaningful.
    """
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
