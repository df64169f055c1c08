"""Engines that died come back with the current weights, or the run ends and says why."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import EnginesLost, SkyRLError

log = logging.getLogger(__name__)


class EngineSupervisor:
    """Restarts what `client` has given up on. An engine gets traffic only after `sync` gave it the current weights."""

    def __init__(
        self,
        client: EngineClient,
        *,
        start: Callable[[str], Awaitable[Any]],
        sync: Callable[[Any], Awaitable[None]],
        stop: Callable[[Any], Awaitable[None]],
        budget: int,
    ):
        """`start` ends what is left of the engine of that name and starts another; `stop` ends one whose `sync` failed.

        `budget`: restarts in the whole run, those that failed included. All must fit the moment: on a shared
        accelerator `start` needs its memory, `sync` the trainer's weights.
        """
        self._client = client
        self._start = start
        self._sync = sync
        self._stop = stop
        self._budget = budget
        self._busy = asyncio.Lock()
        self.restarts = 0

    async def revive(self) -> None:
        """Restart every engine that is dead. Raises EnginesLost with the first cause when the budget is spent."""
        async with self._busy:
            await self._restart_the_dead()

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Inside, weights change and nothing is restarted, which would come back with those before; then `revive`."""
        async with self._busy:
            yield
            await self._restart_the_dead()

    async def _restart_the_dead(self) -> None:
        for name, cause in self._client.dead.items():
            while name in self._client.dead:
                if self.restarts >= self._budget:
                    raise EnginesLost(
                        f"{name} died ({cause}), and the {self._budget} restarts of "
                        "generator.max_engine_restarts are spent."
                    )
                self.restarts += 1
                try:
                    await self._restart(name)
                except SkyRLError as error:
                    log.warning("Restart %d of engines failed for %s: %s", self.restarts, name, error)

    async def _restart(self, name: str) -> None:
        engine = await self._start(name)
        try:
            await self._sync(engine)
        except BaseException:
            await self._stop(engine)
            raise
        self._client.replace(name, engine)
