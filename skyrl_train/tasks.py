"""Work at the same time that ends together."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any


async def gather_all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all calls concurrently. The first failure is raised once the others, which it cancels, have ended.

    asyncio.gather leaves them running, and prints their tracebacks when nobody asks for them; a TaskGroup raises
    groups of exceptions.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
