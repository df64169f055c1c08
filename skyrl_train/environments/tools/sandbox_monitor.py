"""Monitor of a running sandbox from outside: it measures its memory and files, and stops its processes (Linux)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from contextlib import ExitStack
from enum import StrEnum

from skyrl_train.errors import EnvironmentFailure

INIT_PID, PROGRAM_PID = "1", "2"
"""Process ids inside the sandbox: bubblewrap's own process, with which all others end, and the program."""
FREEZE_S = 2.0
"""Time that all processes have to stop on a busy machine."""
POLL_S = 0.001
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SandboxLimit(StrEnum):
    """The limits of a sandbox for which a program can be killed."""

    WALL = "wall"
    CPU = "cpu"
    MEMORY = "memory"
    FILES = "files"
    OUTPUT = "output"


class SandboxMonitor:
    """A view of one sandbox through its own /proc, which lists exactly the sandbox's processes.

    The descriptors are opened before the program starts, so the program cannot make them refer to something else.

    Args:
        proc: Descriptor of the sandbox's folder /proc.
        tmp: Descriptor of the sandbox's folder /tmp.
    """

    def __init__(self, proc: int, tmp: int):
        self._proc = proc
        self._tmp = tmp

    @classmethod
    def wait_for(cls, pid: int, pidfd: int, timeout_s: float, stack: ExitStack) -> SandboxMonitor | None:
        """Wait until bubblewrap has created the sandbox's root, and return a monitor of it.

        Args:
            pid: Process id of the first process inside, as seen from this machine.
            pidfd: Pidfd of that process.
            timeout_s: Maximum seconds to wait.
            stack: Stack that closes the monitor's descriptors.

        Returns:
            The monitor, or None if the process has ended.

        Raises:
            EnvironmentFailure: The time is over, or this user may not access the sandbox (kind "sandbox").
        """
        root = f"/proc/{pid}/root"
        deadline = time.monotonic() + timeout_s
        while not _ended(pidfd, POLL_S):
            if time.monotonic() > deadline:
                raise EnvironmentFailure("sandbox", f"bubblewrap was not ready within {timeout_s:g} s")
            try:
                if os.path.samestat(os.stat(f"{root}/"), os.stat("/")):
                    continue  # the process still has the root of this machine
                folders = []
                for name in ("proc", "tmp"):
                    folders.append(os.open(f"{root}/{name}", os.O_RDONLY | os.O_DIRECTORY))
                    stack.callback(os.close, folders[-1])
            except (FileNotFoundError, ProcessLookupError):
                continue
            except PermissionError as error:
                raise EnvironmentFailure("sandbox", f"{error}; root needs CAP_SYS_PTRACE") from error
            return None if _ended(pidfd, 0) else cls(*folders)
        return None

    def exceeded_limit(self, memory_bytes: int, num_files: int) -> SandboxLimit | None:
        """Return the limit that all processes of the sandbox together exceed now, or None.

        Args:
            memory_bytes: Maximum memory. Shared memory counts once; /tmp has its own limit and does not count.
            num_files: Maximum number of files, folders and links in /tmp.

        Returns:
            `SandboxLimit.MEMORY`, `SandboxLimit.FILES` or None.
        """
        tmp = os.fstatvfs(self._tmp)
        if tmp.f_files - tmp.f_ffree > num_files:
            return SandboxLimit.FILES
        pids = self._pids()
        # This sum is a cheap upper bound: it counts shared memory once per process.
        if sum(map(self._resident, pids)) <= memory_bytes:
            return None
        return SandboxLimit.MEMORY if sum(map(self._proportional, pids)) > memory_bytes else None

    def freeze(self) -> bool:
        """Stop the program until `resume`, and kill all processes that it started.

        Returns:
            True if all of this is done within `FREEZE_S`.
        """
        deadline = time.monotonic() + FREEZE_S
        for pid in (INIT_PID, PROGRAM_PID):
            self._signal(pid, signal.SIGSTOP)
        quiet_rounds = 0  # two are needed: one listing may miss a process that starts meanwhile
        while quiet_rounds < 2 and time.monotonic() < deadline:
            alive = [pid for pid in self._pids() if pid not in (INIT_PID, PROGRAM_PID) and not self._is_in(pid, "ZX")]
            for pid in alive:
                self._signal(pid, signal.SIGKILL)
            if alive or not all(self._is_in(pid, "TZX") for pid in (INIT_PID, PROGRAM_PID)):
                quiet_rounds = 0
                time.sleep(POLL_S)
            else:
                quiet_rounds += 1
        return quiet_rounds == 2

    def resume(self) -> None:
        """Resume the program after `freeze`."""
        for pid in (INIT_PID, PROGRAM_PID):
            self._signal(pid, signal.SIGCONT)

    def _pids(self) -> list[str]:
        with contextlib.suppress(OSError):
            return [name for name in os.listdir(self._proc) if name.isdigit()]
        return []

    def _read(self, path: str) -> str:
        """Return a file of the sandbox's /proc, or "" if its process has ended."""
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY, dir_fd=self._proc)
            with open(fd, encoding="utf-8", errors="replace") as file:
                return file.read()
        return ""

    def _resident(self, pid: str) -> int:
        """Return the resident memory of a process in bytes."""
        fields = self._read(f"{pid}/statm").split()
        return int(fields[1]) * PAGE_BYTES if fields else 0

    def _proportional(self, pid: str) -> int:
        """Return the memory of a process in bytes, with each page divided by the number of its users."""
        lines = self._read(f"{pid}/smaps_rollup").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

    def _is_in(self, pid: str, states: str) -> bool:
        """True if all threads of a process are in one of `states` (see proc(5)), or the process has ended."""
        with contextlib.suppress(OSError):
            tasks = os.open(f"{pid}/task", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
            try:
                stats = [self._read(f"{pid}/task/{task}/stat") for task in os.listdir(tasks)]
            finally:
                os.close(tasks)
            return all(stat.rpartition(") ")[2][:1] in states for stat in stats)
        return True

    def _signal(self, pid: str, number: signal.Signals) -> None:
        with contextlib.suppress(OSError):
            fd = os.open(pid, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)  # serves as pidfd
            try:
                signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


def _ended(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])
