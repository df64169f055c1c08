"""A process that outlives a killed driver by a moment, to end what the driver started: both ends of its pipe.

Ray's head ends with its driver, but its agents look for the dead head for a minute more, holding memory and ports.
"""

from __future__ import annotations

import subprocess
import sys

import psutil


class Guard:
    """Watches over the processes that this one has as descendants now; `close` calls it off."""

    def __init__(self) -> None:
        wards = psutil.Process().children(recursive=True)
        arguments = [f"{ward.pid}:{ward.create_time()}" for ward in wards if ward.is_running()]
        command = [sys.executable, "-m", __name__, *arguments]
        # A session of its own: what ends the driver's process group must not end its guard.
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


def main(arguments: list[str]) -> None:
    """Wait until the driver's end of the pipe closes, however it ended; then kill what is left of its children."""
    sys.stdin.buffer.read()
    for argument in arguments:
        pid, _, created = argument.partition(":")
        try:
            ward = psutil.Process(int(pid))
            if ward.create_time() == float(created):  # the number may belong to somebody else by now
                ward.kill()
        except psutil.NoSuchProcess:
            continue


if __name__ == "__main__":
    main(sys.argv[1:])
