"""Reader of a sandboxed program's output, which stops when the program ends or exceeds a limit."""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from skyrl_train.environments.tools.sandbox_monitor import SandboxLimit

POLL_INTERVAL_S = 0.05
"""Interval between two checks of the limits on all processes of a sandbox together."""
MAX_PIPE = 2**20
"""Maximum bytes that the pipe of an unprivileged user can hold."""


@dataclass(frozen=True, slots=True)
class CodeBlock:
    """A block of a session's code.

    `frame` is written to the descriptor `write_to` of the session's process, which writes `token` to the other end of
    the descriptor `done` when the block has ended.
    """

    frame: bytes
    token: bytes
    write_to: int
    done: int


class OutputStreams:
    """The stdout and stderr of a process, of which at most `limit` bytes each are returned."""

    def __init__(self, process: subprocess.Popen[bytes], limit: int):
        assert process.stdout is not None and process.stderr is not None
        self._texts = {process.stdout.fileno(): bytearray(), process.stderr.fileno(): bytearray()}
        self._limit = limit
        self.is_block_done = False
        """True once the block is done: the process waits for the next block."""
        for fd in self._texts:
            os.set_blocking(fd, False)

    def texts(self) -> tuple[str, str]:
        """Return the stdout and stderr read so far; each is truncated to the limit and decoded as UTF-8."""
        stdout, stderr = (bytes(text[: self._limit]).decode("utf-8", "replace") for text in self._texts.values())
        return stdout, stderr

    def read(
        self, deadline: float, exceeded: Callable[[], SandboxLimit | None], block: CodeBlock | None = None
    ) -> SandboxLimit | None:
        """Read the streams until they end, `block` is done, or the process must be killed.

        Args:
            deadline: Value of `time.monotonic()` at which the process must be killed.
            exceeded: Function that returns the limit that the sandbox exceeds, or None. It is called after every wait,
                which takes at most `POLL_INTERVAL_S`.
            block: Block of code to send to the process, or None.

        Returns:
            None if all streams ended or the block is done (`is_block_done`); else the limit for which the process must
            be killed: `SandboxLimit.WALL`, `SandboxLimit.OUTPUT` or the result of `exceeded`.
        """
        buffers = dict(self._texts)
        frame = block.frame if block else b""
        with selectors.DefaultSelector() as selector:
            for fd in self._texts:
                selector.register(fd, selectors.EVENT_READ)
            if block:
                buffers[block.done] = bytearray()
                os.set_blocking(block.done, False)
                os.set_blocking(block.write_to, False)
                selector.register(block.done, selectors.EVENT_READ)
                selector.register(block.write_to, selectors.EVENT_WRITE)
            open_streams = set(buffers)
            while open_streams:
                if (left := deadline - time.monotonic()) <= 0:
                    return SandboxLimit.WALL
                for key, _ in selector.select(min(left, POLL_INTERVAL_S)):
                    if block and key.fd == block.write_to:
                        frame = _write_some(key.fd, frame)
                        closed = not frame
                    else:
                        closed = not _read_some(key.fd, buffers[key.fd])
                    if closed:
                        selector.unregister(key.fd)
                        open_streams.discard(key.fd)
                if block and block.token in buffers[block.done]:
                    self.is_block_done = True
                    return None
                if any(len(buffer) > self._limit for buffer in buffers.values()):
                    return SandboxLimit.OUTPUT
                if limit := exceeded():
                    return limit
        return None

    def drain(self) -> None:
        """Read the rest of the output from the pipes of a process that has stopped."""
        for fd, text in self._texts.items():
            while len(text) <= self._limit + MAX_PIPE and _read_some(fd, text, finished=True):
                pass


def _read_some(fd: int, buffer: bytearray, finished: bool = False) -> bool:
    """Read some bytes into `buffer`; return False at the end of the stream.

    If the process has `finished`, also return False when no bytes are available.
    """
    try:
        piece = os.read(fd, 65536)
    except BlockingIOError:
        return not finished
    buffer += piece
    return bool(piece)


def _write_some(fd: int, data: bytes) -> bytes:
    """Write some of `data` and return the rest; nothing if the other end is closed."""
    try:
        return data[os.write(fd, data[:65536]) :]
    except BlockingIOError:
        return data
    except BrokenPipeError:
        return b""
