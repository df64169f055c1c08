"""The parent process of an agent's command, which kills everything that the command started.

It reads {"argv", "cwd", "env", "folder"} as JSON from stdin, runs the command, and exits with its exit code when all
descendants are dead. It kills them when the command ends, on SIGTERM, or when the driver dies. In the last case it also
removes the folder. Only a separate process can do this for processes that left their process group, or whose driver was
killed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

from skyrl_train.environments.process_supervisor import kill_descendants
from skyrl_train.prctl import set_process_attribute

_DRIVER_DIED = signal.SIGHUP
"""Sent by the kernel. SIGTERM comes from a driver that is alive, and that removes the folder itself."""
NOT_STARTED = 127
"""Exit code of a command that could not be started, as in a shell."""


def main() -> None:
    """Run the command. The argument is the process id of the driver."""
    driver = int(sys.argv[1])
    signals = {signal.SIGTERM, _DRIVER_DIED, signal.SIGCHLD}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal may not wake sigwait
    set_process_attribute("PR_SET_PDEATHSIG", _DRIVER_DIED)
    set_process_attribute("PR_SET_CHILD_SUBREAPER", 1)
    try:
        task = json.loads(sys.stdin.buffer.read())
    except ValueError:  # the driver died while it wrote
        os._exit(1)
    if os.getppid() != driver:
        _remove(task["folder"])
        os._exit(1)
    supervisor, command = os.getpid(), os.fork()
    if command == 0:
        set_process_attribute("PR_SET_PDEATHSIG", signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _execute(task["argv"], task["cwd"], task["env"])
    code = _wait(command, signals)
    kill_descendants()
    if code is None:
        _remove(task["folder"])
    os._exit(1 if code is None else code)


def _remove(folder: str | None) -> None:
    if folder is not None:
        from skyrl_train.agents.working_folders import remove_folder  # lazy: few need it

        remove_folder(Path(folder))


def _execute(argv: list[str], cwd: str, env: dict[str, str]) -> NoReturn:
    try:
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.chdir(cwd)
        os.execvpe(argv[0], argv, env)
    except (OSError, ValueError) as error:  # the latter for characters that no argument can have
        reason = getattr(error, "strerror", None) or error
        os.write(2, f"{argv[0]}: {reason}\n".encode(errors="backslashreplace"))
        os._exit(NOT_STARTED)


def _wait(command: int, signals: set[signal.Signals]) -> int | None:
    """Reap children until the command has ended, and return its exit code; 143 after SIGTERM.

    None if the driver died.
    """
    while True:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == command:
                code = os.waitstatus_to_exitcode(ended[1])
                return 128 - code if code < 0 else code
        received = signal.sigwait(signals)
        if received == signal.SIGTERM:
            return 128 + signal.SIGTERM
        if received == _DRIVER_DIED:
            return None


if __name__ == "__main__":
    main()
