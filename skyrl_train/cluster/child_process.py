"""An object in a child process of an actor, with nothing of Ray in it: its computing shares the GIL with no Ray call.

The actor passes messages of `CallChannel` and `CallServer` on, without unpickling them. Both processes end together.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Thread
from typing import Any

import numpy as np

from skyrl_train import trace
from skyrl_train.cluster.actor_logs import redact_output
from skyrl_train.cluster.call_channel import MIN_BUFFER_BYTES, ByteArray, CallServer, Mailbox, Message
from skyrl_train.imports import import_without_gc
from skyrl_train.prctl import set_process_attribute
from skyrl_train.registry import load_object

_LENGTH_BYTES = 8
_READ_AHEAD_BYTES = 256 << 10
"""Bytes that are received at once, which are many small messages or the rest of a large one."""
_EXIT_DELAY_S = 1.0
"""Time for the callers to learn why the process ended, before the actor ends, too."""
_CHILD = "SKYRL_CHILD_PROCESS"
"""Environment variable that is set in child processes."""
_END_TIMEOUT_S = 5.0
"""Time for the process to end after its last message. It may wait for its own threads forever."""


class ProcessEndedError(Exception):
    """The child process of an actor ended. The actor is about to end, too."""


class StartAgainError(Exception):
    """Raised by the constructor of an object in a child process: start a new process with other environment variables.

    A new process has a GPU's memory for itself again, and can import a package anew.
    """

    def __init__(self, why: str, environment: Mapping[str, str]):
        """Ask for a new process.

        Args:
            why: The reason, which is logged.
            environment: Environment variables of the new process, in addition to those of the actor.
        """
        super().__init__(why, environment)
        self.environment = environment

    def __str__(self) -> str:
        return str(self.args[0])


def is_child_process() -> bool:
    """Return True in a child process of an actor, whose objects may raise a StartAgainError."""
    return _CHILD in os.environ


@dataclass(frozen=True)
class _Start:
    """The first message to the child."""

    target: str
    kwargs: Mapping[str, Any]
    plugins: Sequence[str]
    traced: bool
    search_path: Sequence[str]
    pythonpath: str | None
    """The actor's environment variable, for processes that the child starts."""


class ChildProcess:
    """The actor's end: starts the process, and passes messages on."""

    def __init__(self, name: str, target: str, kwargs: Mapping[str, Any], plugins: Sequence[str], traced: bool):
        """Start `"module:Class"(**kwargs)` in a new process, and wait for it.

        Args:
            name: Name of the process in messages.
            target: Class of the object, as "module:Class".
            kwargs: Keyword arguments of its constructor.
            plugins: Modules that the process imports before it creates the object.
            traced: True if the process records trace spans.

        Raises:
            ProcessEndedError: The process ended before the object was created.
            Exception: The error of the object's constructor.
        """
        self._name = name
        self._mailbox = Mailbox()
        self._spans: list[trace.Span] = []
        self._connection: _Connection | None = None
        self._reading: asyncio.Task[None] | None = None
        start = _Start(target, dict(kwargs), plugins, traced, sys.path, os.environ.get("PYTHONPATH"))
        try:
            self._start(start, {})
        except StartAgainError as error:
            print(f"{error}; starting its process again", file=sys.stderr, flush=True)
            self._start(start, error.environment)

    def _start(self, start: _Start, variables: Mapping[str, str]) -> None:
        """Start the process and create the object. Raises what the constructor of ChildProcess raises."""
        from ray import cloudpickle

        self._socket, childs_end = socket.socketpair()
        with childs_end:
            # -P: a module in the working directory must not hide one of the standard library.
            command = [sys.executable, "-P", "-m", __name__, str(childs_end.fileno()), str(os.getpid())]
            search_path = os.pathsep.join(filter(None, sys.path))
            environment = {**os.environ, **variables, "PYTHONPATH": search_path, _CHILD: "1"}
            # Ray kills the process group of an actor, with Python's process that frees semaphores of killed processes.
            self._process = subprocess.Popen(
                command, pass_fds=[childs_end.fileno()], env=environment, start_new_session=True
            )
        Thread(target=_shut_down_after_exit, args=(self._process, self._socket), name=self._name, daemon=True).start()
        message = b""
        with suppress(ConnectionError), self._socket.makefile("rwb") as stream:
            stream.write(_frame(cloudpickle.dumps(start)))
            stream.flush()
            header = stream.read(_LENGTH_BYTES)
            message = stream.read(int.from_bytes(header)) if header else b""
        error: Exception | None = pickle.loads(message) if message else None
        if error is not None or not message:
            self._socket.close()
            ended = self._end_error()
            raise ended if error is None else error

    async def submit(self, channel: str, message: Message) -> None:
        """Pass calls on to the process. If it has ended, `collect` says so."""
        if self._connection is None:
            self._connection = _Connection(self._socket)
            self._reading = asyncio.create_task(self._read(self._connection))
        with suppress(ConnectionError):
            await self._connection.send(channel, message)

    async def collect(self, channel: str) -> tuple[list[Message], list[trace.Span]]:
        """Wait for results, and return them with the trace spans of the process since the last call.

        Raises:
            ProcessEndedError: The process has ended.
        """
        messages = await self._mailbox.collect(channel)
        spans, self._spans = self._spans, []
        return messages, spans

    async def _read(self, connection: _Connection) -> None:
        with suppress(ConnectionError):
            while True:
                channel, message, spans = await connection.receive()
                self._spans += spans
                self._mailbox.put(channel, message)
        error = await asyncio.to_thread(self._end_error)
        print(error, file=sys.stderr, flush=True)
        self._mailbox.fail(error)
        asyncio.get_running_loop().call_later(_EXIT_DELAY_S, os._exit, 1)

    def _end_error(self) -> ProcessEndedError:
        """Wait for the end of the process, whose connection is closed, and describe it."""
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return ProcessEndedError(f"its process {self._process.pid} closed its connection and then did not end")
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return ProcessEndedError(f"its process {self._process.pid} ended with {how}")


