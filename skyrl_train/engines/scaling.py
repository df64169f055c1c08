"""Engines that join a run under way and leave it, while the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

from skyrl_train.clock import now
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.supervisor import EngineSupervisor
from skyrl_train.tasks import unwatched


class EngineScaler:
    """Brings the engines of `client` to the number that is wanted, in the background.

    A newcomer gets requests once the supervisor gave it the current weights. A leaver gets none from the moment that it
    is to leave, takes part in syncs as long as it has some, and ends with the last of them or at its deadline, when
    what it still has goes to the others as if it had died. Those that leave are the ones that joined last.
    """

    def __init__(
        self,
        client: EngineClient,
        supervisor: EngineSupervisor,
        *,
        start: Callable[[str], Awaitable[Any]],
        stop: Callable[[str, Any], Awaitable[None]],
        drain_s: float,
        tell: Callable[[str], None],
        name_of: Callable[[int], str] = "engine {}".format,
    ):
        """`start` finds room for a new engine of that name and starts it; `stop` ends an engine and gives it back.

        `drain_s`: how long a leaver may take for the requests that it has. `tell`: what happened, a line each.
        """
        self._client = client
        self._supervisor = supervisor
        self._start = start
        self._stop = stop
        self._drain_s = drain_s
        self._tell = tell
        self._name_of = name_of
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._draining: set[str] = set()
        """Of `_leaving`, those that could stay still."""
        self._ended = False

    @property
    def number(self) -> int:
        """How many engines there will be: dead ones are restarted, newcomers counted, leavers not."""
        return len(self._staying) + sum(not task.cancelling() for task in self._joining.values())

    @property
    def _staying(self) -> list[str]:
        gone = self._client.leaving
        return [name for name in self._client.names if name not in gone]

    def set(self, wanted: int) -> None:
        """Begin whatever leads to `wanted` engines, at least 1; returns at once. The last call counts.

        A newcomer that does not start is told of, and not tried again before the next call.
        """
        assert wanted >= 1, "a run has at least one engine"
        if self._ended:
            return
        for name in reversed([name for name in self._leaving if name in self._draining]):
            if self.number < wanted:
                self._leaving.pop(name).cancel()
                self._draining.discard(name)
                self._client.keep(name)
                self._tell(f"{name} stays after all")
        while self.number < wanted:
            name = self._free_name()
            self._joining[name] = self._begin(self._join(name), self._joining, name)
        for name, task in reversed(self._joining.items()):
            if self.number > wanted and not task.cancelling():
                task.cancel()
                self._tell(f"{name} is no longer wanted, and had not started yet")
        while self.number > wanted:
            dead = [name for name in self._staying if name in self._client.dead]
            name = (dead or self._staying)[-1]
            self._leaving[name] = self._begin(self._leave(name, self._client.retire(name)), self._leaving, name)
            self._draining.add(name)

    async def settled(self) -> None:
        """Wait until nobody joins or leaves any more."""
        while under_way := [*self._joining.values(), *self._leaving.values()]:
            await asyncio.wait(under_way)

    async def end(self) -> None:
        """Give up what is under way, and begin nothing more: engines that were starting are ended."""
        self._ended = True
        under_way = [*self._joining.values(), *self._leaving.values()]
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    def _begin(self, work: Any, under_way: dict[str, asyncio.Task[None]], name: str) -> asyncio.Task[None]:
        task: asyncio.Task[None] = unwatched(asyncio.ensure_future(work))

        def ended(_: object) -> None:
            if under_way.get(name) is task:
                del under_way[name]

        task.add_done_callback(ended)
        return task

    def _free_name(self) -> str:
        taken = {*self._client.names, *self._joining, *self._leaving}
        return next(name for name in map(self._name_of, count()) if name not in taken)

    async def _join(self, name: str) -> None:
        begun = now()
        try:
            engine = await self._start(name)
            try:
                await self._supervisor.bring_in(name, engine)
            except BaseException:
                await self._stop(name, engine)
                raise
        except Exception as error:
            self._tell(f"{name} did not join, and {len(self._staying)} go on: {type(error).__name__}: {error}")
        else:
            self._tell(f"{name} joined with the current weights in {now() - begun:.1f} s: {len(self._staying)} now")

    async def _leave(self, name: str, empty: asyncio.Event) -> None:
        begun, finished = now(), True
        try:
            async with asyncio.timeout(self._drain_s):
                await empty.wait()
        except TimeoutError:
            finished = False
        self._draining.discard(name)
        engine = await self._supervisor.take_out(name)
        try:
            await self._stop(name, engine)
        except Exception as error:
            self._tell(f"{name} gets nothing to do any more, but could not be ended: {type(error).__name__}: {error}")
            return
        what = "with all requests answered" if finished else "before all requests were answered: others get the rest"
        self._tell(f"{name} left after {now() - begun:.1f} s, {what}: {len(self._staying)} now")
