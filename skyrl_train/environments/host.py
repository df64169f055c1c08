"""Environments in a pool of processes that can be killed: both ends of the wire.

An environment is third-party synchronous code: it may hang in C, leak, print, exit or crash. So the driver holds an
`EnvironmentHost`, and its worker processes (`python -m skyrl_train.environments.host`) hold the environments. The
parent of each worker caps its output and kills what it started: process_supervisor.py.

Wire: frames over the worker's original stdin and stdout. A frame is a header of 12 bytes, which holds the length and
the number of the call (big-endian, 4 and 8 bytes), followed by that many bytes of JSON. Calls are pipelined. A worker
answers them one at a time and in order, and writes each answer before it begins the next call. So a worker's oldest
unanswered call is the one that it is running: the deadline applies to that call, and it is blamed if the process dies.

An environment may fork, and it may write to any descriptor of its process. Only the worker itself reads and writes the
wire: a forked child loses the wire's descriptors, and ends when it would answer. The host checks every reply. A reply
with the number of another call, or one that is not valid for its call, costs the process and the episode to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import json
import logging
import os
import signal
import struct
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from skyrl_train import trace
from skyrl_train.data.json_values import jsonable, why_not_json
from skyrl_train.data.messages import Message
from skyrl_train.environments import registry
from skyrl_train.environments.base import StepOutput, checked_messages, checked_step_output
from skyrl_train.environments.own_classes import pack_own, register_own
from skyrl_train.environments.pool import (
    MAX_FRAME,
    MAX_KIND_LENGTH,
    EnvironmentPool,
    HostedEpisode,
    Place,
    WireCall,
    pack,
)
from skyrl_train.environments.process_supervisor import KILL_TIMEOUT_S, fork_supervised
from skyrl_train.errors import ConfigError, DataError, EnvironmentFailure

log = logging.getLogger(__name__)

START_DEADLINE_S = 120.0
"""Time for a worker process to start and import the plugins."""
CLOSE_GRACE_S = 5.0
"""Time for environments to close at the end, before their processes are killed."""
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
MAX_DETAIL = 500
"""Number of characters kept of an error message."""
_MAX_SENT_DETAIL = 20 * MAX_DETAIL
"""Number of characters that the host takes of an error message, which may list settings or name a long path."""
_HEADER = struct.Struct("!IQ")
"""Bytes of JSON that follow, and the number of the call."""

# ---------------------------------------------------------------------------------------------------- driver's end


class _Worker(asyncio.SubprocessProtocol):
    """The driver's view of one process. `calls[0]` is the call that it is running."""

    def __init__(self, host: EnvironmentHost, hello: bytes):
        self.host = host
        self.calls: deque[WireCall] = deque()
        self._sent = 0
        """Calls sent so far; a call's number is the count before it."""
        self._last: WireCall | None = None
        """The call that was answered last."""
        self.episodes: set[HostedEpisode] = set()
        self.since = host.loop.time()
        """When calls[0] began to run."""
        self.exited: asyncio.Future[None] = host.loop.create_future()
        self.lost = False
        self._process: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._outbox: list[bytes] = []
        self._inbox = bytearray()
        self.submit(WireCall("hello", hello))

    def submit(self, call: WireCall) -> None:
        if not self.calls:
            self.since = self.host.loop.time()
        self.calls.append(call)
        if not self._outbox:  # one write for all calls of this turn of the event loop
            self.host.loop.call_soon(self._flush)
        self._outbox.append(_framed(self._sent, call.frame))
        self._sent += 1

    def _flush(self) -> None:
        if self._stdin is not None and self._outbox and not self.lost:
            self._stdin.write(b"".join(self._outbox))
            self._outbox.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process = cast(asyncio.SubprocessTransport, transport)  # uvloop's, in a Ray task, is of no such class
        self._stdin = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))
        if self.lost:
            self.kill()
        self._flush()

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        if self.lost:  # it may go on writing until it is killed
            return
        inbox = self._inbox
        inbox += data
        at = 0
        while not self.lost and len(inbox) - at >= _HEADER.size:
            size, number = _HEADER.unpack_from(inbox, at)
            if size > MAX_FRAME or not self.calls or number != self._sent - len(self.calls):
                is_repeated = number == self._sent - len(self.calls) - 1
                self.lose("environment_died", _NO_ANSWER, blamed=self._last if is_repeated or not self.calls else None)
                return
            end = at + _HEADER.size + size
            if len(inbox) < end:
                break
            try:
                reply = _checked_reply(self.calls[0].op, inbox[at + _HEADER.size : end])
            except (ValueError, RecursionError, EnvironmentFailure):
                self.lose("environment_died", _NO_ANSWER)
                return
            at = end
            self._trace_end()
            self.since = self.host.loop.time()
            self._last = self.calls.popleft()
            self.host._answered(self, self._last, reply)
        del inbox[:at]
        if inbox and not self.calls:  # not even the beginning of an answer is due
            self.lose("environment_died", _NO_ANSWER, blamed=self._last)

    def _trace_end(self, how: str = "") -> None:
        if self.calls and self._process is not None and trace.on():
            row = f"process {self._process.get_pid()}"
            trace.add(f"{self.calls[0].op}{how}", trace.unix(self.since), row=row, process="environments")

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.lose("environment_died", "its process ended")

    def process_exited(self) -> None:
        self._kill_group()  # does something only if the supervisor was killed before it could do so itself
        # a grandchild that left the group can hold the pipe open, so end-of-file may never come
        self.host.loop.call_later(0.5, self.connection_lost, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has exited, and all of its answers are read."""
        self.lose("environment_died", "its process ended")
        if not self.exited.done():
            self.exited.set_result(None)
            assert self._process is not None
            self._process.close()

    def overdue(self, now: float, late: float, environment_step_s: float) -> bool:
        """Whether the running call is past its deadline; the event loop itself was blocked for `late` seconds of it."""
        self.since += late
        deadline = START_DEADLINE_S if self.calls and self.calls[0].op == "hello" else environment_step_s
        return bool(self.calls) and now - self.since > deadline

    def lose(self, kind: str, detail: str, blamed: WireCall | None = None) -> None:
        """Abandon the process: kill it and hand its calls back to the host. Does so only once.

        `blamed`: the call whose episode fails; the running call by default.
        """
        if not self.lost:
            self.lost = True
            self._trace_end(f": {kind}")
            self.kill()
            self.host._lost(self, kind, detail, blamed)

    def kill(self) -> None:
        """Ask the supervisor to kill the worker and its descendants; kill the process group if it does not answer."""
        if self._process is not None and not self.exited.done():
            # the transport's send_signal may reap the process, which asyncio then misses and logs on stderr
            with contextlib.suppress(ProcessLookupError):
                for number in (signal.SIGTERM, signal.SIGCONT):  # the latter in case the supervisor is stopped
                    if self._process.get_returncode() is None:
                        os.kill(self._process.get_pid(), number)
            self.host.loop.call_later(KILL_TIMEOUT_S + 1, self._kill_group)

    def _kill_group(self) -> None:
        if self._process is not None and not self.exited.done():
            # already gone, or (macOS) only zombies are left in the group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.get_pid(), signal.SIGKILL)

    def end(self) -> None:
        """Send no more calls: the worker answers the pending ones and exits at end-of-file."""
        self._flush()
        if self._stdin is not None:
            self._stdin.close()


class EnvironmentHost(EnvironmentPool):
    """Runs environments in at most min(max_env_workers, 2 x cores) processes, which are started as needed.

    A failure fails one episode: it raises EnvironmentFailure with the kind under which it is counted. The kind is the
    exception's class name, "bad_row" (JSON cannot carry it), "bad_reward", "bad_step_output", "timeout" (the call ran
    for longer than `environment_step_s`; its process is killed) or "environment_died" (the process ended in the call).
    The other episodes of a lost process are rebuilt in another one when they are next used, from their opening and the
    recorded texts; those that are not `replayable` fail with "environment_died". Deadlines count from the moment a call
    begins to run, not from when it is queued. A ConfigError concerns the whole run: an unknown environment, a
    constructor that raises one, or a plugin that cannot be imported. On Linux all processes are killed when the thread
    that runs the event loop ends.

    Example:
        async with EnvironmentHost({"search": {"topk": 3}}, max_env_workers=8, environment_step_s=30.0) as host:
            episode = await host.start("gsm8k", prompt)
            output = await episode.step("... #### 18")
            await episode.close()
    """

    def __init__(
        self,
        env_configs: Mapping[str, Any],
        max_env_workers: int = 32,
        environment_step_s: float = 60.0,
        plugins: tuple[str, ...] = (),
        log: Path | None = None,
        *,
        own: list[dict[str, str]] | None = None,
        path: Sequence[str] = (),
        checks: bool = False,
    ):
        """
        Args:
            log: File for the output of environments; a note on stderr names it. Without one, or where its folder does
                not exist, output goes to stderr, capped for each process.
            own: What `pack_own` returned in the program that registered environments; None: this one.
            path: Folders in which the processes look for modules first, before those of this process.
            checks: Whether the processes call `TextEnv.check`, as they are not where the driver checked.
        """
        super().__init__()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.max_env_workers = max(1, min(max_env_workers, 2 * cores))
        self.environment_step_s = environment_step_s
        self.plugins = tuple(plugins)
        self._log = log if log is not None and log.parent.is_dir() else None
        self._path = tuple(path)
        self._hello = pack(
            {
                "op": "hello",
                "env_configs": {name: config for name, config in env_configs.items() if isinstance(config, Mapping)},
                "plugins": list(self.plugins),
                "own": pack_own() if own is None else own,
                "pythonpath": os.environ.get("PYTHONPATH"),
                "checks": checks,
            }
        )
        self._workers: list[_Worker] = []
        self._unfinished: set[_Worker] = set()
        """Processes that may still exist, including lost ones."""
        self._starting: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> EnvironmentHost:
        self.loop = asyncio.get_running_loop()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def close(self) -> None:
        """Close all environments and end all processes; none is left running on return."""
        self._closing = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._starting:
            await asyncio.wait(self._starting)
        for worker in self._workers:
            worker.end()
        exits = [worker.exited for worker in self._unfinished]
        if exits:
            await asyncio.wait(exits, timeout=min(CLOSE_GRACE_S, self.environment_step_s))
        for worker in list(self._unfinished):
            worker.lose("host_closed", "the environment host was closed")
        if self._unfinished:
            await asyncio.wait([worker.exited for worker in self._unfinished], timeout=CLOSE_GRACE_S)
        if self._unfinished:
            log.warning("%d environment processes were killed and have not ended", len(self._unfinished))

    def _choose(self) -> _Worker:
        best = min(self._workers, key=lambda worker: (len(worker.calls), len(worker.episodes)), default=None)
        if best is not None and (
            len(self._workers) >= self.max_env_workers or all(call.op == "close" for call in best.calls)
        ):
            return best
        worker = _Worker(self, self._hello)
        self._workers.append(worker)
        self._unfinished.add(worker)
        worker.exited.add_done_callback(lambda _: self._unfinished.discard(worker))
        task = self.loop.create_task(self._spawn(worker))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        return worker

    async def _spawn(self, worker: _Worker) -> None:
        # the driver's own sys.path in the same order: plugin names must refer to the same modules there
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in (*self._path, *sys.path)))
        try:
            await self.loop.subprocess_exec(
                lambda: worker,
                *(sys.executable, "-P", "-m", "skyrl_train.environments.host", str(os.getpid())),
                *([] if self._log is None else [str(self._log)]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            worker.exited.set_result(None)
            worker.lose("environment_died", f"its process could not be started: {error}")

    async def _watch(self) -> None:
        """Kill the processes whose running call is past its deadline."""
        tick = min(0.25, self.environment_step_s / 4)
        before = self.loop.time()
        while True:
            await asyncio.sleep(tick)
            now = self.loop.time()
            late = now - before - tick
            late = late if late > tick else 0.0  # the driver was busy, and answers may have been waiting for it
            for worker in list(self._workers):
                if worker.overdue(now, late, self.environment_step_s):
                    worker.lose("timeout", f"no answer within {self.environment_step_s:g} s")
            before = now

    def _answered(self, place: Place, call: WireCall, reply: dict[str, Any]) -> None:
        if call.op != "hello":
            super()._answered(place, call, reply)
        elif "error" in reply:
            assert isinstance(place, _Worker)
            self._fatal = ConfigError(f"an environment process did not start: {reply['detail']}")
            place.lose("environment_died", "its process did not start")

    def _lost(self, worker: _Worker, kind: str, detail: str, culprit: WireCall | None = None) -> None:
        """Handle the loss of a process: the episode of one call fails, and other pending calls are sent again.

        `culprit`: that call; the running call by default.
        """
        if worker in self._workers:
            self._workers.remove(worker)
        if self._log is not None and not self._closing:
            detail += f" (environments print to {self._log})"
        calls = list(worker.calls)
        worker.calls.clear()
        if calls and calls[0].op == "hello" and not self._closing and self._fatal is None:
            plugins = f" (plugins: {', '.join(self.plugins)})" if self.plugins else ""
            self._fatal = ConfigError(f"an environment process failed while starting{plugins}: {kind}, {detail}")
        blamed = calls if self._closing else calls[:1] if culprit is None else [culprit]
        for call in blamed:
            if call.episode is not None:
                call.episode.fail(EnvironmentFailure(kind, f"{call.episode.env_class} in {call.op}: {detail}"))
        self._move(worker, calls, detail)


_NO_ANSWER = "its process wrote something that is not an answer"


def _framed(number: int, body: bytes) -> bytes:
    return _HEADER.pack(len(body), number) + body


def _checked_reply(op: str, body: bytes | bytearray) -> dict[str, Any]:
    """Return the reply to a call, with the members of that call's replies only.

    Raises ValueError, RecursionError or EnvironmentFailure for anything else.
    """
    reply = json.loads(body)
    if not isinstance(reply, dict) or why_not_json(reply):
        raise ValueError("not an object")
    if "error" in reply:
        kind, detail = reply["error"], reply.get("detail")
        if not isinstance(kind, str) or not isinstance(detail, str):
            raise ValueError("not an error")
        return {
            "error": kind,
            "detail": detail[:_MAX_SENT_DETAIL],
            "fatal": op == "start" and reply.get("fatal") is True,
        }
    if op == "step":
        output = checked_step_output(reply)
        return {name: getattr(output, name) for name in StepOutput.__slots__}
    if op == "start":
        metadata, replayable = reply.get("metadata"), reply.get("replayable")
        if not isinstance(metadata, dict) or not isinstance(replayable, bool):
            raise ValueError("not an opening")
        return {"messages": checked_messages(reply.get("messages")), "metadata": metadata, "replayable": replayable}
    return {}


def _shown(value: Any) -> Any:
    """Like `jsonable`, with text for anything else: metadata is for people and should not fail an episode."""
    try:
        return jsonable(value)
    except TypeError:
        return f"{value!r:.{MAX_DETAIL}}"


# ---------------------------------------------------------------------------------------------------- worker's end


class _EnvironmentServer:
    """Holds the environments of one process and answers one call at a time."""

    def __init__(self, env_configs: Mapping[str, Any], checks: bool = False):
        self.env_configs = env_configs
        self.environments: dict[int, Any] = {}
        self._checked: set[str] | None = set() if checks else None
        """The environments that were checked here; None if the driver has."""

    def answer(self, call: dict[str, Any]) -> bytes:
        """Return the reply as JSON. An exception of the environment, SystemExit included, becomes an error."""
        try:
            reply = getattr(self, call.pop("op"))(**call)
            if why := why_not_json(reply, _shown):
                raise EnvironmentFailure("bad_step_output", f"what it returned holds {why}")
            return pack(reply, default=_shown)
        except BaseException as error:
            return pack(_error_reply(error))

    def start(self, id: int, env_class: str, messages: list[Message], extras: dict[str, Any]) -> dict[str, Any]:
        try:
            if self._checked is not None and env_class not in self._checked:
                registry.check_environments([env_class], self.env_configs)
                self._checked.add(env_class)
            environment = registry.make(env_class, env_config=self.env_configs.get(env_class), extras=extras)
        except DataError:
            raise  # of this row
        except ConfigError as error:
            raise _CannotStart(*error.args) from error
        self.environments[id] = environment
        opened = environment.init(messages)
        if not isinstance(opened, tuple | list) or len(opened) != 2:
            raise EnvironmentFailure(
                "bad_step_output", f"init returned {type(opened).__name__}, not (messages, metadata)"
            )
        metadata = opened[1] or {}
        if not isinstance(metadata, Mapping):
            what = f"init returned metadata that is {type(metadata).__name__}, not a dict"
            raise EnvironmentFailure("bad_step_output", what)
        return {
            "messages": checked_messages(opened[0]),
            "metadata": metadata,
            "replayable": bool(getattr(environment, "replayable", True)),
        }

    def step(self, id: int, text: str) -> dict[str, Any]:
        environment = self.environments[id]
        output = checked_step_output(environment.step(text))
        if output.done and hasattr(environment, "get_metrics"):  # SkyRL-Gym's
            output.metadata |= environment.get_metrics() or {}
        return asdict(output)

    def close(self, id: int) -> dict[str, Any]:
        environment = self.environments.pop(id, None)
        if environment is not None:
            environment.close()
        return {}


class _CannotStart(ConfigError):
    """No episode of this environment can start: its name is unknown, or its settings are wrong."""


def _error_reply(error: BaseException) -> dict[str, Any]:
    """Return an exception as a reply of bounded size, also one whose own `__str__` raises."""
    kind, fatal = type(error).__name__, isinstance(error, _CannotStart)
    try:
        if isinstance(error, EnvironmentFailure):
            kind = str(error.kind)
            detail = str(error.detail)[:MAX_DETAIL]
        elif isinstance(error, ConfigError):
            kind, detail = "ConfigError", str(error)[:_MAX_SENT_DETAIL]
        else:
            detail = _where(error)
    except BaseException as unreadable:
        detail = f"its message cannot be read: {type(unreadable).__name__}"
    return {"error": kind[: MAX_KIND_LENGTH + 1], "detail": detail, "fatal": fatal}


def _where(error: BaseException) -> str:
    """An exception's message and the line it came from: the last one that is no library's, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    place = "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in (own or frames)[-1:])
    return f"{str(error)[:MAX_DETAIL]}{place}"


