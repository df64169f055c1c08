"""Scaling of the number of inference engines of a running run, controlled by a file in its folder."""

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
    """Adds and removes engines in the background until a run has the target number.

    A new engine receives requests once the publisher has sent it the current weights. An engine that is removed
    receives no new requests, takes part in weight syncs while it is draining, and stops after its last request or at
    its deadline. At the deadline its remaining requests go to the other engines, as if it had died. The engines that
    joined last are removed first.
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
        """Create the scaler; the method `start` begins to watch the file.

        Args:
            client: The client of the engines.
            publisher: Sends new engines their weights.
            start: Starts an engine with the given name and returns it.
            stop: Stops the engine with the given name.
            folder: The run's folder. Its file engines.json holds the target number.
            drain_s: Seconds that an engine that is removed may take to finish its requests.
            fixed_reason: The reason why the number cannot change, reported when the file changes; None if it can.
            report: Called with a line of text for each event.
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
        """Names in `_leaving` that still serve requests, so that their removal can be canceled."""
        self._is_stopped = False

    def start(self) -> None:
        """Start to watch the file, as a task of the running event loop. Call it once the engines have weights."""
        if self._watch_task is None:
            self._watch_task = asyncio.ensure_future(self._watch())

    async def stop(self) -> None:
        """Stop watching and cancel all changes in progress. Stops engines that were starting. Can be called again."""
        self._is_stopped = True
        tasks = [*self._joining.values(), *self._leaving.values()]
        if self._watch_task is not None:
            tasks.append(self._watch_task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def wait_until_settled(self) -> None:
        """Wait until no engine is being added or removed."""
        while tasks := [*self._joining.values(), *self._leaving.values()]:
            await asyncio.wait(tasks)

    @property
    def expected_count(self) -> int:
        """Number of engines after the changes in progress. Dead engines count, because they are restarted."""
        return len(self._staying) + sum(not task.cancelling() for task in self._joining.values())

    @property
    def _staying(self) -> list[str]:
        retired = self._client.retired_names
        return [name for name in self._client.engine_names if name not in retired]

    def set_target(self, number: int) -> None:
        """Start the changes that lead to `number` engines, and return immediately. Replaces an earlier target.

        Does nothing after `stop`. An engine that fails to start is reported, and retried only by the next call.

        Args:
            number: The target number of engines, at least 1.
        """
        assert number >= 1, "a run has at least one engine"
        if self._is_stopped:
            return
        for name in reversed([name for name in self._leaving if name in self._draining]):
            if self.expected_count < number:
                self._leaving.pop(name).cancel()
                self._draining.discard(name)
                self._client.unretire(name)
                self._report(f"the removal of {name} was canceled")
        while self.expected_count < number:
            name = self._free_name()
            self._joining[name] = self._start_task(self._join(name), self._joining, name)
        for name, task in reversed(self._joining.items()):
            if self.expected_count > number and not task.cancelling():
                task.cancel()
                self._report(f"the start of {name} was canceled")
        while self.expected_count > number:
            dead = [name for name in self._staying if name in self._client.dead_engines]
            name = (dead or self._staying)[-1]
            self._leaving[name] = self._start_task(self._leave(name, self._client.retire(name)), self._leaving, name)
            self._draining.add(name)

    async def _watch(self) -> None:
        applied: tuple[int, int] | None = None
        while True:
            latest = await asyncio.to_thread(target_file_version, self._folder)
            if latest is not None and latest != applied:
                await self._apply_file()
            applied = latest or applied
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _apply_file(self) -> None:
        if self._fixed_reason is not None:
            self._report(f"{ENGINES_FILE} is ignored: {self._fixed_reason}")
            return
        try:
            target = await asyncio.to_thread(read_target, self._folder)
        except (ConfigError, OSError) as error:
            self._report(f"the number of engines is unchanged: {error}")
            return
        before = self.expected_count
        self.set_target(target)
        if target != before:
            self._report(f"scaling from {before} to {target}")

    def _start_task(
        self, work: Coroutine[Any, Any, None], tasks: dict[str, asyncio.Task[None]], name: str
    ) -> asyncio.Task[None]:
        task = mark_exception_retrieved(asyncio.ensure_future(work))

        def remove(_: object) -> None:
            if tasks.get(name) is task:
                del tasks[name]

        task.add_done_callback(remove)
        return task

    def _free_name(self) -> str:
        taken = {*self._client.engine_names, *self._joining, *self._leaving}
        return next(name for name in map(engine_name, count()) if name not in taken)

    async def _join(self, name: str) -> None:
        started_at = now()
        try:
            engine = await self._start(name)
            try:
                await self._publisher.add(name, engine)
            except BaseException:
                await self._stop(name, engine)
                raise
        except Exception as error:
            self._report(f"{name} could not be added, {len(self._staying)} remain: {type(error).__name__}: {error}")
        else:
            self._report(
                f"{name} joined with the current weights in {now() - started_at:.1f} s: {len(self._staying)} now"
            )

    async def _leave(self, name: str, drained: asyncio.Event) -> None:
        started_at, finished = now(), True
        try:
            async with asyncio.timeout(self._drain_s):
                await drained.wait()
        except TimeoutError:
            finished = False
        self._draining.discard(name)
        engine = await self._publisher.remove(name)
        try:
            await self._stop(name, engine)
        except Exception as error:
            self._report(f"{name} receives no more requests, but could not be stopped: {type(error).__name__}: {error}")
            return
        outcome = "all its requests finished" if finished else "its unfinished requests go to other engines"
        self._report(f"{name} left after {now() - started_at:.1f} s, {outcome}: {len(self._staying)} now")
