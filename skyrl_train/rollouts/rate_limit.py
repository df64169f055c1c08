"""How many episodes are under way, and how fast they begin."""

from __future__ import annotations

import asyncio


class RateLimiter:
    """`generator.rate_limit`: episodes begin in the order in which they ask, a group's together.

    per_second: episodes that begin a second at most; max_concurrency: episodes under way at most, unless a group alone
    is larger. None is no limit.
    """

    def __init__(self, per_second: float | None = None, max_concurrency: int | None = None):
        self._seconds_each = 0.0 if per_second is None else 1.0 / per_second
        self._most = max_concurrency
        self._running = 0
        self._next_start = 0.0
        self._turn = asyncio.Lock()
        """Held by whoever is next: waiters are served in order, so a large group is not overtaken for ever."""
        self._left = asyncio.Event()

    async def admit(self, episodes: int) -> None:
        """Wait until so many may begin; then they need a `release`."""
        if self._most is None and not self._seconds_each:
            return  # without a turn of the event loop: what begins together goes to the engines together
        async with self._turn:
            while self._most is not None and self._running and self._running + episodes > self._most:
                self._left.clear()
                await self._left.wait()
            clock = asyncio.get_running_loop()
            await asyncio.sleep(self._next_start - clock.time())
            self._next_start = max(clock.time(), self._next_start) + episodes * self._seconds_each
            self._running += episodes

    def release(self, episodes: int) -> None:
        self._running -= episodes
        self._left.set()
