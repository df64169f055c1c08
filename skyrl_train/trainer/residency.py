"""Whether the engines or the learner hold the accelerator.

The phases are async context managers, so that an exception never leaves the wrong owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol

from skyrl_train.clock import now
from skyrl_train.errors import SkyRLError
from skyrl_train.learner.learner import Learner

_LEAVING_S = 30.0
"""Time for engines to fall asleep when a run ends early."""


class Residency(Protocol):
    """The phases of a step; entering one moves engines and learner onto or off the accelerator as it needs."""

    def generating(self, before_sync: bool = False) -> AbstractAsyncContextManager[None]:
        """While inside, the engines accept requests. `before_sync`: they get new weights before they do so again."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """While inside, the learner may compute."""

    def syncing(self) -> AbstractAsyncContextManager[None]:
        """While inside, the engines can receive weights; to be entered within `training`."""

    def moves_s(self) -> float:
        """Seconds that moving has taken since the last call, apart from what `syncing` moves: that is a sync's time."""


class AlwaysResident:
    """Engines and learner have dedicated slots; nothing moves."""

    @asynccontextmanager
    async def generating(self, before_sync: bool = False) -> AsyncIterator[None]:
        yield

    training = syncing = generating

    def moves_s(self) -> float:
        return 0.0


class TimeShared:
    """Engines and learner take turns on the same slots; at first the learner holds them and the engines are asleep."""

    def __init__(self, engines: Any, learner: Learner, level_before_sync: int = 1):
        """`level_before_sync`: how deeply engines sleep until a sync; at 2 they give up weights that it replaces."""
        self._engines = engines
        self._learner = learner
        self._level_before_sync = level_before_sync
        self._moves_s = 0.0

    @asynccontextmanager
    async def generating(self, before_sync: bool = False) -> AsyncIterator[None]:
        with self._moving():
            await self._learner.offload()
        try:
            with self._moving():
                await self._engines.wake_up()
            yield
        except BaseException:
            # The run ends: an engine that hangs must not keep it from saving, which needs no accelerator.
            with suppress(SkyRLError, TimeoutError):
                async with asyncio.timeout(_LEAVING_S):
                    await self._engines.sleep()
            raise
        with self._moving():
            await self._engines.sleep(self._level_before_sync if before_sync else 1)

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        with self._moving():
            await self._learner.onload()
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        await self._learner.keep_weights()  # first: the engines' weights take the room that the rest had
        await self._engines.wake_up(["weights"])
        yield

    def moves_s(self) -> float:
        taken, self._moves_s = self._moves_s, 0.0
        return taken

    @contextmanager
    def _moving(self) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self._moves_s += now() - start
