"""A supervisor process for each environment process: it caps the output, and kills what the environment started.

`fork_supervised` forks. The child, the worker, returns and runs environments. The parent, the supervisor, copies the
worker's output to a log, and kills all descendants when the worker ends, when the host sends SIGTERM, or when the host
dies. It is a process of its own because a killed host can do none of this, and a worker may hang in C.
"""

from __future__ import annotations

import codecs
import ctypes
import gc
import os
import select
import signal
import sys
import threading
import time
from contextlib import suppress

from skyrl_train.config.secrets import looks_like_credential, redact
from skyrl_train.log_files import LIMIT_BYTES
from skyrl_train.messages import visible

KILL_TIMEOUT_S = 4.0
"""Time after which a supervisor exits even if the kernel has not ended all processes that it killed."""
MAX_FILE_BYTES = 2 * LIMIT_BYTES
"""Size at which output to a file is dropped until the run's driver has rotated the file."""
MAX_STDERR_BYTES = 64 * 2**10
"""Output that one process may write to the host's stderr, where no file takes it."""
STDERR = 2
_CHUNK_BYTES = 64 * 2**10
_MIN_KEPT = 4096
"""Characters of an unfinished line that wait for more, so that a secret is never written in two halves."""


def fork_supervised(log: str | None = None) -> None:
    """Fork, and return in the worker only.

    Args:
        log: File that receives the output of the worker and its children. Default: the host's stderr.
    """
    supervisor = os.getpid()
    source, sink = os.pipe()
    _prctl("PR_SET_PDEATHSIG", signal.SIGTERM)
    _prctl("PR_SET_CHILD_SUBREAPER", 1)  # orphans become children of the supervisor, also in sessions of their own
    gc.freeze()  # keeps memory pages shared
    worker = os.fork()
    if worker == 0:
        _prctl("PR_SET_PDEATHSIG", signal.SIGKILL)
        if os.getppid() != supervisor:  # it died before the line above
            os._exit(1)
        os.dup2(sink, STDERR)
        os.close(source)
        os.close(sink)
        return
    os.close(sink)
    _supervise(worker, source, log)


def _supervise(worker: int, source: int, log: str | None) -> None:
    signals = {signal.SIGTERM, signal.SIGCHLD}
    signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal may not wake sigwait
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    null = os.open(os.devnull, os.O_RDWR)
    for pipe_end in (0, 1):  # the host learns from the end of these pipes that the worker is dead
        os.dup2(null, pipe_end)
    copier = threading.Thread(target=copy_output, args=(source, CappedLog(f"(env {worker}) ", log)), daemon=True)
    copier.start()
    while not _has_ended(worker):
        if signal.sigwait(signals) == signal.SIGTERM:
            break
    _kill_descendants()
    copier.join(1.0)
    with suppress(ProcessLookupError):  # macOS has no subreapers: orphans are only in the process group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _has_ended(worker: int) -> bool:
    """Reap children, which include orphans, until the worker is among them or no more have ended."""
    while (pid := os.waitpid(-1, os.WNOHANG)[0]) not in (0, worker):
        pass
    return pid == worker


def _kill_descendants() -> None:
    """Kill all descendants, repeatedly: one of them may have started another just before it was killed."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    with suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                import psutil  # only here: the import takes a quarter of a worker's start, and most need no kill

                for process in psutil.Process().children(recursive=True):
                    with suppress(psutil.Error):
                        process.kill()
                time.sleep(0.01)


def copy_output(source: int, log: CappedLog) -> None:
    """Copy lines from a pipe to the log until the pipe ends, without the contents of credential variables."""
    credentials = {name: content for name, content in os.environ.items() if looks_like_credential(name)}
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    text = ""
    while data := os.read(source, _CHUNK_BYTES):
        text = redact(text + decoder.decode(data), credentials)
        end = text.rfind("\n") + 1 or max(0, len(text) - _MIN_KEPT)
        log.write(text[:end])
        text = text[end:]
        time.sleep(0.001)  # many lines at once: a wake-up for each would cost more than the lines
    log.write(text + decoder.decode(b"", final=True))


class CappedLog:
    """A file that several supervisors append to, or the host's stderr. Drops output while it is over its cap."""

    def __init__(self, prefix: str, path: str | None):
        self._prefix = prefix
        self._path = path
        self._file: int | None = None
        self._written = 0
        self._is_full = False

    def write(self, text: str) -> None:
        """Append lines, control characters escaped. A full disk loses them."""
        if not text:
            return
        if self._file is None:
            self._file = self._open()
        in_file = self._file != STDERR
        is_full = os.fstat(self._file).st_size > MAX_FILE_BYTES if in_file else self._written > MAX_STDERR_BYTES
        if not (is_full and self._is_full):
            lines = ["... more output is dropped"] if is_full else text.splitlines()
            shown = "".join(f"{self._prefix}{visible(line.expandtabs())}\n" for line in lines)
            with suppress(OSError):
                self._written += os.write(self._file, shown.encode())
        self._is_full = is_full

    def _open(self) -> int:
        """Open the file, and tell on stderr where it is if it is new."""
        if self._path is None:
            return STDERR
        is_new = not os.path.exists(self._path)
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError:
            return STDERR
        if is_new and select.select([], [STDERR], [], 0)[1]:  # never wait for whoever reads stderr
            with suppress(OSError):
                os.write(STDERR, f"note: environments print to {visible(self._path)}\n".encode())
        return file


def _prctl(option: str, value: int) -> None:
    """Set an attribute of this process (Linux only; other systems ignore it)."""
    numbers = {"PR_SET_PDEATHSIG": 1, "PR_SET_CHILD_SUBREAPER": 36}
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(numbers[option], value)
