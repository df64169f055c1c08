"""The time that waits are measured by."""

from __future__ import annotations

import asyncio
import time


def now() -> float:
    """Seconds of the running event loop's clock, which only a simulation sets apart from time.monotonic()."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
