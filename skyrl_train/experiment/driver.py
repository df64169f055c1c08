"""The driver process of a run: signals that end it, its garbage collector, and the report of a failure."""

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
"""Seconds for the event loop to read pending signals and call their handlers."""
_REPEATED_SIGNAL_WINDOW_S = {signal.SIGINT: 0.1, signal.SIGTERM: 2.0, signal.SIGHUP: 2.0}
"""Seconds within which a repeated signal counts as the same request. `timeout` and shells signal the run and then its
process group; `ray job stop` and schedulers signal the run and its parent, which forwards the signal (`uv run`). A
person who presses Ctrl-C again is slower than 0.1 s."""
GC_THRESHOLDS = (500, 4_000, 10)
"""The arguments of `gc.set_threshold` in a driver. The first is the number of allocations minus deallocations that
triggers a collection of the youngest generation; the others count collections of the next younger generation. A
collection takes up to a microsecond per object and blocks everything else, so it must be small or rare.
Deallocations count whatever the object's age: where conversations end while others begin, the youngest generation
grows far beyond the first number before it is collected (with 5,000 to between 100,000 and 200,000 objects)."""
BUG_REPORT_HINT = "The traceback only has lines of installed packages. If none of them is yours, please report a bug."
_MAX_MESSAGE_CHARS = 2000
_PACKAGE_FOLDER = str(Path(skyrl_train.__file__).parent) + os.sep
_FRAME = re.compile(r'File "([^"\n]+)", line (\d+), in (\S+)')
_log = logging.getLogger(__name__)
T = TypeVar("T")


def _handled_signals() -> list[signal.Signals]:
    """Return the signals that end a run. An ignored SIGHUP (`nohup`) stays ignored."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _SIGNALS if number != signal.SIGHUP or not ignored]


def _set_handlers(handler: Any) -> dict[int, Any]:
    """Set the handler of the signals that end a run. Returns the previous handlers."""
    return {number: signal.signal(number, handler) for number in _handled_signals()}


def _exit_now(number: int, frame: object) -> None:
    with suppress(OSError):  # bypasses sys.stderr, because the signal may have interrupted a write to it
        os.write(2, f"{RunInterrupted(number)}\n".encode())
    ray_reaper.exit_now(128 + number)


@contextmanager
def exit_on_signals() -> Iterator[None]:
    """End the process at once on SIGINT, SIGTERM and SIGHUP, for the start of a run, when nothing has to be saved.

    An exception raised by a signal handler would appear in the middle of any library's code. One that interrupts the
    release of a lock would leave that lock held forever. Has no effect outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = _set_handlers(_exit_now)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def exit_with_signal_status() -> Iterator[None]:
    """Exit with 128 + the signal's number if a signal ended the run.

    Skips the interpreter's teardown in that case: a library thread that is still running could crash it and change the
    exit status. `atexit` functions run before.

    Outside of `run_until_signaled` a signal ends the process at once. While the interpreter shuts down, signals are
    ignored because the process is ending anyway.
    """
    if threading.current_thread() is threading.main_thread():
        atexit.register(_set_handlers, signal.SIG_IGN)
        _set_handlers(_exit_now)
    try:
        yield
    except SystemExit as exit_request:
        if exit_request.code in {128 + number for number in _SIGNALS}:
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError):  # the reader of a pipe may have been ended by the same signal
                    stream.flush()
            os._exit(int(exit_request.code))
        raise


async def run_until_signaled(work: Coroutine[Any, Any, T], lost: Awaitable[SkyRLError]) -> T:
    """Await `work` until it ends, a signal arrives or `lost` completes; then cancel it and raise the reason.

    The signals are SIGINT, SIGTERM and SIGHUP. A second signal ends the process at once without closing anything; the
    kernel and Ray's reaper end its child processes. Repetitions within `_REPEATED_SIGNAL_WINDOW_S` count as the same
    request. Replaces Ray's handler of SIGTERM and restores the previous handlers at the end. Outside of the main thread
    signals are not handled.

    Args:
        work: The run. It is cancelled and awaited before the reason is raised.
        lost: Completes with the error to raise when the cluster is lost.

    Returns:
        The result of `work`.

    Raises:
        RunInterrupted: A signal arrived.
        SkyRLError: The result of `lost`.
    """
    received: asyncio.Future[SkyRLError] = asyncio.get_running_loop().create_future()
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(lost)
    with _signals_to_future(received):
        try:
            futures: list[asyncio.Future[Any]] = [task, received, watch]
            await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
            lost_error = watch.result() if watch.done() and not task.done() else None
            await _end(task)
            await asyncio.sleep(_SIGNAL_DELIVERY_S)  # handle a signal that arrived while something blocked the loop
            reason = received.result() if received.done() else lost_error
            if reason is None:
                return task.result()
            raise reason from (None if task.cancelled() else task.exception())
        finally:
            watch.cancel()
            await _end(task)  # the caller may have been cancelled before `work` ended


