"""How a run ends before its time: by a signal, or because its cluster died."""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from skyrl_train.cluster import guard
from skyrl_train.errors import SkyRLError, Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_A_MOMENT_S = 0.01
"""In which the event loop reads what signals have written, and calls their handlers."""
_ONE_REQUEST_S = {signal.SIGINT: 0.1, signal.SIGTERM: 2.0, signal.SIGHUP: 2.0}
"""Seconds within which a repeated signal counts as the same request. `timeout` and shells signal the run and then its
process group; `ray job stop` and schedulers signal the run and its parent, which forwards the signal (`uv run`). A
person who presses Ctrl-C again is slower than 0.1 s."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


def _handled() -> list[signal.Signals]:
    """Return the signals that end a run. An ignored SIGHUP (`nohup`) stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _SIGNALS if number != signal.SIGHUP or not ignored]


def _handle(handler: Any) -> dict[int, Any]:
    """Set a handler of our signals. Returns those before."""
    return {number: signal.signal(number, handler) for number in _handled()}


def _leave(number: int, frame: object) -> None:
    with suppress(OSError):  # not by a stream of ours: the signal may have come while it was writing
        os.write(2, f"{Stopped(number)}\n".encode())
    guard.leave(128 + number)


@contextmanager
def signals_leave() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP end the process at once: in a start, when there is nothing yet to be saved.

    An exception, which a handler may raise as well, would appear in the middle of any library's code: one that
    interrupts the release of a lock leaves that lock held for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _handle(_leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exits_as_told() -> Iterator[None]:
    """For a process that ends with what is inside: if it was told to end, that is its exit status.

    Told once there is nothing left to be saved, it leaves at once. The interpreter drops handlers before modules, whose
    teardown takes its time: from there on a signal is ignored, since the process is ending anyway.

    A run that was told to end may leave a library with threads of its own in the middle of something. Then the
    interpreter may crash when it is torn down, and the status would be that of the crash. So the process ends without
    that, once modules have done what they do at exit.
    """
    if threading.current_thread() is threading.main_thread():
        atexit.register(_handle, signal.SIG_IGN)
        _handle(_leave)
    try:
        yield
    except SystemExit as leaving:
        if leaving.code in {128 + number for number in _SIGNALS}:
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # who reads it may have been told to end, too
                    stream.flush()
            os._exit(int(leaving.code))
        raise


async def until_told(work: Coroutine[Any, Any, T], lost: Awaitable[SkyRLError]) -> T:
    """Await `work`, unless a signal or `lost` ends it: it is then cancelled, and the reason raised once it ended.

    The signals are SIGINT, SIGTERM and SIGHUP. A second one leaves at once, with nothing closed: the kernel and Ray's
    guard end our processes. Repetitions within `_ONE_REQUEST_S` are the same request. `lost` returns the error to end
    with. Replaces Ray's own handler of SIGTERM. Afterwards the handlers from before are back. In a thread that is not
    the main one signals are left to the thread that waits for it.
    """
    told: asyncio.Future[SkyRLError] = asyncio.get_running_loop().create_future()
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(lost)
    with _signals_tell(told):
        try:
            ends: list[asyncio.Future[Any]] = [task, told, watch]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            lost_with = watch.result() if watch.done() and not task.done() else None
            await _end(task)
            await asyncio.sleep(_A_MOMENT_S)  # a signal that came while something blocked the loop is heard now
            reason = told.result() if told.done() else lost_with
            if reason is None:
                return task.result()
            raise reason from (None if task.cancelled() else task.exception())
        finally:
            watch.cancel()
            await _end(task)  # whoever waits for us may have been cancelled


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


@contextmanager
def _signals_tell(told: asyncio.Future[SkyRLError]) -> Iterator[None]:
    """Inside, the first of our signals is the result of `told`, and the second ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    first: tuple[signal.Signals, float] | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first
        if told.done():
            if first is not None and first[0] == number and loop.time() < first[1] + _ONE_REQUEST_S[number]:
                return
            guard.leave(128 + number)
        first = number, loop.time()
        _log.warning("%s: leaving in good order. Again: leaving at once.", number.name)
        told.set_result(Stopped(number))

    before = {number: signal.getsignal(number) for number in _handled()}
    for number in before:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
