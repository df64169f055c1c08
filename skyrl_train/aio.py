"""Work at the same time that ends together, and work that is not left half done."""

from __future__ import annotations

import asyncio
import math
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from skyrl_train.errors import DeadlineExceeded

T = TypeVar("T")


async def gather_all(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Await all calls concurrently. The first failure is raised once the others, which it cancels, have ended.

    asyncio.gather leaves them running, and prints their tracebacks when nobody asks for them; a TaskGroup raises
    groups of exceptions.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


F = TypeVar("F", bound="asyncio.Future[Any]")


def mark_exception_retrieved(future: F) -> F:
    """The same future, whose error is no complaint of the event loop if nobody is left to hear it."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def with_timeout(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled after `seconds`. Use this instead of `asyncio.wait_for`.

    Before Python 3.12, `wait_for` drops the cancellation of its caller if the result arrives at the same moment: a run
    that was told to end went on.

    Raises:
        TimeoutError: `work` took longer.
    """
    async with asyncio.timeout(seconds if seconds < math.inf else None):
        return await work


@asynccontextmanager
async def deadline(waited_for: str, seconds: float) -> AsyncIterator[None]:
    """Cancel what is awaited inside after `seconds`.

    Raises:
        DeadlineExceeded: Naming `waited_for`.
    """
    try:
        async with asyncio.timeout(seconds if seconds < math.inf else None) as limit:
            yield
    except TimeoutError as error:
        if limit.expired() and not isinstance(error, DeadlineExceeded):
            raise DeadlineExceeded(waited_for, seconds) from error
        raise


async def finish_despite_cancellation(work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, also to its end if this is cancelled meanwhile, which is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            await task
        raise


class EventLoopThrottle:
    """Limits how much goes through here in one turn of the event loop, in the order in which it comes.

    Thousands of tasks that become ready together would otherwise all run before anything else does. What goes through
    depends on no clock.
    """

    def __init__(self, max_weight: int):
        self._max_weight = max_weight
        self._states: WeakKeyDictionary[asyncio.AbstractEventLoop, _ThrottleState] = WeakKeyDictionary()

    async def __call__(self, weight: int = 1) -> None:
        """Go through, in this turn or in a later one. A weight above the limit has a turn of its own."""
        loop = asyncio.get_running_loop()
        line = self._states.setdefault(loop, _ThrottleState())
        if not line.used_weight:
            loop.call_soon(self._next_iteration, loop, line)
        if self._has_room(line, weight) and not line.waiting:
            line.used_weight += weight
            return
        turn: asyncio.Future[None] = loop.create_future()
        line.waiting.append((turn, weight))
        await turn

    def _has_room(self, line: _ThrottleState, weight: int) -> bool:
        return not line.used_weight or line.used_weight + weight <= self._max_weight

    def _next_iteration(self, loop: asyncio.AbstractEventLoop, line: _ThrottleState) -> None:
        line.used_weight = 0
        while line.waiting and self._has_room(line, line.waiting[0][1]):
            turn, weight = line.waiting.popleft()
            if not turn.done():  # whoever waited was cancelled
                turn.set_result(None)
                line.used_weight += weight
        if line.used_weight:
            loop.call_soon(self._next_iteration, loop, line)


@dataclass(slots=True)
class _ThrottleState:
    """Of one event loop."""

    used_weight: int = 0
    """The weight that went through in this turn."""
    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)


class RefCountedContext:
    """A context that several may be in at once: the first to enter sets it up, and the last to leave ends it."""

    def __init__(self, context: Callable[[], AbstractContextManager[None]]):
        self._context = context
        self._inside = 0
        self._open = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._open.enter_context(self._context())
            self._inside += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0:
                self._open.close()
