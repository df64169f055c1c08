"""Who holds the accelerator. Async context managers, so that an exception never leaves the wrong owner."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol

from skyrl_train.learner.learner import Learner


class Residency(Protocol):
    def generating(self) -> AbstractAsyncContextManager[None]:
        """Inside, engines take requests."""

    def training(self) -> AbstractAsyncContextManager[None]:
        """Inside, the learner may compute."""

    def syncing(self) -> AbstractAsyncContextManager[None]:
        """Inside (and inside training), engines can take weights."""


class AlwaysResident:
    """Engines and learner have slots of their own; nothing moves."""

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        yield

    training = syncing = generating


class TimeShared:
    """Engines and learner take turns on the same slots. Starts with the learner on them and the engines asleep."""

    def __init__(self, engines: Any, learner: Learner):
        self._engines = engines
        self._learner = learner

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        await self._learner.offload()
        try:
            await self._engines.wake_up()
            yield
        finally:
            await self._engines.sleep()

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        await self._learner.onload()
        yield

    @asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        await self._engines.wake_up(["weights"])
        yield
