"""Limits how many episodes begin and run at a time."""

from __future__ import annotations

import asyncio

from skyrl_train.tasks import PerTurn

_EPISODES_PER_TURN = 32
"""Episodes that begin in one turn of the event loop: thousands at once would hold up everything else."""


class EpisodeLimiter:
    """`generator.rate_limit`: groups of episodes are admitted in the order in which they ask, each as a whole.

    trajectories_per_second: at most this many episodes begin per second. max_concurrency: at most this many episodes
    run at a time, unless a single group is larger. None is no limit; without both, admission depends on no clock.
    """

    def __init__(self, trajectories_per_second: float | None = None, max_concurrency: int | None = None):
        self._seconds_each = 0.0 if trajectories_per_second is None else 1.0 / trajectories_per_second
        self._most = max_concurrency
        self._running = 0
        self._next_start = 0.0
        self._turn = asyncio.Lock()
        """Held by the next group to be admitted: waiters are served in order, so a large group is never starved."""
        self._left = asyncio.Event()
        self._per_turn = PerTurn(_EPISODES_PER_TURN)

    async def admit(self, episodes: int) -> None:
        """Wait until this many episodes may begin; each admission needs a matching `release`."""
        if self._most is None and not self._seconds_each:
            await self._per_turn(episodes)
            return
        async with self._turn:
            while self._most is not None and self._running and self._running + episodes > self._most:
                self._left.clear()
                await self._left.wait()
            clock = asyncio.get_running_loop()
            await asyncio.sleep(self._next_start - clock.time())
            self._next_start = max(clock.time(), self._next_start) + episodes * self._seconds_each
            self._running += episodes

    def release(self, episodes: int) -> None:
        """Note that this many admitted episodes have ended."""
        self._running -= episodes
        self._left.set()
