"""Rollouts in admission order, never older than their grant allows."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

G = TypeVar("G")


class RolloutQueue(Generic[G]):
    """Holds the rollouts under way.

    A rollout needs a granted slot. The slots of step j are granted when the weights of step j - max_staleness are live,
    and groups are taken in admission order: so what step j trains on was begun with weights at most `max_staleness`
    versions old, by construction. Taking in completion order instead would let one slow group age without bound.

    consumes: granted slots · produces: groups · waits for: the oldest rollout · unblocked by: its deadline
    """

    def __init__(self) -> None:
        self._free = 0
        self._pending: deque[asyncio.Task[G]] = deque()

    @property
    def free_slots(self) -> int:
        """How many rollouts may be admitted now."""
        return self._free

    def grant(self, slots: int) -> None:
        """Allow that many more rollouts to begin."""
        self._free += slots

    def submit(self, rollout: Callable[[], Awaitable[G]]) -> None:
        """Begin a rollout in a free slot."""
        assert self._free > 0, "a rollout without a granted slot would break the staleness bound"
        self._free -= 1

        async def run() -> G:
            return await rollout()

        self._pending.append(asyncio.create_task(run()))

    async def take(self) -> G | None:
        """The oldest rollout's group, waited for; None when nothing is under way."""
        if not self._pending:
            return None
        group = await self._pending[0]
        self._pending.popleft()
        return group

    async def close(self) -> None:
        """Cancel what is under way and wait until it has ended."""
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)
        self._pending.clear()
