"""A process that kills the Ray processes of a driver that died: both ends of its pipe.

Ray's head processes end with their driver, but its agents look for the head for another minute, and keep memory and
ports. If the raylet dies, the driver exits without a message, so the reaper reports the cause.
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
"""Names of the Ray processes without which a run cannot continue."""
_MAX_STOPPED_S = 60.0
"""Ray has declared a raylet dead that was stopped (SIGSTOP) for longer than this."""
_KILL_TIMEOUT_S = 30.0
_DRIVER_EXIT_GRACE_S = 0.1
"""Time between the end of the driver's main thread, with which the kernel kills Ray's processes, and the driver's own
end.
"""
_POLL_INTERVAL_S = 0.25
"""Interval while Ray starts. Its agents, which start last, take longer than this to overwrite their process titles."""
_START_TIMEOUT_S = 120.0
"""Limit of a start, which takes seconds, or a minute with several attempts. If its raylet is stopped, the driver waits
forever in Ray's code with Python's lock held, so that nothing in the driver could end it.
"""
_DIED_DURING_STARTUP = "The run ended while Ray was starting: it was killed, or one of Ray's processes died"
"""Cause if the driver ended during a start: Ray's libraries end a process that cannot connect to a raylet, without an
exception.
"""
_TAG_VARIABLE = "SKYRL_GUARDED_BY"
"""Environment variable that all of Ray's processes inherit: no list of them is ever complete."""
_STOP_REQUESTED = "stop_requested"
"""Line of the pipe: the driver was asked to end."""
_ATTEMPT = "attempt"
"""Line of the pipe: the driver starts an attempt to start Ray."""


class RayReaper:
    """A child process that kills the processes started inside `tag_children`, and their children, if this process dies.

    If this process was asked to end (`exit_now`), the reaper also removes `folder`, Ray's own, whose logs nobody needs
    then. It also kills tagged processes if `tag_children` is still running `start_s` seconds after `start_attempt`,
    which makes the start fail.
    """

    def __init__(self, folder: str | None = None, start_s: float = _START_TIMEOUT_S) -> None:
        """Start the reaper process.

        Args:
            folder: Ray's folder for sockets and logs, to be removed after a requested end. None keeps it.
            start_s: Seconds that an attempt to start Ray may take.
        """
        self._tag = uuid.uuid4().hex
        self._ray_processes: list[psutil.Process] = []
        self._names: dict[int, str] = {}
        self._stopped_s = 0.0
        command = [sys.executable, "-m", __name__, self._tag, str(os.getpid()), folder or "", str(start_s)]
        # In a new session: a signal to the driver's process group must not end the reaper.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        _live_reapers.append(self)

    @contextmanager
    def tag_children(self) -> Iterator[None]:
        """Tag the processes that are started inside the block, so that the reaper kills them if this process dies."""
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
        """Tell the reaper that an attempt to start Ray begins: its time limit starts again."""
        self._send_lines(f"{_ATTEMPT}\n")

    def _send_lines(self, lines: str) -> None:
        """Write lines to the pipe, unbuffered, so that signal handlers may call this at any point."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), lines.encode())

    def dead_process(self) -> str | None:
        """Return name and process id of an essential Ray process that has died, or None."""
        dead = (head.pid for head in self._ray_processes if not _is_alive(head))
        return next((f"{self._names[pid]} (process {pid})" for pid in dead), None)

    def kill_stopped_head(self, since_last_s: float) -> None:
        """Kill essential Ray processes if some have been stopped (SIGSTOP) for more than a minute.

        Calls that wait for a stopped raylet never return: `ray.put` has no deadline.

        Args:
            since_last_s: Seconds since the previous call. They count only if the driver was running, because a batch
                system may suspend all processes of a job at once.
        """
        stopped = [head for head in self._ray_processes if _is_stopped(head)]
        self._stopped_s = self._stopped_s + since_last_s if stopped else 0.0
        if self._stopped_s > _MAX_STOPPED_S:
            for head in stopped:
                print_stderr(
                    f"Killing Ray's {self._names[head.pid]} (process {head.pid}): stopped for {_MAX_STOPPED_S:g} s."
                )
                head.kill()

    def process_tree(self) -> set[psutil.Process]:
        """Return Ray's essential processes and all of their descendants."""
        processes = set(self._ray_processes)
        for head in self._ray_processes:
            with suppress(psutil.NoSuchProcess):
                processes.update(head.children(recursive=True))
        return processes

    def kill_processes(self, extra_processes: Set[psutil.Process] = frozenset()) -> None:
        """Kill all tagged processes, Ray's process tree and `extra_processes`, such as an earlier `process_tree`.

        Blocks until they are dead, at most 30 s.
        """
        _TaggedProcesses(self._tag, self.process_tree() | extra_processes).kill()

    def close(self) -> None:
        """Stop the reaper process. The processes that it watched keep running."""
        _live_reapers.remove(self)
        self._process.kill()
        self._process.communicate()


_live_reapers: list[RayReaper] = []


