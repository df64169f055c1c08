"""An event loop in virtual time: instead of waiting, it advances its clock to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_THREAD_S = 60.0
"""Real seconds to wait for threads and sockets when no timer is left."""


class Deadlock(Exception):
    """All coroutines wait, and no timer or result is left that could wake one."""


class _Selector(selectors.DefaultSelector):
    """A selector that advances the loop's clock instead of waiting."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or timeout == 0:
            return ready
        if timeout is not None:
            self.now += max(timeout, 0.0)
            return ready
        ready = super().select(_THREAD_S)
        if not ready:
            raise Deadlock("No timer and no result is left that could wake one of the waiting coroutines.")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose `time()` starts at 0.

    Work for threads runs immediately on the loop's thread and takes no virtual time, because it would race with timers.
    """

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in virtual time, like `asyncio.run`.

    Raises:
        Deadlock: The coroutine would wait forever.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
