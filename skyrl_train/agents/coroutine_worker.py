"""A worker process that runs agents which are coroutines, many at a time in one event loop.

The wire consists of the frames of `environments.worker`. The driver sends `run` and `cancel`; the worker answers each
`run` with its result or its failure, in any order. A thread watches the event loop: if an agent blocks it, the
worker reports which one, and exits. Only the wire's owner may use it; agents print to the log of the environments.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from typing import Any

from skyrl_train.agents.agent_session import AgentSession
from skyrl_train.data.json_values import find_non_json_value
from skyrl_train.environments.agent_registry import find_agent
from skyrl_train.environments.process_supervisor import fork_supervised
from skyrl_train.environments.user_registrations import load_user_registrations
from skyrl_train.environments.worker import (
    HEADER,
    MAX_DETAIL_CHARS,
    encode_frame,
    encode_message,
    format_exception,
    to_jsonable,
)

CRASHED, BLOCKED = "agent_crashed", "agent_blocked"
_WATCH_S = 0.25


class _Worker:
    """The agents of this process.

    Args:
        sink: Descriptor to which replies are written.
        max_blocked_s: Seconds for which an agent may block the event loop.
    """

    def __init__(self, sink: int, max_blocked_s: float):
        self._sink, self._max_blocked_s = sink, max_blocked_s
        self._lock = threading.Lock()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._last_tick = time.monotonic()

    async def serve(self, source: int) -> None:
        """Handle calls until the driver closes the wire."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb"))
        threading.Thread(target=self._watch, args=(loop,), daemon=True).start()
        tick = asyncio.create_task(self._tick())
        while True:
            try:
                size, number = HEADER.unpack(await reader.readexactly(HEADER.size))
                call = json.loads(await reader.readexactly(size))
            except asyncio.IncompleteReadError:
                break
            if call["op"] == "run":
                self._tasks[number] = asyncio.create_task(self._run(number, call))
                await asyncio.sleep(0)  # a task that is cancelled before it starts would send no answer
            elif call["op"] == "cancel" and number in self._tasks:
                self._tasks[number].cancel()
        tick.cancel()

    async def _run(self, number: int, call: Mapping[str, Any]) -> None:
        try:
            result = await find_agent(call["name"])(AgentSession(**call["session"]), call["row"])
            reply: dict[str, Any] = {"result": result}
            if problem := find_non_json_value(result, to_jsonable):
                reply = {"error": CRASHED, "detail": f"the value that it returned contains {problem}"}
            body = encode_message(reply, default=to_jsonable)
        except asyncio.CancelledError:
            body = encode_message({"error": CRASHED, "detail": "CancelledError: it was cancelled, or cancelled itself"})
        except BaseException as error:
            body = encode_message({"error": CRASHED, "detail": _describe(error)})
        self._tasks.pop(number, None)
        self.send(number, body)

    def send(self, number: int, body: bytes) -> None:
        """Send a reply. Thread-safe."""
        frame = encode_frame(number, body)
        with self._lock:
            while frame:
                frame = frame[os.write(self._sink, frame) :]

    async def _tick(self) -> None:
        while True:
            self._last_tick = time.monotonic()
            await asyncio.sleep(_WATCH_S)

    def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Report the agent that blocks the event loop for too long, and exit."""
        main = threading.main_thread().ident
        while True:
            time.sleep(_WATCH_S)
            if time.monotonic() - self._last_tick <= self._max_blocked_s:
                continue
            running = asyncio.current_task(loop)
            frame = sys._current_frames().get(main or 0)
            line = traceback.extract_stack(frame)[-1] if frame is not None else None
            place = f" ({line.filename}:{line.lineno} in {line.name})" if line is not None else ""
            detail = f"it blocked its event loop for {self._max_blocked_s:g} s{place}; await, or use asyncio.to_thread"
            for number, task in list(self._tasks.items()):
                if task is running:
                    self.send(number, encode_message({"error": BLOCKED, "detail": detail}))
            os._exit(1)


def _describe(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {format_exception(error)}"[: 2 * MAX_DETAIL_CHARS]
    except BaseException as unreadable:
        return f"its message cannot be read: {type(unreadable).__name__}"


def main() -> None:
    """Run a worker until the driver closes the wire.

    The arguments are the driver's process id and, optionally, a log file. The first frame configures the worker.
    """
    fork_supervised(int(sys.argv[1]), *sys.argv[2:])
    source, sink = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    size, _ = HEADER.unpack(os.read(source, HEADER.size))
    data = b""
    while len(data) < size:
        data += os.read(source, size - len(data))
    hello = json.loads(data)
    if hello["pythonpath"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = hello["pythonpath"]
    worker = _Worker(sink, hello["max_blocked_s"])
    try:
        for plugin in hello["plugins"]:
            importlib.import_module(plugin)
        load_user_registrations(hello["own"])
        find_agent(hello["name"])  # imports its module, which may take seconds, before the event loop runs
    except BaseException as error:
        worker.send(0, encode_message({"error": "start", "detail": _describe(error)}))
        return
    worker.send(0, encode_message({}))
    asyncio.run(worker.serve(source))
    os._exit(0)  # skips the interpreter's shutdown, which threads of an agent could block


if __name__ == "__main__":
    main()
