"""A supervisor process for each worker process. It limits the output and kills processes that environments started.

`fork_supervised` forks. The child is the worker: it returns and runs environments. The parent is the supervisor: it
copies the worker's output to a log, and it kills all descendants when the worker ends, when the pool sends SIGTERM, or
when the pool's process dies. It is a separate process because a killed driver can do none of this, and because a worker
may hang in C.
"""

from __future__ import annotations

import codecs
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
from skyrl_train.prctl import set_process_attribute
from skyrl_train.terminal import escape_control_chars

KILL_TIMEOUT_S = 4.0
"""Time after which a supervisor exits even if some processes that it killed have not ended."""
MAX_FILE_BYTES = 2 * MAX_LOG_BYTES
"""File size above which output is dropped until the run's driver has rotated the file."""
MAX_STDERR_BYTES = 64 * 2**10
"""Maximum output of one worker to the pool's stderr, which is used if there is no log file."""
STDERR_TIMEOUT_S = 0.1
"""Time that output waits until the pool's stderr is writable before it is dropped."""
STDERR = 2
_CHUNK_BYTES = 64 * 2**10
_MIN_BUFFERED_CHARS = 4096
"""Characters of an unfinished line that stay buffered, so that a secret is not split and written unredacted."""


def fork_supervised(pool_pid: int, log_file: str | None = None) -> None:
    """Fork into a supervisor and a worker, and return in the worker only.

    The supervisor exits after it has killed all descendants. Both processes exit with status 1 if their parent has
    already died.

    Args:
        pool_pid: Process id of the pool's process, which is this process's parent unless it has died.
        log_file: File that receives the output of the worker and its children. Default: the pool's stderr.
    """
    supervisor = os.getpid()
    source, sink = os.pipe()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # environments may signal their own group
    # the kernel sends the signal when the thread that started this process ends, which runs the pool's event loop
    set_process_attribute("PR_SET_PDEATHSIG", signal.SIGTERM)
    if os.getppid() != pool_pid:  # the pool died before the line above
        os._exit(1)
    set_process_attribute(
        "PR_SET_CHILD_SUBREAPER", 1
    )  # orphans become children of the supervisor, even in other sessions
    gc.freeze()  # keeps memory pages shared with the worker
    worker = os.fork()
    if worker == 0:
        set_process_attribute("PR_SET_PDEATHSIG", signal.SIGKILL)
        if os.getppid() != supervisor:  # the supervisor died before the line above
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
    for pipe_end in (0, 1):  # end-of-file on these pipes notifies the pool that the worker is dead
        os.dup2(null, pipe_end)
    copier = threading.Thread(target=copy_output_to_log, args=(source, CappedLog(f"(env {worker}) ", log)), daemon=True)
    copier.start()
    while not _has_ended(worker):
        if signal.sigwait({signal.SIGTERM, signal.SIGCHLD}) == signal.SIGTERM:
            break
    kill_descendants()
    copier.join(1.0)
    with suppress(ProcessLookupError):  # macOS has no subreapers: orphans are only in the process group
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def _has_ended(worker: int) -> bool:
    """Reap the children that have ended, including orphans. Return True if the worker is one of them."""
    while (pid := os.waitpid(-1, os.WNOHANG)[0]) not in (0, worker):
        pass
    return pid == worker


def kill_descendants() -> None:
    """Kill all descendants repeatedly, because one of them may have started another just before it was killed."""
    deadline = time.monotonic() + KILL_TIMEOUT_S
    with suppress(ChildProcessError):  # no child is left
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                for pid in _find_descendants():
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)


def _find_descendants() -> list[int]:
    """Return the process ids of all descendants of this process."""
    try:
        import psutil  # lazy: it takes a quarter of a worker's start-up time, and few need it
    except ImportError:  # in an agent's own interpreter
        return _read_descendants()
    return [process.pid for process in psutil.Process().children(recursive=True)]


def _read_descendants() -> list[int]:
    """Return the process ids of all descendants from /proc; an empty list on other systems than Linux."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])  # the name before it may contain anything
                children.setdefault(parent, []).append(int(name))
    descendants = [os.getpid()]
    for pid in descendants:  # grows while it is read
        descendants += children.get(pid, [])
    return descendants[1:]


def copy_output_to_log(source: int, log: CappedLog) -> None:
    """Copy the output of a process to the log until end of file. This blocks, and does not close `source`.

    Values of environment variables that hold credentials are replaced with `<NAME>`, the name of the variable; see
    `secret_variables`.

    Args:
        source: File descriptor of the pipe's reading end.
        log: Log that receives the text.
    """
    credentials = secret_variables()
    decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
    text = ""
    while data := os.read(source, _CHUNK_BYTES):
        text = redact(text + decoder.decode(data), credentials)
        end = text.rfind("\n") + 1 or max(0, len(text) - _MIN_BUFFERED_CHARS)
        log.write(text[:end])
        text = text[end:]
        time.sleep(0.001)  # batches lines, because a wake-up for each costs more than the copying
    log.write(text + decoder.decode(b"", final=True))


class CappedLog:
    """A size-limited log: a file that several supervisors append to, or the pool's stderr.

    Output is dropped while the log is over its limit.

    Args:
        prefix: Text before each line.
        path: Path of the file, or None for stderr. Stderr is also used if the file cannot be opened.
    """

    def __init__(self, prefix: str, path: str | None):
        self._prefix = prefix
        self._path = path
        self._file: int | None = None
        self._sent_to_stderr = 0
        self._is_full = False

    def write(self, text: str) -> None:
        """Append lines with escaped control characters.

        Lines are lost if the log is over its limit, the disk is full, or no process reads stderr.
        """
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
        data = "".join(f"{self._prefix}{escape_control_chars(line.expandtabs())}\n" for line in lines).encode()
        if self._file == STDERR:
            self._sent_to_stderr += len(data)
            _write_to_stderr(data)
        else:
            os.write(self._file, data)

    def _open(self) -> int:
        """Open the file. The process that creates the file also names it on stderr."""
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
    """Write data to stderr. Drop the rest if no process reads it, because environments must not wait for a reader."""
    for start in range(0, len(data), select.PIPE_BUF):  # a pipe that is ready takes this much without blocking
        if not select.select([], [STDERR], [], STDERR_TIMEOUT_S)[1]:
            return
        os.write(STDERR, data[start : start + select.PIPE_BUF])
