"""A running sandbox seen from outside: what its processes and files occupy, and a way to stop them (Linux)."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from contextlib import ExitStack

from skyrl_train.errors import EnvironmentFailure

INIT_PID, PROGRAM_PID = "1", "2"
"""Process ids inside: bubblewrap's own process, with which all others end, and the command that it runs."""
FREEZE_S = 2.0
"""Time for all processes to stop on a busy machine."""
POLL_S = 0.001
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class SandboxMonitor:
    """Looks into one sandbox through its own /proc, which has all of its processes and no others.

    The descriptors are opened before the program starts: nothing that it does can lead them elsewhere.
    """

    def __init__(self, proc: int, tmp: int):
        self._proc = proc
        self._tmp = tmp

    @classmethod
    def wait_for(cls, pid: int, pidfd: int, timeout_s: float, stack: ExitStack) -> SandboxMonitor | None:
        """Wait until bubblewrap's process `pid` has made its root and open that; None if the process has ended.

        `stack` closes the descriptors. Raises EnvironmentFailure("sandbox") when the time is over, or if this user may
        not look inside.
        """
        root = f"/proc/{pid}/root"
        deadline = time.monotonic() + timeout_s
        while not _ended(pidfd, POLL_S):
            if time.monotonic() > deadline:
                raise EnvironmentFailure("sandbox", f"bubblewrap was not ready within {timeout_s:g} s")
            try:
                if os.path.samestat(os.stat(f"{root}/"), os.stat("/")):
                    continue  # still this machine's
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

    def exceeded_limit(self, memory_bytes: int, num_files: int) -> str | None:
        """The limit that the sandbox as a whole exceeds now: "memory", "files", or None.

        Memory that processes share counts once; /tmp, which has a size of its own, does not count.
        """
        tmp = os.fstatvfs(self._tmp)
        if tmp.f_files - tmp.f_ffree > num_files:
            return "files"
        pids = self._pids()
        if sum(map(self._resident, pids)) <= memory_bytes:  # counts shared memory several times, and is cheap
            return None
        return "memory" if sum(map(self._proportional, pids)) > memory_bytes else None

    def freeze(self) -> bool:
        """Stop the program until `resume`, and kill what it started. False if that takes longer than `FREEZE_S`."""
        deadline = time.monotonic() + FREEZE_S
        for pid in (INIT_PID, PROGRAM_PID):
            self._signal(pid, signal.SIGSTOP)
        calm = 0  # a listing may miss a process that starts meanwhile, the next one does not
        while calm < 2 and time.monotonic() < deadline:
            alive = [pid for pid in self._pids() if pid not in (INIT_PID, PROGRAM_PID) and not self._is_in(pid, "ZX")]
            for pid in alive:
                self._signal(pid, signal.SIGKILL)
            if alive or not all(self._is_in(pid, "TZX") for pid in (INIT_PID, PROGRAM_PID)):
                calm = 0
                time.sleep(POLL_S)
            else:
                calm += 1
        return calm == 2

    def resume(self) -> None:
        """Let the program go on."""
        for pid in (INIT_PID, PROGRAM_PID):
            self._signal(pid, signal.SIGCONT)

    def _pids(self) -> list[str]:
        with contextlib.suppress(OSError):
            return [name for name in os.listdir(self._proc) if name.isdigit()]
        return []

    def _read(self, path: str) -> str:
        """A file of the sandbox's /proc; empty if its process has ended."""
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY, dir_fd=self._proc)
            with open(fd, encoding="utf-8", errors="replace") as file:
                return file.read()
        return ""

    def _resident(self, pid: str) -> int:
        """Bytes of a process in memory."""
        fields = self._read(f"{pid}/statm").split()
        return int(fields[1]) * PAGE_BYTES if fields else 0

    def _proportional(self, pid: str) -> int:
        """Bytes of a process in memory, each page divided by the number of processes that share it."""
        lines = self._read(f"{pid}/smaps_rollup").splitlines()
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))

    def _is_in(self, pid: str, states: str) -> bool:
        """Whether all threads of a process are in one of `states` (see proc(5)), or it has ended."""
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
            fd = os.open(pid, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)  # which the kernel takes as a pidfd
            try:
                signal.pidfd_send_signal(fd, number)
            finally:
                os.close(fd)


def _ended(pidfd: int, timeout_s: float) -> bool:
    return bool(select.select([pidfd], [], [], timeout_s)[0])
