"""Restarts engines that died, with the current weights, until a budget is spent; lets others in and out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from skyrl_train.clock import now
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import ClusterLost, EnginesLost, NoRoom, SkyRLError, WorkerDied

log = logging.getLogger(__name__)


class EngineSupervisor:
    """Restarts the engines that are dead for `client`. They get requests only once `sync` gave them current weights."""

    def __init__(
        self,
        client: EngineClient,
        *,
        start: Callable[[str, bool], Awaitable[Any]],
        sync: Callable[[Any], Awaitable[None]],
        stop: Callable[[Any], Awaitable[None]],
        max_engine_restarts: int,
    ):
        """`start` kills the rest of the engine of that name and starts it again, and waits for a node for it if it is
        told to (True); `stop` ends one whose `sync` failed.

        `max_engine_restarts`: in the whole run, including failed ones. On a shared accelerator `start` must
        make room in its memory first, and `sync` must load the trainer's weights. Either raises WorkerDied if a rank of
        the trainer is gone: without it no other restart can succeed.
        """
        self._client = client
        self._start = start
        self._sync = sync
        self._stop = stop
        self._max_engine_restarts = max_engine_restarts
        self._restarting, self._weights = asyncio.Lock(), asyncio.Lock()
        self._homeless: set[str] = set()
        """Dead engines that have no node for now, of which that was said."""
        self.restarts = 0

    async def revive(self) -> None:
        """Restart every dead engine, those that die meanwhile too, except those that have no node while others live.

        Raises EnginesLost with the cause of the first one left if the budget is spent.
        """
        async with self._restarting:
            homeless: set[str] = set()
            while left := {name: cause for name, cause in self._client.dead.items() if name not in homeless}:
                # Those that may well start come first: where no engine is left, one without a node would end the run.
                name, cause = min(left.items(), key=lambda one: one[0] in self._homeless)
                if not await self._restart_within_budget(name, cause):
                    homeless.add(name)

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """To be held while weights change: an engine may be started meanwhile, but gets its weights afterwards."""
        async with self._weights:
            yield

    async def bring_in(self, name: str, engine: Any) -> None:
        """Give a newcomer the current weights, and from then on requests. Raises what its `sync` raised."""
        async with self._weights:
            await self._sync(engine)
            self._client.add(name, engine)

    async def take_out(self, name: str) -> Any:
        """Return an engine that was retired, which no sync and no restart has to do with any more."""
        async with self._restarting, self._weights:
            self._homeless.discard(name)
            return self._client.remove(name)

    async def _restart_within_budget(self, name: str, cause: str) -> bool:
        """Try once. Returns False if there is no node for it and others live: it is tried again the next time."""
        if self.restarts >= self._max_engine_restarts:
            if name in self._homeless and self._client.any_lives:
                return False  # it stays away, as it did before the others spent the budget
            raise EnginesLost(
                f"{name} died ({cause}), and the {self._max_engine_restarts} restarts of "
                "generator.max_engine_restarts are spent."
            )
        self.restarts += 1
        begun = now()
        try:
            await self._restart(name)
        except NoRoom as error:
            if not self._client.any_lives:
                raise EnginesLost(
                    f"{name} died ({cause}), no engine is left, and it cannot be restarted: {error}"
                ) from error
            self.restarts -= 1
            told = log.debug if name in self._homeless else log.warning
            told(
                "%s died (%s) and stays away: %s The run goes on without it; room is looked for after each step.",
                name,
                cause,
                error,
            )
            self._homeless.add(name)
            return False
        except ClusterLost as error:
            raise EnginesLost(f"{name} died ({cause}) and cannot be restarted: {error}") from error
        except WorkerDied as error:
            raise EnginesLost(
                f"{name} died ({cause}) and cannot be restarted, as a rank of the trainer does not answer: {error}"
            ) from error
        except SkyRLError as error:
            log.warning("Restart %d of engines failed for %s: %s", self.restarts, name, error)
        else:
            self._homeless.discard(name)
            log.warning(
                "%s died (%s) and was restarted with the current weights in %.1f s, restart %d of the %d of "
                "generator.max_engine_restarts.",
                name,
                cause,
                now() - begun,
                self.restarts,
                self._max_engine_restarts,
            )
        return True

    async def _restart(self, name: str) -> None:
        # One engine waits for a node, for all that have none: requests may be held meanwhile.
        patient = not (self._homeless and self._client.any_lives)
        engine = await self._start(name, patient)
        try:
            async with self._weights:
                await self._sync(engine)
                self._client.replace(name, engine)
        except BaseException:
            await self._stop(engine)
            raise
