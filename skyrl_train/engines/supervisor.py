"""Changes the engines of a run under way: restarts dead ones, and adds and removes engines, while the others go on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from typing import Any

from skyrl_train.clock import now
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import ClusterLost, EnginesLost, NoRoom, SkyRLError, WorkerDied
from skyrl_train.tasks import unwatched

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
