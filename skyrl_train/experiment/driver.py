"""The process that drives a run: signals that end it, its garbage collector, and what it says when the run fails."""

from __future__ import annotations

import asyncio
import atexit
import gc
import logging
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import skyrl_train
from skyrl_train.cluster import ray_reaper
from skyrl_train.config.redaction import redact
from skyrl_train.errors import RunInterrupted, SkyRLError
from skyrl_train.report.logs import TRACEBACK_NOTE_PREFIX, is_library

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SIGNAL_DELIVERY_S = 0.01
"""In which the event loop reads what signals have written, and calls their handlers."""
_REPEATED_SIGNAL_WINDOW_S = {signal.SIGINT: 0.1, signal.SIGTERM: 2.0, signal.SIGHUP: 2.0}
"""Seconds within which a repeated signal counts as the same request. `timeout` and shells signal the run and then its
process group; `ray job stop` and schedulers signal the run and its parent, which forwards the signal (`uv run`). A
person who presses Ctrl-C again is slower than 0.1 s."""
GC_THRESHOLDS = (500, 4_000, 10)
"""New objects, less those that went, between two passes over the youngest, and how many of these between two over
those that are older. A pass takes up to a microsecond an object, in which nothing else happens: so it is a small one,
or a rare one. Objects that went count whatever their age: where conversations end as others begin, the youngest are
many more than the first number when their turn comes (with 5,000 it was 100,000 to 200,000)."""
BUG_REPORT_HINT = "Its traceback has lines of installed packages alone: if none of them is yours, please report it."
_MAX_MESSAGE_CHARS = 2000
"""Characters of a message."""
_PACKAGE_FOLDER = str(Path(skyrl_train.__file__).parent) + os.sep
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')
_log = logging.getLogger(__name__)
T = TypeVar("T")


