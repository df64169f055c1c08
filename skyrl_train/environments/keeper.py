"""The parent of an environment's process: it bounds what is printed there, and ends what was started there.

The process that the driver starts forks at once. The child, the worker, holds environments and the wire. Its parent,
the keeper, passes on what the worker and all that it has started print, and ends all of them once the worker has ended,
the driver asks for it (SIGTERM), or the driver is dead. On Linux it is their init process, so none is lost to it: not
those in a session of their own, nor orphans. Neither a worker that hangs in C nor a busy driver holds up a keeper.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import signal
import sys
import time
from contextlib import suppress
from functools import partial

from skyrl_train.environments.prints import BoundedPrints

ENDS_S = 4.0
"""How long processes are killed before a keeper gives up: the kernel may hold one back."""
_LOOKS_AGAIN_S = 0.01
_CHUNK = 64 * 2**10
"""Bytes; what a pipe holds."""
_BETWEEN_LINES_S = 0.001
"""A process that prints many lines wakes its keeper for many at a time: else that costs more than to print them."""
IN_FILE = 32
"""Times what is shown on the terminal: 1 MiB at first, then 128 KiB a minute."""
_PATIENCE_MS = 100
"""How long a line waits for whoever reads the driver's stderr."""


def keep(log: str | None = None) -> None:
    """Fork, and return in the child only. `log`: a file to which what is printed goes, too, at greater length."""
    keeper = os.getpid()
    source, sink = os.pipe()
    _prctl("PR_SET_PDEATHSIG", signal.SIGTERM)
    _prctl("PR_SET_CHILD_SUBREAPER", 1)
    gc.freeze()  # the pages that both share stay shared
    worker = os.fork()
    if worker == 0:
        _prctl("PR_SET_PDEATHSIG", signal.SIGKILL)
        if os.getppid() != keeper:  # it died before it could be watched
            os._exit(1)
        os.dup2(sink, 2)
        os.close(source)
        os.close(sink)
        return
    os.close(sink)
    _Keeper(worker, source, log).run()
    os._exit(0)


class _Keeper:
    def __init__(self, worker: int, source: int, log: str | None):
        self._worker = worker
        self._source = source
        os.set_blocking(source, False)
        name = f"env {worker}"
        self._prints = [BoundedPrints(name, _to_stderr)]
        if log is not None:
            with suppress(OSError):  # a full disk
                file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
                self._prints.append(BoundedPrints(name, partial(_to_file, file), times=IN_FILE))
        self._signals = _heard(signal.SIGCHLD, signal.SIGTERM)
        self._poll = select.poll()
        for descriptor in (source, self._signals):
            self._poll.register(descriptor, select.POLLIN)
        null = os.open(os.devnull, os.O_RDWR)
        for end_of_wire in (0, 1):  # the driver sees the worker's death by the end of the wire
            os.dup2(null, end_of_wire)
        os.close(null)

    def run(self) -> None:
        """Returns once nothing is left of what was started."""
        over = self._worker in _ended_children()
        while not over:
            seconds = min((s for prints in self._prints if (s := prints.seconds_to_tick) is not None), default=None)
            ready = [descriptor for descriptor, _ in self._poll.poll(None if seconds is None else seconds * 1000 + 1)]
            if self._source in ready and not self._read():
                self._poll.unregister(self._source)  # nobody holds its other end any more
            if self._signals in ready:
                over = signal.SIGTERM in os.read(self._signals, _CHUNK) or self._worker in _ended_children()
            for prints in self._prints:
                prints.tick()
        _end_children()
        while self._read():
            pass
        for prints in self._prints:
            prints.close()

    def _read(self) -> bool:
        """Take in what was printed. Whether there was anything."""
        data = b""
        with suppress(BlockingIOError):
            data = os.read(self._source, _CHUNK)
            for prints in self._prints:
                prints.feed(data)
        if len(data) < _CHUNK // 2:
            time.sleep(_BETWEEN_LINES_S)
        return bool(data)


def _ended_children() -> set[int]:
    """Process ids of those that have ended since this was asked last: the worker, and orphans."""
    ended = set()
    with suppress(ChildProcessError):  # there are no others
        while pid := os.waitpid(-1, os.WNOHANG)[0]:
            ended.add(pid)
    return ended


def _end_children() -> None:
    """Kill all descendants, until there is none: one that is killed may just have started another."""
    until = time.monotonic() + ENDS_S
    with suppress(ChildProcessError):  # none is left
        while time.monotonic() < until:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                _kill_descendants()
                time.sleep(_LOOKS_AGAIN_S)


def _kill_descendants() -> None:
    import psutil  # late: most keepers end without a need for it, and it takes a quarter of a worker's start

    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            process.kill()


def _heard(*numbers: signal.Signals) -> int:
    """A descriptor from which the numbers of these signals can be read, a byte each."""
    source, sink = os.pipe()
    for descriptor in (source, sink):
        os.set_blocking(descriptor, False)
    signal.set_wakeup_fd(sink, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return source


def _to_stderr(line: bytes) -> bool:
    """Write a line to the driver's stderr, unless nobody takes it: environments do not wait for who reads that."""
    poll = select.poll()
    poll.register(2, select.POLLOUT)
    try:
        return bool(poll.poll(_PATIENCE_MS)) and os.write(2, line) == len(line)
    except OSError:  # a full disk, or nobody reads it any more
        return False


def _to_file(file: int, line: bytes) -> bool:
    try:
        return os.write(file, line) == len(line)
    except OSError:
        return False


def _prctl(option: str, value: int) -> None:
    """Ask the kernel to send this process a signal when its parent dies, or to give it its orphans (Linux)."""
    numbers = {"PR_SET_PDEATHSIG": 1, "PR_SET_CHILD_SUBREAPER": 36}
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(numbers[option], value)