def exit_now(status: int) -> NoReturn:
    """Exit this process immediately, without closing anything. The reapers then kill Ray as after a requested stop."""
    for reaper in _live_reapers:
        reaper._send_lines(f"{_STOP_REQUESTED}\n")
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
    """The processes that have a tag or had it, because the titles that Ray's processes give themselves overwrite it."""

    def __init__(self, tag: str, known: Set[psutil.Process] = frozenset()):
        self._tag = tag
        self._processes = set(known)

    def scan(self) -> None:
        self._processes |= {process for process in psutil.process_iter() if _has_tag(process, self._tag)}

    def kill(self) -> None:
        """Kill the processes until none is left: a killed process may just have started another one.

        Python's resource trackers get a second to free the semaphores of killed processes, and then end by themselves.
        """
        deadline = time.monotonic() + _KILL_TIMEOUT_S  # the kernel may delay the end of a process
        while time.monotonic() < deadline:
            self.scan()
            live = [process for process in self._processes if _is_alive(process)]
            if not live:
                return
            for process in [process for process in live if not _is_resource_tracker(process)] or live:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            psutil.wait_procs(live, timeout=1)


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in argument for argument in process.cmdline())
    except (psutil.Error, OSError):
        return False


def _has_tag(process: psutil.Process, tag: str) -> bool:
    try:
        return process.environ().get(_TAG_VARIABLE) == tag
    except (psutil.Error, OSError):  # it has exited, or belongs to another user
        return False


def main(tag: str, driver: int, folder: str, start_s: float) -> None:
    """Run the reaper: wait until the driver ends, then kill what is left of its Ray.

    The driver's end closes the pipe on stdin, from which lines of the driver are read.

    Args:
        tag: Tag of the processes to kill.
        driver: Process id of the driver.
        folder: Folder to remove if the driver was asked to end; empty for none.
        start_s: Seconds that an attempt to start Ray may take.
    """
    processes = _TaggedProcesses(tag)
    monitor = _DriverMonitor(driver, processes, start_s)
    monitor.wait()
    if monitor.cause is not None and not monitor.stop_requested:
        print_stderr(f"{monitor.cause}. See the lines above and the logs of Ray's session.")
    processes.kill()
    if monitor.stop_requested and folder:
        shutil.rmtree(folder, ignore_errors=True)


class _DriverMonitor:
    """The reaper's view of the driver and of Ray's essential processes."""

    def __init__(self, driver: int, tagged_processes: _TaggedProcesses, start_s: float):
        self.cause: str | None = None
        """Reason why the driver exited, if a Ray process caused it; otherwise None."""
        self.stop_requested = False
        """True if the driver was asked to end."""
        self._starting = True
        self._start_s, self._until = start_s, math.inf
        self._tagged_processes = tagged_processes
        self._poll = select.poll()
        self._pipe = sys.stdin.fileno()
        self._poll.register(self._pipe, select.POLLIN | select.POLLHUP)
        self._watched: dict[int, str] = {}
        self._watch(driver, "")  # another child may hold the driver's end of the pipe open for a moment

    def wait(self) -> None:
        """Block until the driver has ended."""
        while not self._process_events():
            pass
        if self._starting and not self.stop_requested:
            self.cause = _DIED_DURING_STARTUP

    def _watch(self, pid: int, name: str) -> None:
        if not hasattr(os, "pidfd_open"):  # macOS: the end of the pipe shows the end of the driver
            return
        with suppress(ProcessLookupError):
            self._watched[os.pidfd_open(pid)] = name
            self._poll.register(next(reversed(self._watched)), select.POLLIN)

    def _process_events(self) -> bool:
        """Wait for the next events and handle them. Return True if the driver has ended."""
        ready = [descriptor for descriptor, _ in self._poll.poll(_POLL_INTERVAL_S * 1000 if self._starting else None)]
        if self._starting:
            self._tagged_processes.scan()
            if time.monotonic() > self._until:
                print_stderr(
                    f"Ray did not start within {self._start_s:g} s: killing its processes, which do not respond."
                )
                self._tagged_processes.kill()
                self._until = time.monotonic() + self._start_s
        ended = any(self._watched.get(descriptor) == "" for descriptor in ready)
        if self._pipe in ready:  # the driver's last lines precede its end
            ended |= not self._read_lines()
        for descriptor in ready:
            name = self._watched.get(descriptor)
            if not name:
                continue
            self._poll.unregister(descriptor)
            if not ended:
                time.sleep(_DRIVER_EXIT_GRACE_S)
            # Ray ends a driver within milliseconds after its raylet, and the kernel ends a raylet with its driver.
            if ended or not all(self._watched.get(other) for other, _ in self._poll.poll(0)):
                cause = f"The run and Ray's {name} ended at the same time, because one of them was killed"
            else:
                cause = f"The run ended because Ray's {name} died"
            self.cause = self.cause or cause
        return ended

    def _read_lines(self) -> bool:
        """Handle the lines that the driver wrote. Return False if the driver's end of the pipe is closed."""
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
