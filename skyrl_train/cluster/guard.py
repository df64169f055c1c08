"""A process that briefly outlives a killed driver, to kill the driver's processes: both ends of its pipe.

Ray's head ends with its driver, but its agents go on looking for the head for a minute, and keep memory and ports.
"""

from __future__ import annotations

import subprocess
import sys

import psutil


class Guard:
    """Kills the current descendants of this process if it dies; `close` ends the guard without that."""

    def __init__(self) -> None:
        wards = psutil.Process().children(recursive=True)
        arguments = [f"{ward.pid}:{ward.create_time()}" for ward in wards if ward.is_running()]
        command = [sys.executable, "-m", __name__, *arguments]
        # In a new session: a signal to the driver's process group must not end its guard.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """End the guard; the processes live on."""
        self._process.kill()
        self._process.communicate()


def main(arguments: list[str]) -> None:
    """Wait until the driver ends, which closes its end of the pipe; then kill those of its children that remain."""
    sys.stdin.buffer.read()
    for argument in arguments:
        pid, _, created = argument.partition(":")
        try:
            ward = psutil.Process(int(pid))
            if ward.create_time() == float(created):  # the process id may have been reused
                ward.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
