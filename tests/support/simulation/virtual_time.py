"""An event loop whose time passes as fast as its work is done: where it would wait, it goes to the next timer."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
_THREAD_S = 60.0
"""Real seconds to wait for threads and sockets where no timer is left that could end the wait."""


class Deadlock(Exception):
    """Everything waits, and nothing is left that could end the wait."""


class _Selector(selectors.DefaultSelector):
    """Moves the loop's clock instead of waiting."""

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
            raise Deadlock("no timer and no result is left that any of the waiting coroutines could get.")
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """`time()` begins at 0. Work for threads is done at once, and takes no time of it: it would race with timers."""

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
    """asyncio.run in virtual time. Raises Deadlock where real time would wait for ever."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