class _Wire:
    """The worker's end of the wire. A process that the worker has forked ends instead of using it."""

    def __init__(self) -> None:
        """Take over stdin and stdout; environments that read or print use /dev/null and stderr instead."""
        self._owner = os.getpid()
        self._source, self._sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)
        assert isinstance(sys.stdout, io.TextIOWrapper)
        sys.stdout.reconfigure(line_buffering=True)  # a killed process flushes nothing
        os.register_at_fork(after_in_child=self._disconnect)

    def _disconnect(self) -> None:
        """Replace the wire's descriptors by /dev/null, under the same numbers: the child may use freed numbers."""
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in (self._source.fileno(), self._sink):
            os.dup2(null, descriptor, inheritable=False)
        os.close(null)

    def receive(self) -> tuple[int, dict[str, Any]] | None:
        """Return the next call and its number; None once the host has closed the wire."""
        self._end_fork()
        header = self._source.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return None
        size, number = _HEADER.unpack(header)
        return number, json.loads(self._source.read(size))

    def send(self, number: int, body: bytes) -> None:
        """Answer the call of this number."""
        self._end_fork()
        frame = _framed(number, body)
        while frame:
            frame = frame[os.write(self._sink, frame) :]

    def _end_fork(self) -> None:
        """End this process if it is not the worker: a fork in C calls no handler, and an environment may return."""
        if os.getpid() != self._owner:
            os._exit(1)


def serve() -> None:
    """Run a worker process until the driver closes the wire. Arguments: the host's process id, and its `log` if any."""
    fork_supervised(int(sys.argv[1]), *sys.argv[2:])
    wire = _Wire()
    first = wire.receive()
    if first is None:
        return
    number, hello = first
    if hello["pythonpath"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = hello["pythonpath"]
    try:
        for plugin in hello["plugins"]:
            importlib.import_module(plugin)
        register_own(hello["own"])
    except BaseException as error:
        reply = _error_reply(error)
        wire.send(number, pack(reply | {"detail": f"{reply['error']}: {reply['detail']}"}))
        return
    wire.send(number, pack({}))
    server = _EnvironmentServer(hello["env_configs"], hello["checks"])
    while (received := wire.receive()) is not None:
        number, call = received
        wire.send(number, server.answer(call))
    # skip interpreter shutdown, which an environment's threads or exit handlers could block
    os._exit(0)


if __name__ == "__main__":
    serve()
