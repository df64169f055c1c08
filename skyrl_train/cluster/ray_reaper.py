"""A process that briefly outlives a killed driver, to kill the driver's Ray: both ends of its pipe.

Ray's head ends with its driver, but its agents go on looking for the head for a minute, and keep memory and ports. And
the driver ends with its raylet, without a word of its own: then it is the guard that says what happened.
"""

from __future__ import annotations

import math
import os
import select
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Set
from contextlib import contextmanager, suppress
from typing import NoReturn

import psutil

from skyrl_train.terminal import print_stderr

ESSENTIAL_RAY_PROCESSES = ("gcs_server", "raylet")
"""Ray's processes without which a run cannot go on."""
_MAX_STOPPED_S = 60.0
"""A raylet that is stopped for longer than this has been declared dead by Ray."""
_KILL_TIMEOUT_S = 30.0
_DRIVER_EXIT_GRACE_S = 0.1
"""The kernel kills Ray's processes when the driver's main thread ends, a moment before the driver has."""
_POLL_INTERVAL_S = 0.25
"""While Ray starts: its agents, the last to come, need longer than this to give themselves a title."""
_START_TIMEOUT_S = 120.0
"""A start takes seconds, and several attempts a minute. One whose raylet is stopped would wait for ever, in Ray's code
and with Python's lock held, so that nothing in the driver could end it."""
_DIED_DURING_STARTUP = "The run ended while Ray was starting: it was killed, or one of Ray's processes died"
"""Ray's libraries end the process that they cannot connect to a raylet, without an exception."""
_TAG_VARIABLE = "SKYRL_GUARDED_BY"
"""Environment variable that Ray's processes inherit, from the first one on: no list of them is ever complete."""
_STOP_REQUESTED = "told"
"""The line that says that the driver was told to end."""
_ATTEMPT = "attempt"
"""The line that says that the driver begins to start Ray, perhaps again."""


class RayReaper:
    """Kills all processes that are started inside `marking`, and theirs, if this process dies.

    If it was told to end, the guard also removes `folder`, Ray's own: its logs say nothing that anybody asks for.
    Processes are killed, too, that `marking` goes on waiting for `start_s` after `begin`: then the start fails.
    """

    def __init__(self, folder: str | None = None, start_s: float = _START_TIMEOUT_S) -> None:
        self._tag = uuid.uuid4().hex
        self._ray_processes: list[psutil.Process] = []
        self._names: dict[int, str] = {}
        self._stopped_s = 0.0
        command = [sys.executable, "-m", __name__, self._tag, str(os.getpid()), folder or "", str(start_s)]
        # In a new session: a signal to the driver's process group must not end its guard.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        _live_reapers.append(self)

    @contextmanager
    def tag_children(self) -> Iterator[None]:
        """Processes that are started inside are guarded."""
        os.environ[_TAG_VARIABLE] = self._tag
        try:
            yield
        finally:
            del os.environ[_TAG_VARIABLE]
        self._ray_processes = [
            child for child in psutil.Process().children() if child.name() in ESSENTIAL_RAY_PROCESSES
        ]
        self._names = {head.pid: head.name() for head in self._ray_processes}
        self._send_lines("".join(f"{pid} {name}\n" for pid, name in self._names.items()))

    def start_attempt(self) -> None:
        """An attempt to start them begins: what was waited for until now does not count."""
        self._send_lines(f"{_ATTEMPT}\n")

    def _send_lines(self, lines: str) -> None:
        """Unbuffered, so that a handler of a signal may, whatever it has interrupted."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), lines.encode())

    def dead_process(self) -> str | None:
        """The first of Ray's own processes that has died, by name and process id."""
        dead = (head.pid for head in self._ray_processes if not _is_alive(head))
        return next((f"{self._names[pid]} (process {pid})" for pid in dead), None)

    def kill_stopped_head(self, since_last_s: float) -> None:
        """Kill those of Ray's own processes that have been stopped (SIGSTOP) for a minute.

        Calls that wait for a stopped raylet never return: `ray.put` has no deadline.

        Args:
            since_last_s: Seconds since the previous call. They count only if the driver was running, because a
                batch system may suspend all processes of a job at once.
        """
        stopped = [head for head in self._ray_processes if _is_stopped(head)]
        self._stopped_s = self._stopped_s + since_last_s if stopped else 0.0
        if self._stopped_s > _MAX_STOPPED_S:
            for head in stopped:
                print_stderr(
                    f"Ray's {self._names[head.pid]} (process {head.pid}) is killed: stopped for {_MAX_STOPPED_S:g} s."
                )
                head.kill()

    def process_tree(self) -> set[psutil.Process]:
        """Ray's own processes and all that they have started."""
        found = set(self._ray_processes)
        for head in self._ray_processes:
            with suppress(psutil.NoSuchProcess):
                found.update(head.children(recursive=True))
        return found

    def kill_processes(self, extra_processes: Set[psutil.Process] = frozenset()) -> None:
        """Kill the guarded processes now, and what is left of an earlier `family`."""
        _TaggedProcesses(self._tag, self.process_tree() | extra_processes).kill()

    def close(self) -> None:
        """End the guard; the processes live on."""
        _live_reapers.remove(self)
        self._process.kill()
        self._process.communicate()


