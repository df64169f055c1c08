"""The number of a run's engines, which a file in its folder may change while it trains."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from skyrl_train.assembly.engines import build_engine, build_engine_again, engine_index, engine_name, engine_settings
from skyrl_train.assembly.layout import RoleSlots
from skyrl_train.assembly.services import Services
from skyrl_train.cluster.actors import Remote
from skyrl_train.cluster.placement import reserve_beside
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.schema import Config, GeneratorConfig, TimeoutsConfig
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.supervisor import EngineScaler, EngineSupervisor
from skyrl_train.engines.wanted import ENGINES_FILE, read_wanted, stamp, why_fixed, write_wanted
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.report.phases import say

_LOOKS_EVERY_S = 1.0
_CLOSES_S = 10.0
"""Time for an engine that left to clean up, before it is killed."""
_tell = partial(say, "engines")


class EngineSeats:
    """Where the run's own engines are: in the slots of its layout, and in groups of their own those beyond them."""

    def __init__(self, base: Services):
        assert base.layout.engines is not None
        self._base = base
        self._first = base.layout.engines
        self._own: dict[int, RoleSlots] = {}

    async def start_again(self, name: str, patience_s: float) -> Remote:
        """Start an engine that died where it was, or on another node: see build_engine_again."""
        return await build_engine_again(*self._of(name), patience_s, place=self._place(name))

    def _of(self, name: str) -> tuple[int, Cluster, GeneratorConfig, TimeoutsConfig, RoleSlots, str]:
        cfg, index = self._base.cfg, engine_index(name)
        slots = self._own.get(index, self._first)
        return index, self._base.cluster, engine_settings(cfg), cfg.trainer.timeouts, slots, cfg.device

    def _place(self, name: str) -> int | None:
        return 0 if engine_index(name) in self._own else None

    async def start_new(self, name: str) -> Remote:
        """Find slots for an engine more, and start it there. Raises ConfigError if the cluster has no room."""
        index = engine_index(name)
        if index >= self._first.count:
            slots = await reserve_beside(
                self._base.cluster,
                self._first.slots,
                count=self._first.stride,
                total_slots=self._base.layout.num_slots + (len(self._own) + 1) * self._first.stride,
                deadline_s=self._base.cfg.trainer.timeouts.placement_s,
                labels=self._base.cfg.trainer.placement.engine_node_labels,
                other_cpus=self._base.cfg.environment.hosts * self._base.cfg.environment.host_cpus,
            )
            self._own[index] = replace(self._first, slots=slots)
        try:
            return await build_engine(*self._of(name), place=self._place(name))
        except BaseException:
            self.give_back(name)
            raise

    async def stop(self, name: str, engine: Remote) -> None:
        """End an engine, and give its slots back: to the cluster, or to the run if it began with them."""
        try:
            with suppress(SkyRLError, ConnectionError):
                await engine.call_within(_CLOSES_S, "close")
        finally:
            engine.kill()
            self.give_back(name)

    def give_back(self, name: str) -> None:
        own = self._own.pop(engine_index(name), None)
        if own is not None:
            self._base.cluster.gives_back(own.slots.group)


def announce_number(cfg: Config, folder: Path) -> None:
    """Say in the run's folder how many engines it has, where that can be changed; what an earlier run wrote is gone."""
    if _fixed(cfg) is None:
        write_wanted(folder, cfg.generator.num_inference_engines)
    else:
        (folder / ENGINES_FILE).unlink(missing_ok=True)


def build_watch(
    base: Services, client: EngineClient, supervisor: EngineSupervisor, seats: EngineSeats | None
) -> WantedEngines:
    """What follows the file in the folder of this run."""
    fixed, scaler = _fixed(base.cfg), None
    if seats is not None and fixed is None:
        scaler = EngineScaler(
            client,
            supervisor,
            start=seats.start_new,
            stop=seats.stop,
            drain_s=base.cfg.trainer.timeouts.drain_s,
            tell=_tell,
            name_of=engine_name,
        )
    return WantedEngines(base.directory, scaler, fixed or "")


class WantedEngines:
    """Follows the number that is asked for in a run's folder, from the moment that its engines have weights."""

    def __init__(self, folder: Path, scaler: EngineScaler | None, fixed: str):
        """`scaler` is None where the number is `fixed`, for that reason: who asks for another one is told."""
        self._folder = folder
        self._scaler = scaler
        self._fixed = fixed
        self._task: asyncio.Task[None] | None = None

    def after(
        self, publish: Callable[[int], Awaitable[dict[str, float]]]
    ) -> Callable[[int], Awaitable[dict[str, float]]]:
        """The same `publish`, the first of which begins to watch."""

        async def watched(version: int) -> dict[str, float]:
            values = await publish(version)
            if self._task is None:
                self._task = asyncio.ensure_future(self._watch())
            return values

        return watched

    async def end(self) -> None:
        """Watch no longer, and give up what is under way."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._scaler is not None:
            await self._scaler.end()

    async def _watch(self) -> None:
        seen: tuple[int, int] | None = None
        while True:
            latest = await asyncio.to_thread(stamp, self._folder)
            if latest is not None and latest != seen:
                await self._follow()
            seen = latest or seen
            await asyncio.sleep(_LOOKS_EVERY_S)

    async def _follow(self) -> None:
        if self._scaler is None:
            _tell(f"{ENGINES_FILE} changes nothing: {self._fixed}")
            return
        try:
            wanted = await asyncio.to_thread(read_wanted, self._folder)
        except (ConfigError, OSError) as error:
            _tell(f"their number stays as it is: {error}")
            return
        before = self._scaler.number
        self._scaler.set(wanted)
        if wanted != before:
            _tell(f"{wanted} are wanted, there are {before}")


def _fixed(cfg: Config) -> str | None:
    return why_fixed(
        colocate_all=cfg.trainer.placement.colocate_all, run_engines_locally=cfg.generator.run_engines_locally
    )
