"""A process that briefly outlives a killed driver, to kill the driver's processes: both ends of its pipe.

Ray's head ends with its driver, but its agents go on looking for the head for a minute, and keep memory and ports. And
the driver ends with its raylet, without a word of its own: then it is the guard that says what happened.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
from contextlib import suppress

import psutil

HEADS = ("gcs_server", "raylet")
"""Ray's processes without which a run cannot go on."""


class Guard:
    """Kills the current descendants of this process if it dies; `close` ends the guard without that."""

    def __init__(self) -> None:
        wards = [ward for ward in psutil.Process().children(recursive=True) if ward.is_running()]
        self._wards = wards
        self._heads = [(ward.name(), ward) for ward in wards if ward.name() in HEADS]
        arguments = [f"{ward.pid}:{ward.create_time()}:{ward.name()}" for ward in wards]
        command = [sys.executable, "-m", __name__, *arguments]
        # In a new session: a signal to the driver's process group must not end its guard.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def dead_head(self) -> str | None:
        """The first of Ray's own processes that has died, by name and process id."""
        return next((f"{name} (process {one.pid})" for name, one in self._heads if not _lives(one)), None)

    def kill_wards(self) -> None:
        """Kill them now."""
        for ward in self._wards:
            with suppress(psutil.NoSuchProcess):
                ward.kill()

    def close(self) -> None:
        """End the guard; the processes live on."""
        self._process.kill()
        self._process.communicate()


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def main(arguments: list[str]) -> None:
    """Wait until the driver ends, which closes its end of the pipe; then kill those of its children that remain."""
    wards: list[tuple[psutil.Process, str]] = []
    for argument in arguments:
        pid, created, name = argument.split(":", 2)
        with suppress(psutil.NoSuchProcess):
            ward = psutil.Process(int(pid))
            if ward.create_time() == float(created):  # the process id may have been reused
                wards.append((ward, name))
    first = _first_death({ward.pid: name for ward, name in wards if name in HEADS})
    if first is not None:
        print(f"Ray's {first} died, and with it the run: see the logs of Ray's session.", file=sys.stderr)
    for ward, _ in wards:
        with suppress(psutil.NoSuchProcess):
            ward.kill()


def _first_death(heads: dict[int, str]) -> str | None:
    """Wait for the driver's end; the name of one of Ray's own processes that died before it, if one did."""
    first: str | None = None
    poll = select.poll()
    pipe = sys.stdin.fileno()
    poll.register(pipe, select.POLLIN | select.POLLHUP)
    names: dict[int, str] = {}
    if hasattr(os, "pidfd_open"):  # Linux
        # The driver, too: another child of its may hold its end of the pipe open for a moment.
        for pid, name in {**heads, os.getppid(): ""}.items():
            with suppress(ProcessLookupError):
                names[os.pidfd_open(pid)] = name
    for descriptor in names:
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = [descriptor for descriptor, _ in poll.poll()]
        if pipe in ready or "" in (names[descriptor] for descriptor in ready):  # Ray's processes die with the driver
            return first
        for descriptor in ready:
            poll.unregister(descriptor)
            first = first or names[descriptor]


if __name__ == "__main__":
    main(sys.argv[1:])
