"""Engines that join and leave a run while it trains, as a file in its folder asks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from skyrl_train.aio import mark_exception_retrieved
from skyrl_train.clock import now
from skyrl_train.engines.client import EngineClient, engine_name
from skyrl_train.engines.target_count import ENGINES_FILE, read_target, target_file_version
from skyrl_train.errors import ConfigError
from skyrl_train.report.progress_log import print_status
from skyrl_train.trainer.publisher import WeightPublisher

CHECK_INTERVAL_S = 1.0
_report = partial(print_status, "engines")


class EngineScaler:
    """Brings the engines of a run to the number that is asked for, in the background.

    An engine that joins gets requests once the publisher gave it the current weights. One that leaves gets no more
    requests, takes part in syncs as long as it has some, and ends with the last of them or at its deadline, when the
    others get what it still has as if it had died. The engines that joined last leave first.
    """

    def __init__(
        self,
        client: EngineClient,
        publisher: WeightPublisher,
        *,
        start: Callable[[str], Awaitable[Any]],
        stop: Callable[[str, Any], Awaitable[None]],
        folder: Path,
        drain_s: float,
        fixed_reason: str | None = None,
        report: Callable[[str], None] = _report,
    ):
        """Create the scaler; `begin` starts it.

        Args:
            client: The client of the engines.
            publisher: Gives engines that join their weights.
            start: Returns a new engine of that name.
            stop: Ends the engine of that name.
            folder: The run's folder, whose engines.json is followed.
            drain_s: Seconds that an engine that leaves may take for the requests that it has.
            fixed: Why the number cannot change, which is reported when the file changes; None if it can.
            report: Called with a line for each event.
        """
        self._client = client
        self._publisher = publisher
        self._start = start
        self._stop = stop
        self._folder = folder
        self._drain_s = drain_s
        self._fixed_reason = fixed_reason
        self._report = report
        self._watch_task: asyncio.Task[None] | None = None
        self._joining: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._draining: set[str] = set()
        """Those of `_leaving` that could still stay."""
        self._is_stopped = False

    def start(self) -> None:
        """Follow the file from now on, on the running event loop. The engines must have weights."""
        if self._watch_task is None:
            self._watch_task = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Give up what is under way, and begin nothing more: engines that were starting are ended."""
        self._is_stopped = True
        under_way = [*self._joining.values(), *self._leaving.values()]
        if self._watch_task is not None:
            under_way.append(self._watch_task)
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)

    async def wait_until_settled(self) -> None:
        """Wait until no engine joins or leaves any more."""
        while under_way := [*self._joining.values(), *self._leaving.values()]:
            await asyncio.wait(under_way)

    @property
    def expected_count(self) -> int:
        """How many engines there will be: dead ones are restarted, those that join counted, those that leave not."""
        return len(self._staying) + sum(not task.cancelling() for task in self._joining.values())

    @property
    def _staying(self) -> list[str]:
        gone = self._client.retired_names
        return [name for name in self._client.engine_names if name not in gone]

    def set_target(self, number: int) -> None:
        """Begin whatever leads to this number of engines, at least 1; returns at once. The last call counts.

        An engine that does not start is reported, and not tried again before the next call.
        """
        assert number >= 1, "a run has at least one engine"
        if self._is_stopped:
            return
        for name in reversed([name for name in self._leaving if name in self._draining]):
            if self.expected_count < number:
                self._leaving.pop(name).cancel()
                self._draining.discard(name)
                self._client.unretire(name)
                self._report(f"{name} stays after all")
        while self.expected_count < number:
            name = self._free_name()
            self._joining[name] = self._start_task(self._join(name), self._joining, name)
        for name, task in reversed(self._joining.items()):
            if self.expected_count > number and not task.cancelling():
                task.cancel()
                self._report(f"{name} is no longer wanted, and had not started yet")
        while self.expected_count > number:
            dead = [name for name in self._staying if name in self._client.dead_engines]
            name = (dead or self._staying)[-1]
            self._leaving[name] = self._start_task(self._leave(name, self._client.retire(name)), self._leaving, name)
            self._draining.add(name)

    async def _watch(self) -> None:
        seen: tuple[int, int] | None = None
        while True:
            latest = await asyncio.to_thread(target_file_version, self._folder)
            if latest is not None and latest != seen:
                await self._follow_file()
            seen = latest or seen
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _follow_file(self) -> None:
        if self._fixed_reason is not None:
            self._report(f"{ENGINES_FILE} changes nothing: {self._fixed_reason}")
            return
        try:
            target = await asyncio.to_thread(read_target, self._folder)
        except (ConfigError, OSError) as error:
            self._report(f"their number stays as it is: {error}")
            return
        before = self.expected_count
        self.set_target(target)
        if target != before:
            self._report(f"{target} are wanted, there are {before}")

    def _start_task(
        self, work: Coroutine[Any, Any, None], under_way: dict[str, asyncio.Task[None]], name: str
    ) -> asyncio.Task[None]:
        task = mark_exception_retrieved(asyncio.ensure_future(work))

        def ended(_: object) -> None:
            if under_way.get(name) is task:
                del under_way[name]

        task.add_done_callback(ended)
        return task

    def _free_name(self) -> str:
        taken = {*self._client.engine_names, *self._joining, *self._leaving}
        return next(name for name in map(engine_name, count()) if name not in taken)

    async def _join(self, name: str) -> None:
        begun = now()
        try:
            engine = await self._start(name)
            try:
                await self._publisher.add(name, engine)
            except BaseException:
                await self._stop(name, engine)
                raise
        except Exception as error:
            self._report(f"{name} did not join, and {len(self._staying)} go on: {type(error).__name__}: {error}")
        else:
            self._report(f"{name} joined with the current weights in {now() - begun:.1f} s: {len(self._staying)} now")

    async def _leave(self, name: str, empty: asyncio.Event) -> None:
        begun, finished = now(), True
        try:
            async with asyncio.timeout(self._drain_s):
                await empty.wait()
        except TimeoutError:
            finished = False
        self._draining.discard(name)
        engine = await self._publisher.remove(name)
        try:
            await self._stop(name, engine)
        except Exception as error:
            self._report(f"{name} gets nothing to do any more, but could not be ended: {type(error).__name__}: {error}")
            return
        what = "with all requests answered" if finished else "before all requests were answered: others get the rest"
        self._report(f"{name} left after {now() - begun:.1f} s, {what}: {len(self._staying)} now")
