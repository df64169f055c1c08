"""The event loop thread through which all wrappers of this process call asynchronous engines."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from skyrl_train.errors import DeadlineExceeded

T = TypeVar("T")
_lock = threading.Lock()
_thread: threading.Thread | None = None
_loop: asyncio.AbstractEventLoop | None = None


def call(work: Coroutine[Any, Any, T], what: str, timeout_s: float) -> T:
    """Run a coroutine on the package's event loop, block until it ends, and return its result.

    Raises DeadlineExceeded, with the description `what`, after `timeout_s` seconds, RuntimeError on the loop's own
    thread, which would block itself, and the errors of the coroutine.
    """
    if threading.current_thread() is _thread:
        work.close()
        raise RuntimeError(
            f"{what} was called on the event loop's own thread, which would block itself. Call it from another thread."
        )
    future = asyncio.run_coroutine_threadsafe(work, _running())
    try:
        return future.result(timeout_s)
    except concurrent.futures.TimeoutError:
        if future.done():
            raise
        raise DeadlineExceeded(what, timeout_s) from None
    finally:
        future.cancel()


def _running() -> asyncio.AbstractEventLoop:
    global _thread, _loop
    with _lock:
        if _loop is None or _thread is None or not _thread.is_alive():  # not alive in a forked process
            _loop = asyncio.new_event_loop()
            _thread = threading.Thread(target=_loop.run_forever, name="skyrl-policies", daemon=True)
            _thread.start()
        return _loop
