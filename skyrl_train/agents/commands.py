"""Commands of agents as asynchronous subprocesses: deadlines, capped output, and an end of all their processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from skyrl_train.aio import finish_despite_cancellation
from skyrl_train.environments.process_supervisor import KILL_TIMEOUT_S

_CHUNK_BYTES = 64 * 2**10
_PAUSE_S = 0.01
"""Pause between chunks of output beyond the cap, so that an endless output costs the driver little."""
_DRAIN_S = 1.0
"""Time to read the rest of the output after the end of all processes. A process on another machine may hold a pipe."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The way a command ended, and the last part of its output."""

    returncode: int
    """Exit code; 128 + N if signal N ended the command."""
    stdout: str = ""
    stderr: str = ""
    timed_out: bool = False
    """True if the command was killed at its time limit."""


async def run_command(
    argv: Sequence[str],
    *,
    cwd: str,
    env: Mapping[str, str],
    timeout_s: float,
    max_output_bytes: int,
    folder: Path | None = None,
) -> CommandResult:
    """Run a command and return its result. No process that it started is alive when this returns or raises.

    Args:
        argv: Program and arguments.
        cwd: Working folder.
        env: All environment variables of the command.
        timeout_s: Seconds after which all of its processes are killed.
        max_output_bytes: Bytes that are kept of each output stream, the last ones.
        folder: Folder that is removed if this process dies before the command has ended.

    Raises:
        OSError: This machine cannot start a process.
        ValueError: An argument contains a null byte.
    """
    if any("\0" in text for text in (*argv, *env, *env.values())):
        raise ValueError("an argument or environment variable contains a null byte")
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "skyrl_train.agents.command_supervisor", str(os.getpid())),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert process.stdin is not None and process.stdout is not None and process.stderr is not None
    outputs = [_Tail(max_output_bytes), _Tail(max_output_bytes)]
    readers = [
        asyncio.create_task(tail.read(stream))
        for tail, stream in zip(outputs, (process.stdout, process.stderr), strict=True)
    ]
    timed_out = False
    try:
        try:
            async with asyncio.timeout(timeout_s):
                task = {"argv": list(argv), "cwd": cwd, "env": dict(env), "folder": folder and str(folder)}
                process.stdin.write(json.dumps(task).encode())
                process.stdin.close()
                await process.wait()
        except TimeoutError:
            timed_out = True
    finally:
        await finish_despite_cancellation(_end(process, readers))
    assert process.returncode is not None
    code = 128 - process.returncode if process.returncode < 0 else process.returncode
    return CommandResult(code, outputs[0].text(), outputs[1].text(), timed_out)


async def _end(process: asyncio.subprocess.Process, readers: Sequence[asyncio.Task[None]]) -> None:
    """Kill the supervisor with all descendants if it has not ended, and read the rest of the output."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            for number in (signal.SIGTERM, signal.SIGCONT):  # the latter in case the supervisor was stopped
                process.send_signal(number)
        try:
            async with asyncio.timeout(KILL_TIMEOUT_S + 1):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    if process.returncode < 0:  # killed, so it could not kill the others
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.wait(readers, timeout=_DRAIN_S)
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)


class _Tail:
    """The last bytes of a stream."""

    def __init__(self, max_bytes: int):
        self._max_bytes, self._bytes = max_bytes, bytearray()
        self._is_truncated = False

    async def read(self, stream: asyncio.StreamReader) -> None:
        """Read the stream to its end."""
        while data := await stream.read(_CHUNK_BYTES):
            self._bytes += data
            if len(self._bytes) > self._max_bytes:
                self._is_truncated = True
                del self._bytes[: -self._max_bytes]
                await asyncio.sleep(_PAUSE_S)

    def text(self) -> str:
        """Return the text, with a mark if its beginning is left out."""
        return ("[...] " if self._is_truncated else "") + self._bytes.decode("utf-8", "backslashreplace")