_live_reapers: list[RayReaper] = []


def exit_now(status: int) -> NoReturn:
    """End this process at once, because it was told to: nothing is closed, guards end what they guard."""
    for guard in _live_reapers:
        guard._send_lines(f"{_STOP_REQUESTED}\n")
    os._exit(status)


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _is_stopped(process: psutil.Process) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


class _TaggedProcesses:
    """The processes with a mark, remembered: the titles that Ray's processes give themselves overwrite it."""

    def __init__(self, tag: str, known: Set[psutil.Process] = frozenset()):
        self._tag = tag
        self._processes = set(known)

    def scan(self) -> None:
        self._processes |= {process for process in psutil.process_iter() if _has_tag(process, self._tag)}

    def kill(self) -> None:
        """Kill them, until there is none: one that is killed may just have started another."""
        until = time.monotonic() + _KILL_TIMEOUT_S  # the kernel may hold one back
        while time.monotonic() < until:
            self.scan()
            living = [process for process in self._processes if _is_alive(process)]
            if not living:
                return
            for process in living:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(living, timeout=1)


def _has_tag(process: psutil.Process, tag: str) -> bool:
    try:
        return process.environ().get(_TAG_VARIABLE) == tag
    except (psutil.Error, OSError):  # gone, or another user's
        return False


def main(tag: str, driver: int, folder: str, start_s: float) -> None:
    """Wait until the driver ends, which closes its end of the pipe; then kill what is left of its Ray."""
    wards = _TaggedProcesses(tag)
    watch = _DriverMonitor(driver, wards, start_s)
    watch.wait()
    if watch.cause is not None:
        print_stderr(f"{watch.cause}: see the lines above and the logs of Ray's session.")
    wards.kill()
    if watch.stop_requested and folder:
        shutil.rmtree(folder, ignore_errors=True)


class _DriverMonitor:
    """Waits for the driver's end."""

    def __init__(self, driver: int, tagged_processes: _TaggedProcesses, start_s: float):
        self.cause: str | None = None
        """What of Ray's caused it, if that can be told."""
        self.stop_requested = False
        """Whether the driver left because it was told to."""
        self._starting = True
        self._start_s, self._until = start_s, math.inf
        self._tagged_processes = tagged_processes
        self._poll = select.poll()
        self._pipe = sys.stdin.fileno()
        self._poll.register(self._pipe, select.POLLIN | select.POLLHUP)
        self._watched: dict[int, str] = {}
        self._watch(driver, "")  # another child of its may hold its end of the pipe open for a moment

    def wait(self) -> None:
        """Returns once the driver has ended."""
        while not self._ended():
            pass
        if self._starting and not self.stop_requested:
            self.cause = _DIED_DURING_STARTUP

    def _watch(self, pid: int, name: str) -> None:
        if not hasattr(os, "pidfd_open"):  # macOS: the pipe's end tells of the driver's
            return
        with suppress(ProcessLookupError):
            self._watched[os.pidfd_open(pid)] = name
            self._poll.register(next(reversed(self._watched)), select.POLLIN)

    def _ended(self) -> bool:
        """Take in the next thing that happens. Whether it is the driver's end."""
        ready = [descriptor for descriptor, _ in self._poll.poll(_POLL_INTERVAL_S * 1000 if self._starting else None)]
        if self._starting:
            self._tagged_processes.scan()
            if time.monotonic() > self._until:
                print_stderr(
                    f"Ray did not start within {self._start_s:g} s: its processes do not answer, and are killed."
                )
                self._tagged_processes.kill()
                self._until = time.monotonic() + self._start_s
        ended = any(self._watched.get(descriptor) == "" for descriptor in ready)
        if self._pipe in ready:  # its last words before its end
            ended |= not self._listen()
        for descriptor in ready if not ended else ():
            if descriptor != self._pipe:
                self._poll.unregister(descriptor)
                time.sleep(_DRIVER_EXIT_GRACE_S)
                if all(self._watched.get(other) for other, _ in self._poll.poll(0)):  # the driver has not ended
                    self.cause = self.cause or f"Ray's {self._watched[descriptor]} died, and with it the run"
        return ended

    def _listen(self) -> bool:
        """Read what the driver says. Whether there was anything: else its end of the pipe is closed."""
        lines = os.read(self._pipe, 1 << 16).decode().splitlines()
        for line in lines:
            if line == _STOP_REQUESTED:
                self.stop_requested = True
            elif line == _ATTEMPT:
                self._until = time.monotonic() + self._start_s
            else:
                self._starting = False
                pid, name = line.split()
                self._watch(int(pid), name)
        return bool(lines)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
