"""A WeightPublisher with an idle learner. Functions of the test replace starts and syncs of engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from skyrl_train.engines.client import EngineClient
from skyrl_train.trainer.publisher import WeightPublisher


class IdleLearner:
    """A learner that takes no optimizer steps and whose ranks respond."""

    @asynccontextmanager
    async def hold_version(self) -> AsyncIterator[int]:
        yield 2

    async def is_responsive(self, timeout_s: float) -> bool:
        return True


class FakeWeightSync:
    """A WeightSync that calls a function for each engine."""

    def __init__(self, client: EngineClient, sync: Callable[[Any], Awaitable[None]]):
        self._client = client
        self._sync = sync
        self.metrics: dict[str, float] = {}

    async def sync_all(self, version: int) -> dict[str, float]:
        for engine in self._client.engines:
            await self._sync(engine)
        return self.metrics

    async def sync_one(self, engine: Any, version: int) -> dict[str, float]:
        await self._sync(engine)
        return self.metrics


def publisher_of(
    client: EngineClient,
    restart: Callable[[str, bool], Awaitable[Any]],
    sync: Callable[[Any], Awaitable[None]],
    *,
    max_engine_restarts: int,
    pause_mode: str | None = None,
) -> WeightPublisher:
    learner: Any = IdleLearner()
    syncs: Any = FakeWeightSync(client, sync)
    return WeightPublisher(
        learner, client, syncs, restart, max_engine_restarts=max_engine_restarts, pause_mode=pause_mode
    )