def _handled_signals() -> list[signal.Signals]:
    """Return the signals that end a run. An ignored SIGHUP (`nohup`) stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _SIGNALS if number != signal.SIGHUP or not ignored]


def _set_handlers(handler: Any) -> dict[int, Any]:
    """Set a handler of our signals. Returns those before."""
    return {number: signal.signal(number, handler) for number in _handled_signals()}


def _leave(number: int, frame: object) -> None:
    with suppress(OSError):  # not by a stream of ours: the signal may have come while it was writing
        os.write(2, f"{RunInterrupted(number)}\n".encode())
    ray_reaper.exit_now(128 + number)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """Inside, SIGINT, SIGTERM and SIGHUP end the process at once: in a start, when there is nothing yet to be saved.

    An exception, which a handler may raise as well, would appear in the middle of any library's code: one that
    interrupts the release of a lock leaves that lock held for ever.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = _set_handlers(_leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def exit_with_signal_status() -> Iterator[None]:
    """For a process that ends with what is inside: if it was told to end, that is its exit status.

    Told once there is nothing left to be saved, it leaves at once. The interpreter drops handlers before modules, whose
    teardown takes its time: from there on a signal is ignored, since the process is ending anyway.

    A run that was told to end may leave a library with threads of its own in the middle of something. Then the
    interpreter may crash when it is torn down, and the status would be that of the crash. So the process ends without
    that, once modules have done what they do at exit.
    """
    if threading.current_thread() is threading.main_thread():
        atexit.register(_set_handlers, signal.SIG_IGN)
        _set_handlers(_leave)
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


async def run_until_signaled(work: Coroutine[Any, Any, T], lost: Awaitable[SkyRLError]) -> T:
    """Await `work`, unless a signal or `lost` ends it: it is then cancelled, and the reason raised once it ended.

    The signals are SIGINT, SIGTERM and SIGHUP. A second one leaves at once, with nothing closed: the kernel and Ray's
    guard end our processes. Repetitions within `_ONE_REQUEST_S` are the same request. `lost` returns the error to end
    with. Replaces Ray's own handler of SIGTERM. Afterwards the handlers from before are back. In a thread that is not
    the main one signals are left to the thread that waits for it.
    """
    told: asyncio.Future[SkyRLError] = asyncio.get_running_loop().create_future()
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(lost)
    with _signals_to_future(told):
        try:
            ends: list[asyncio.Future[Any]] = [task, told, watch]
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            lost_with = watch.result() if watch.done() and not task.done() else None
            await _end(task)
            await asyncio.sleep(_SIGNAL_DELIVERY_S)  # a signal that came while something blocked the loop is heard now
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
def _signals_to_future(told: asyncio.Future[SkyRLError]) -> Iterator[None]:
    """Inside, the first of our signals is the result of `told`, and the second ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    first: tuple[signal.Signals, float] | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first
        if told.done():
            if first is not None and first[0] == number and loop.time() < first[1] + _REPEATED_SIGNAL_WINDOW_S[number]:
                return
            ray_reaper.exit_now(128 + number)
        first = number, loop.time()
        _log.warning("%s: leaving in good order. Again: leaving at once.", number.name)
        told.set_result(RunInterrupted(number))

    before = {number: signal.getsignal(number) for number in _handled_signals()}
    for number in before:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


# -- garbage collector


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Inside, cycles are looked for more seldom, and not among what was there before.

    A driver keeps the messages of thousands of conversations, and makes some hundred short-lived objects a turn, almost
    none of them in cycles: with Python's defaults the collector took more than half of its time.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()  # or what is garbage now would stay
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()


# -- failure


def format_failure(error: Exception) -> str:
    """Lines about what ended a run; the last one is the error that everything else follows from.

    An error of ours says by itself what to do. Of any other one the line of the user's own code is named in which it
    was raised, here or in another process; if there is none, it is a defect, and is called that.
    """
    links = list(_cause_chain(error))
    notes = [redact(str(note)) for one, _ in links for note in getattr(one, "__notes__", ())]
    lines = [*dict.fromkeys(notes)]
    if isinstance(error, SkyRLError):
        return "\n".join([*lines, f"{type(error).__name__}: {redact(str(error))}"])
    if not any(note.startswith(TRACEBACK_NOTE_PREFIX) for note in notes):
        lines += [redact("".join(traceback.format_exception(error)).rstrip())]  # there is no log
    places = [_user_frame(one, there) for one, there in links]
    if not any(places):
        lines.append(BUG_REPORT_HINT)
    for (one, _), place in zip(links, places, strict=True):
        where = getattr(one, "raised_in", "")
        message = redact(str(one))[:_MAX_MESSAGE_CHARS]
        lines.append(f"{where + ': ' if where else ''}{type(one).__name__}: {message}{f' ({place})' if place else ''}")
    return "\n".join(lines)


def _cause_chain(error: BaseException | None) -> Iterator[tuple[Exception, str]]:
    """An exception, then what it was raised from, and so on; each with its traceback in another process, if it has one.

    What was handled while another one was raised is no cause of it, and a cancellation is none either.
    """
    from skyrl_train.cluster.actors import is_ray_task_error  # imports Ray

    seen: set[int] = set()
    while isinstance(error, Exception) and id(error) not in seen:
        seen.add(id(error))
        if is_ray_task_error(error):
            yield getattr(error, "cause", error), str(error)
            return
        cause = error.__cause__
        if is_ray_task_error(cause):
            yield error, str(cause)
            return
        yield error, ""
        error = cause


def _user_frame(error: Exception, there: str) -> str:
    """The last line of the user's own code that an exception came through; "" if it came through none."""
    frames = [(frame.filename, str(frame.lineno), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames += _FRAME.findall(there)
    own = [frame for frame in frames if not frame[0].startswith((_PACKAGE_FOLDER, "<")) and not is_library(frame[0])]
    return "{}:{} in {}".format(*own[-1]) if own else ""
