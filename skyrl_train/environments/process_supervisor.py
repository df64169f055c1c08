"""A supervisor process for each worker process: it caps the output, and kills what environments started.

`fork_supervised` forks. The child, the worker, returns and runs environments. The parent, the supervisor, copies the
worker's output to a log, and kills all descendants when the worker ends, when the pool sends SIGTERM, or when the
pool's process dies. It is a process of its own because a killed driver can do none of this, and a worker may hang in C.
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

from skyrl_train.config.redaction import redact, secret_variables
from skyrl_train.log_rotation import MAX_LOG_BYTES
from skyrl_train.terminal import escape_control_chars

KILL_TIMEOUT_S = 4.0
"""Time after which a supervisor exits even if the kernel has not ended all processes that it killed."""
MAX_FILE_BYTES = 2 * MAX_LOG_BYTES
"""Size at which output to a file is dropped until the run's driver has rotated the file."""
MAX_STDERR_BYTES = 64 * 2**10
"""Output that one worker may write to the pool's stderr, where no file takes it."""
STDERR_TIMEOUT_S = 0.1
"""Time that output waits for the reader of the pool's stderr before it is dropped."""
STDERR = 2
_CHUNK_BYTES = 64 * 2**10
_MIN_BUFFERED_CHARS = 4096
"""Characters of an unfinished line that wait for more, so that a secret is never written in two halves."""


def fork_supervised(pool_pid: int, log_file: str | None = None) -> None:
    """Fork, and return in the worker only.

    Args:
        parent: Process id of the pool's process, which is this one's parent unless it has already died.
        log: File that receives the output of the worker and its children. Default: the pool's stderr.
    """
    supervisor = os.getpid()
    source, sink = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # environments may signal their own group
    # the kernel sends it when the thread that started this process ends: that of the pool's event loop
    _prctl("PR_SET_PDEATHSIG", signal.SIGTERM)
    if os.getppid() != pool_pid:  # it died before the line above
        os._exit(1)
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
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        return
    os.close(sink)
    _supervise(worker, source, log_file)


def _supervise(worker: int, source: int, log: str | None) -> None:
    signal.signal(signal.SIGCHLD, lambda *_: None)  # an ignored signal may not wake sigwait
    null = os.open(os.devnull, os.O_RDWR)
    for pipe_end in (0, 1):  # the pool learns from the end of these pipes that the worker is dead
        os.dup2(null, pipe_end)
    copier = threading.Thread(target=copy_output_to_log, args=(source, CappedLog(f"(env {worker}) ", log)), daemon=True)
    copier.start()
    while not _has_ended(worker):
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
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


def copy_output_to_log(source: int, log: CappedLog) -> None:
    """Copy lines from a pipe to the log until the pipe ends, without the contents of credential variables."""
    credentials = secret_variables()
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    text = ""
    while data := os.read(source, _CHUNK_BYTES):
        text = redact(text + decoder.decode(data), credentials)
        end = text.rfind("\n") + 1 or max(0, len(text) - _MIN_BUFFERED_CHARS)
        log.write(text[:end])
        text = text[end:]
        time.sleep(0.001)  # many lines at once: a wake-up for each would cost more than the lines
    log.write(text + decoder.decode(b"", final=True))


class CappedLog:
    """A file that several supervisors append to, or the pool's stderr. Drops output while it is over its cap."""

    def __init__(self, prefix: str, path: str | None):
        self._prefix = prefix
        self._path = path
        self._file: int | None = None
        self._sent_to_stderr = 0
        self._is_full = False

    def write(self, text: str) -> None:
        """Append lines, control characters escaped. A full disk or a stopped reader of stderr loses them."""
        if text:
            with suppress(OSError):
                self._append(text)

    def _append(self, text: str) -> None:
        if self._file is None:
            self._file = self._open()
        if self._file == STDERR:
            is_full = self._sent_to_stderr > MAX_STDERR_BYTES
        else:
            is_full = os.fstat(self._file).st_size > MAX_FILE_BYTES
        was_full, self._is_full = self._is_full, is_full
        if is_full and was_full:
            return
        lines = ["... more output is dropped"] if is_full else text.splitlines()
        shown = "".join(f"{self._prefix}{escape_control_chars(line.expandtabs())}\n" for line in lines).encode()
        if self._file == STDERR:
            self._sent_to_stderr += len(shown)
            _write_to_stderr(shown)
        else:
            os.write(self._file, shown)

    def _open(self) -> int:
        """Open the file; the process that creates it names it on stderr."""
        if self._path is None:
            return STDERR
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        try:
            with suppress(FileExistsError):
                file = os.open(self._path, flags | os.O_EXCL, 0o666)
                with suppress(OSError):
                    _write_to_stderr(f"note: environments print to {escape_control_chars(self._path)}\n".encode())
                return file
            return os.open(self._path, flags, 0o666)
        except OSError:
            return STDERR


def _write_to_stderr(data: bytes) -> None:
    """Write data to stderr. The rest is lost if nobody reads it: environments must not wait for a reader."""
    for start in range(0, len(data), select.PIPE_BUF):  # a pipe that is ready takes this much without blocking
        if not select.select([], [STDERR], [], STDERR_TIMEOUT_S)[1]:
            return
        os.write(STDERR, data[start : start + select.PIPE_BUF])


def _prctl(option: str, value: int) -> None:
    """Set an attribute of this process (Linux only; other systems ignore it)."""
    numbers = {"PR_SET_PDEATHSIG": 1, "PR_SET_CHILD_SUBREAPER": 36}
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(numbers[option], value)
