"""Moves engines and learner onto or off the accelerators that they share, as late and as seldom as possible."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import StrEnum
from typing import Any

from skyrl_train.clock import now
from skyrl_train.config.predicates import OffloadMode
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import SkyRLError
from skyrl_train.learner.learner import Learner

_SLEEP_ON_EXIT_TIMEOUT_S = 30.0
"""Seconds that engines may take to fall asleep when a run ends with an error."""


class OffloadManager:
    """The owner of what is on the accelerators in each phase of a step.

    This class is for engines and learner on dedicated GPUs: it moves nothing.
    """

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """Let the engines accept requests while the body runs. They stay awake until the learner needs their memory."""
        yield

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        """Let the learner compute while the body runs. Weights are published within the body."""
        yield

    async def prepare_sync(self) -> None:
        """Let the engines receive weights from the learner. The learner can compute log-probs, but not train."""

    async def prepare_scoring(self) -> None:
        """Let the engines compute log-probs. They can then generate, too."""

    async def prepare_save(self) -> None:
        """Let the learner save and export its weights. The engines free their caches for that."""

    async def prepare_engine_start(self) -> None:
        """Free the accelerators' memory that the start of an engine needs."""

    @asynccontextmanager
    async def replacing(self, engine: Any) -> AsyncIterator[None]:
        """Let an engine that has just started receive weights, and then replace a dead one, while the body runs."""
        yield

    def pop_transfer_s(self) -> float:
        """Return the seconds of transfers for `generating` and `training` since the last call, and reset them to 0."""
        return 0.0


class _LearnerPlace(StrEnum):
    """The place of the learner's models."""

    DEVICE = "device"
    """All on the accelerators."""
    WEIGHTS_ON_DEVICE = "weights on device"
    """The policy's weights on the accelerators, everything else in host memory."""
    HOST = "host"


class _EngineMemory(StrEnum):
    """The memory that the engines hold."""

    ALL = "all"
    WEIGHTS = "weights"
    NONE = "none"


class ColocatedOffloadManager(OffloadManager):
    """The phases of engines and learner that share the same GPUs.

    Nothing is moved before the other side needs the memory. So the caches of engines are mapped once per step, also if
    engines compute log-probs after a sync or evaluate. Expects that at first the learner is on the GPUs, and that the
    engines hold what they hold while it trains.
    """

    def __init__(self, engines: EngineClient, learner: Learner, mode: OffloadMode = OffloadMode.ALL, level: int = 1):
        """Create the manager.

        Args:
            engines: The client of the engines.
            learner: The ranks of all models.
            mode: What is freed.
            level: With mode "all", the sleep level of the engines until the next sync. At level 2 they discard their
                weights, which the sync replaces.
        """
        self._engines = engines
        self._learner = learner
        self._mode = mode
        self._level = level
        self._transfer_s = 0.0
        self._learner_place = _LearnerPlace.DEVICE
        self._learner_has_cached_memory = True
        """True if the allocators of ranks may hold memory that a pass no longer uses."""
        self._is_replacing = False
        """True while an engine is synced that the client does not have yet."""
        self._engine_memory = {
            OffloadMode.NONE: _EngineMemory.ALL,
            OffloadMode.KV_CACHE: _EngineMemory.WEIGHTS,
            OffloadMode.ALL: _EngineMemory.NONE,
        }[mode]

    @asynccontextmanager
    async def generating(self) -> AsyncIterator[None]:
        """See `OffloadManager.generating`.

        Raises what moving the learner or waking the engines raises. If the body raises, tries for a limited time to
        put the engines to sleep.
        """
        try:
            with self._timed_transfer():
                await self.prepare_scoring()
            yield
        except BaseException:
            # The run ends. An engine that hangs must not prevent the final save, which needs no accelerator.
            with suppress(SkyRLError, TimeoutError):
                async with asyncio.timeout(_SLEEP_ON_EXIT_TIMEOUT_S):
                    await self.prepare_save()
            raise

    @asynccontextmanager
    async def training(self) -> AsyncIterator[None]:
        with self._timed_transfer():
            await self._free_engines_for_training()
            await self._onload_learner()
        self._learner_has_cached_memory = True
        yield

    async def prepare_sync(self) -> None:
        if self._is_replacing:
            return
        await self._free_caches()
        await self._place_learner_for_sync()
        if self._engine_memory is _EngineMemory.NONE:
            await self._engines.wake_up(["weights"])
            self._engine_memory = _EngineMemory.WEIGHTS

    async def prepare_scoring(self) -> None:
        if self._engine_memory is _EngineMemory.ALL and not self._is_replacing:
            return
        if self._mode is OffloadMode.ALL:
            await self._offload_learner()
        if self._mode is not OffloadMode.NONE and self._learner_has_cached_memory:
            await self._learner.free_transient_memory()
            self._learner_has_cached_memory = False
        if self._is_replacing:
            return  # the new engine allocates its cache for the score only
        await self._engines.wake_up()
        self._engine_memory = _EngineMemory.ALL

    async def prepare_save(self) -> None:
        await self._free_caches()
        self._learner_has_cached_memory = True

    async def prepare_engine_start(self) -> None:
        await self._offload_learner()

    @asynccontextmanager
    async def replacing(self, engine: Any) -> AsyncIterator[None]:
        await self._free_caches()
        if self._mode is not OffloadMode.NONE:
            await engine.sleep(1, self._mode is OffloadMode.KV_CACHE)
            self._engine_memory = _EngineMemory.WEIGHTS  # the state in which the engine joins the others
        await self._place_learner_for_sync()
        await engine.wake_up(["weights"])
        self._is_replacing = True
        try:
            yield
        finally:
            self._is_replacing = False

    def pop_transfer_s(self) -> float:
        transfer_s, self._transfer_s = self._transfer_s, 0.0
        return transfer_s

    async def _free_engines_for_training(self) -> None:
        if self._mode is OffloadMode.KV_CACHE:
            await self._free_caches()
        elif self._mode is OffloadMode.ALL and self._engine_memory is not _EngineMemory.NONE:
            await self._engines.sleep(self._level)
            self._engine_memory = _EngineMemory.NONE

    async def _free_caches(self) -> None:
        if self._mode is not OffloadMode.NONE and self._engine_memory is _EngineMemory.ALL:
            await self._engines.sleep(1, True)
            self._engine_memory = _EngineMemory.WEIGHTS

    async def _place_learner_for_sync(self) -> None:
        if self._mode is not OffloadMode.ALL:
            await self._onload_learner()
            self._learner_has_cached_memory = True  # of the log-probs for a comparison
        elif self._learner_place is not _LearnerPlace.WEIGHTS_ON_DEVICE:
            await self._learner.onload_weights_only()
            self._learner_place = _LearnerPlace.WEIGHTS_ON_DEVICE

    async def _offload_learner(self) -> None:
        if self._learner_place is not _LearnerPlace.HOST:
            await self._learner.offload()
            self._learner_place, self._learner_has_cached_memory = _LearnerPlace.HOST, False

    async def _onload_learner(self) -> None:
        if self._learner_place is not _LearnerPlace.DEVICE:
            await self._learner.onload()
            self._learner_place = _LearnerPlace.DEVICE

    @contextmanager
    def _timed_transfer(self) -> Iterator[None]:
        start = now()
        try:
            yield
        finally:
            self._transfer_s += now() - start