def _shut_down_after_exit(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    """End the connection when the process ends, even if a process that it forked still holds the other end."""
    process.wait()
    with suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_RDWR)


def _frame(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES) + message


class _Connection:
    """One end of the socket between the actor and its process, for messages whose buffers are not copied."""

    def __init__(self, connection: socket.socket):
        """Use the socket from the running event loop."""
        connection.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._socket = connection
        self._sending = asyncio.Lock()
        self._received = memoryview(b"")
        """Bytes of the following messages that have been received already."""

    async def send(self, channel: str, message: Message, spans: Sequence[trace.Span] = ()) -> None:
        """Send a message of a channel and trace spans. It is sent completely even if the caller is cancelled.

        Raises:
            ConnectionError: The other process is gone.
        """
        await asyncio.shield(self._send(channel, message, spans))

    async def _send(self, channel: str, message: Message, spans: Sequence[trace.Span]) -> None:
        content, *buffers = message.memory
        sizes = [part.nbytes for part in message.memory]
        head = _frame(pickle.dumps((channel, message.numbers, sizes, spans), pickle.HIGHEST_PROTOCOL))
        first: list[Any] = [head + content] if content.nbytes < MIN_BUFFER_BYTES else [head, content]
        async with self._sending:
            for part in [*first, *buffers]:
                await self._loop.sock_sendall(self._socket, part)

    async def receive(self) -> tuple[str, Message, Sequence[trace.Span]]:
        """Wait for a message, and return its channel, the message and its trace spans.

        Raises:
            ConnectionError: The other process is gone.
        """
        length = int.from_bytes((await self._receive(_LENGTH_BYTES)).data)
        channel, numbers, sizes, spans = pickle.loads((await self._receive(length)).data)
        content, *buffers = [await self._receive(size) for size in sizes]
        # Ray passes small bytes on faster than a small array.
        packed = content.tobytes() if len(content) < MIN_BUFFER_BYTES else content
        return channel, Message(numbers, packed, tuple(buffers)), spans

    async def _receive(self, size: int) -> ByteArray:
        """Receive this number of bytes, large parts directly into the array that is returned."""
        received = np.empty(size, np.uint8)
        missing = received.data
        while missing:
            if not self._received and len(missing) >= _READ_AHEAD_BYTES:
                count = await self._loop.sock_recv_into(self._socket, missing)
            else:
                if not self._received:
                    self._received = memoryview(await self._loop.sock_recv(self._socket, _READ_AHEAD_BYTES))
                count = min(len(missing), len(self._received))
                missing[:count] = self._received[:count]
                self._received = self._received[count:]
            if not count:
                raise ConnectionResetError("the other process closed the connection")
            missing = missing[count:]
        return received


# -- in the child


def _main(descriptor: int, parent: int) -> None:
    set_process_attribute("PR_SET_PDEATHSIG", signal.SIGKILL)
    if os.getppid() != parent:
        return
    redact_output()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    connection = socket.socket(fileno=descriptor)
    with connection.makefile("rwb") as stream:
        start: _Start = pickle.loads(stream.read(int.from_bytes(stream.read(_LENGTH_BYTES))))
        sys.path[:] = start.search_path
        if start.pythonpath is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = start.pythonpath
        try:
            served = _create(start)
        except Exception as error:
            stream.write(_frame(_pack_start_error(error)))
            return
        stream.write(_frame(pickle.dumps(None)))
    asyncio.run(_serve(connection, served))


def _create(start: _Start) -> object:
    if start.traced:
        trace.start_buffering()
    import_without_gc([*start.plugins, start.target.partition(":")[0]])
    gc.freeze()  # imported modules hold half a million objects that never become garbage
    with trace.span("start", track="calls"):
        return load_object(start.target)(**start.kwargs)


def _pack_start_error(error: Exception) -> bytes:
    import traceback

    traceback.print_exception(error)
    try:
        pickle.loads(packed := pickle.dumps(error.with_traceback(None)))
        return packed
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


async def _serve(connection: socket.socket, served: object) -> None:
    actor = _Connection(connection)

    async def deliver(channel: str, message: Message) -> None:
        with suppress(ConnectionError):  # receiving fails, too
            await actor.send(channel, message, trace.drain_spans())

    server = CallServer(served, deliver)
    try:
        while True:
            channel, message, _ = await actor.receive()
            server.receive(channel, message)
    except ConnectionError:  # the actor is gone
        os._exit(1)


if __name__ == "__main__":
    _main(*map(int, sys.argv[1:]))