async def _end(task: asyncio.Future[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


@contextmanager
def _signals_to_future(received: asyncio.Future[SkyRLError]) -> Iterator[None]:
    """Set the first signal as the result of `received`; end the process on the second one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    first: tuple[signal.Signals, float] | None = None

    def on_signal(number: signal.Signals) -> None:
        nonlocal first
        if received.done():
            if first is not None and first[0] == number and loop.time() < first[1] + _REPEATED_SIGNAL_WINDOW_S[number]:
                return
            ray_reaper.exit_now(128 + number)
        first = number, loop.time()
        _log.warning("%s: shutting down cleanly. Send the signal again to exit at once.", number.name)
        received.set_result(RunInterrupted(number))

    previous = {number: signal.getsignal(number) for number in _handled_signals()}
    for number in previous:
        loop.add_signal_handler(number, on_signal, number)
    try:
        yield
    finally:
        for number, handler in previous.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)


# -- garbage collector


@contextmanager
def relaxed_gc() -> Iterator[None]:
    """Run the garbage collector less often, and exclude the objects that exist on entry.

    A driver keeps the messages of thousands of conversations and creates hundreds of short-lived objects per turn,
    almost none of them in reference cycles. With Python's defaults the collector took more than half of the driver's
    time. On exit the thresholds are restored, and objects are unfrozen unless the program had frozen some before.
    """
    thresholds, num_frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()  # frozen garbage would never be freed
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        if not num_frozen:
            gc.unfreeze()


# -- failure


def format_failure(error: Exception) -> str:
    """Return the lines that report what ended a run. The last line is the error that caused all others.

    A SkyRLError's message already says what to do. For any other error the report names the last line of user code that
    it came through, in this process or another one. If there is none, the report asks the reader to report a bug.
    Secrets are redacted.
    """
    links = list(_cause_chain(error))
    notes = [redact(str(note)) for link, _ in links for note in getattr(link, "__notes__", ())]
    lines = [*dict.fromkeys(notes)]
    if isinstance(error, SkyRLError):
        return "\n".join([*lines, f"{type(error).__name__}: {redact(str(error))}"])
    if not any(note.startswith(TRACEBACK_NOTE_PREFIX) for note in notes):
        lines += [redact("".join(traceback.format_exception(error)).rstrip())]  # no log has the traceback
    frames = [_user_frame(link, remote_traceback) for link, remote_traceback in links]
    if not any(frames):
        lines.append(BUG_REPORT_HINT)
    for (link, _), frame in zip(links, frames, strict=True):
        process = getattr(link, "raised_in", "")
        prefix, suffix = f"{process}: " if process else "", f" ({frame})" if frame else ""
        lines.append(f"{prefix}{type(link).__name__}: {redact(str(link))[:_MAX_MESSAGE_CHARS]}{suffix}")
    return "\n".join(lines)


def _cause_chain(error: BaseException | None) -> Iterator[tuple[Exception, str]]:
    """Yield an exception and its causes, each with its traceback text from another process, or "".

    An exception that was being handled when another one was raised is not its cause, and neither is a cancellation.
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


def _user_frame(error: Exception, remote_traceback: str) -> str:
    """Return the last line of user code that an exception came through; "" if there is none."""
    frames = [(frame.filename, str(frame.lineno), frame.name) for frame in traceback.extract_tb(error.__traceback__)]
    frames += _FRAME.findall(remote_traceback)
    user_frames = [
        frame for frame in frames if not frame[0].startswith((_PACKAGE_FOLDER, "<")) and not is_library(frame[0])
    ]
    return "{}:{} in {}".format(*user_frames[-1]) if user_frames else ""
