"""Whether an engine gets on with its work: how a call without a length of its own is told from one that hangs."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from skyrl_train.clock import now
from skyrl_train.engines.base import EngineHealth
from skyrl_train.errors import DeadlineExceeded
from skyrl_train.tasks import unwatched

GRACE_S = 30.0
"""How long an engine may take to answer a health check."""
LOOK_S = 5.0
"""How often one that works is asked."""
COUNTERS = ("generated_tokens", "prefilled_tokens", "cached_tokens", "running")
"""What moves while an engine works."""
T = TypeVar("T")


class Progress:
    """Watches one engine, for all calls that wait for it.

    A call of generate() takes as long as the requests before it: no deadline fits it. But an engine that lives answers
    health checks, and one that works counts tokens.
    """

    def __init__(self, name: str, health: Callable[[], Awaitable[EngineHealth]], looks_every_s: float = LOOK_S):
        self._name = name
        self._looks_every_s = looks_every_s
        self._health = health
        self._counters: tuple[int, ...] = ()
        self._moved_at = self._asked_at = -math.inf
        """The time at which a counter was last seen to have moved, and of the last health check."""

    async def until_done(self, call: Awaitable[T], stalls_s: float, method: str = "generate") -> T:
        """The result of a call. Raises DeadlineExceeded if the engine does nothing for `stalls_s`, or does not answer.

        The call is then cancelled, as it is if this is cancelled.
        """
        task, begun = asyncio.ensure_future(call), now()
        look_s = min(self._looks_every_s, stalls_s)
        try:
            while not (await asyncio.wait([task], timeout=look_s))[0]:
                await self._look(look_s)
                stalled = now() - max(begun, self._moved_at) > stalls_s
                if stalled and not task.done():
                    raise DeadlineExceeded(f"{self._name}.{method}", stalls_s)
            return task.result()
        finally:
            task.cancel()
            unwatched(task)

    async def _look(self, look_s: float) -> None:
        """Ask for the counters, unless another call just has."""
        moment = now()
        if moment - self._asked_at < look_s / 2:
            return
        self._asked_at = moment
        try:
            async with asyncio.timeout(GRACE_S) as deadline:
                health = await self._health()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineExceeded(f"{self._name}.health", GRACE_S) from error
        counters = tuple(getattr(health, one) for one in COUNTERS)
        if counters != self._counters:
            self._counters, self._moved_at = counters, now()
