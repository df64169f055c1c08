"""Helpers for asyncio: gathering, deadlines, cancellation and limits."""

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
    """Await all calls concurrently and return their results in order.

    If one fails, the others are cancelled, and its error is raised once all of them have ended. asyncio.gather would
    leave them running and print their tracebacks; a TaskGroup would raise an exception group.
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
    """Return the same future, marked so that the event loop does not log its exception if nobody retrieves it."""
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


async def with_timeout(seconds: float, work: Awaitable[T]) -> T:
    """Return the result of `work`, which is cancelled after `seconds`. Infinity means no timeout.

    Use this instead of `asyncio.wait_for`. Before Python 3.12, `wait_for` drops a cancellation of its caller that
    arrives together with the result, so a run that was asked to end kept running.

    Raises:
        TimeoutError: `work` took longer.
    """
    async with asyncio.timeout(seconds if seconds < math.inf else None):
        return await work


@asynccontextmanager
async def deadline(waited_for: str, seconds: float) -> AsyncIterator[None]:
    """Cancel what is awaited inside the block after `seconds`. Infinity means no deadline.

    Args:
        waited_for: What the block waits for, for the error message.
        seconds: Time limit of the block.

    Raises:
        DeadlineExceeded: The block took longer. The error names `waited_for`.
    """
    try:
        async with asyncio.timeout(seconds if seconds < math.inf else None) as limit:
            yield
    except TimeoutError as error:
        if limit.expired() and not isinstance(error, DeadlineExceeded):
            raise DeadlineExceeded(waited_for, seconds) from error
        raise


async def finish_despite_cancellation(work: Coroutine[Any, Any, T]) -> T:
    """Await `work` to its end, even if this call is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.cancelled():
            await task
        raise


class EventLoopThrottle:
    """A limiter of the weight that passes in one iteration of the event loop, in order of arrival.

    Thousands of tasks that become ready together would otherwise all run before anything else does. The limit does not
    depend on any clock. Each event loop has its own limit.
    """

    def __init__(self, max_weight: int):
        """Create a throttle that lets weights of up to `max_weight` in total pass per iteration."""
        self._max_weight = max_weight
        self._states: WeakKeyDictionary[asyncio.AbstractEventLoop, _ThrottleState] = WeakKeyDictionary()

    async def __call__(self, weight: int = 1) -> None:
        """Wait until `weight` may pass, in this iteration of the loop or a later one. A weight above the limit passes
        alone.
        """
        loop = asyncio.get_running_loop()
        state = self._states.setdefault(loop, _ThrottleState())
        if not state.used_weight:
            loop.call_soon(self._next_iteration, loop, state)
        if self._has_room(state, weight) and not state.waiting:
            state.used_weight += weight
            return
        future: asyncio.Future[None] = loop.create_future()
        state.waiting.append((future, weight))
        await future

    def _has_room(self, state: _ThrottleState, weight: int) -> bool:
        return not state.used_weight or state.used_weight + weight <= self._max_weight

    def _next_iteration(self, loop: asyncio.AbstractEventLoop, state: _ThrottleState) -> None:
        state.used_weight = 0
        while state.waiting and self._has_room(state, state.waiting[0][1]):
            future, weight = state.waiting.popleft()
            if not future.done():  # the waiting call was cancelled
                future.set_result(None)
                state.used_weight += weight
        if state.used_weight:
            loop.call_soon(self._next_iteration, loop, state)


@dataclass(slots=True)
class _ThrottleState:
    """State of a throttle in one event loop."""

    used_weight: int = 0
    """Weight that has passed in this iteration."""
    waiting: deque[tuple[asyncio.Future[None], int]] = field(default_factory=deque)
    """Calls that wait for a later iteration, with their weights."""


class RefCountedContext:
    """A reentrant context manager: the first to enter sets up the wrapped context, and the last to leave closes it.

    Thread-safe.
    """

    def __init__(self, context: Callable[[], AbstractContextManager[None]]):
        """Wrap the context that `context` creates."""
        self._context = context
        self._count = 0
        self._open = ExitStack()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._count == 0:
                self._open.enter_context(self._context())
            self._count += 1

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0:
                self._open.close()
