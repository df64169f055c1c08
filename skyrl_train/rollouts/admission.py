"""Rollouts in admission order, with a bound on their staleness."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

G = TypeVar("G")


class RolloutQueue(Generic[G]):
    """Holds the rollouts in progress.

    A rollout needs a granted slot. The slots of step j are granted when the weights of step j - max_staleness_steps are
    live, and groups are taken in admission order. So the rollouts that step j trains on were begun with weights at most
    `max_staleness_steps` versions old, by construction. If groups were taken in completion order, one slow group could
    age without bound. A dropped group gives its slot back: the groups behind it move up, and none of them gets older.

    consumes: granted slots · produces: groups · waits for: the oldest rollout · unblocked by: its deadline
    """

    def __init__(self) -> None:
        self._free = self._running = 0
        self._pending: deque[asyncio.Task[G]] = deque()

    @property
    def free_slots(self) -> int:
        """The number of rollouts that may be admitted now."""
        return self._free

    def __len__(self) -> int:
        """The number of rollouts admitted and not yet taken."""
        return len(self._pending)

    @property
    def running(self) -> int:
        """The number of those that have not ended."""
        return self._running

    def grant(self, slots: int) -> None:
        """Allow `slots` more rollouts to begin: slots of a later step, or of groups that were dropped."""
        self._free += slots

    def submit(self, rollout: Callable[[], Awaitable[G]]) -> asyncio.Task[G]:
        """Begin a rollout in a free slot."""
        assert self._free > 0, "a rollout without a granted slot would break the staleness bound"
        self._free -= 1

        async def run() -> G:
            try:
                return await rollout()
            finally:  # not in a callback of the task: those run after others may have seen that it is done
                self._running -= 1

        self._running += 1
        task = asyncio.create_task(run())
        self._pending.append(task)
        return task

    async def take(self) -> G | None:
        """Wait for the oldest rollout and return its group; None if no rollout is in progress."""
        if not self._pending:
            return None
        group = await self._pending[0]
        self._pending.popleft()
        return group

    async def take_fastest(self, count: int, finished: Callable[[G], bool]) -> tuple[list[G], list[G]]:
        """Returns the first `count` groups to complete, in admission order, and the completed groups not among them.

        All other rollouts are cancelled and have ended on return. A group for which `finished` is false (it failed) is
        taken only if too few others are left. The caller needs the groups not taken to count their failures.
        """
        waiting = set(self._pending)
        done: list[asyncio.Task[G]] = []
        while waiting and sum(finished(task.result()) for task in done) < count:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            done = [task for task in self._pending if task.done()]
            waiting = set(self._pending) - set(done)
        chosen = set(sorted(done, key=lambda task: not finished(task.result()))[:count])
        taken = [task.result() for task in self._pending if task in chosen]
        others = [task.result() for task in done if task not in chosen]
        await self.close()
        return taken, others

    async def close(self) -> None:
        """Cancel all rollouts in progress and wait until they have ended."""
        while self._pending:  # one that ends meanwhile by itself may be followed by another
            tasks = list(self._pending)
            self._pending.clear()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._running = 0  # those that were cancelled before their first line have not counted themselves
