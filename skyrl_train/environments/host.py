"""Environments in a pool of processes that can be killed: both ends of the wire.

An environment is third-party synchronous code: it may hang in C, leak, print, exit or crash. So the driver holds an
`EnvironmentHost`, and its worker processes (`python -m skyrl_train.environments.host`) hold the environments. Each has
a parent that bounds what is printed there, and ends what was started there: keeper.py.

Wire: frames over the worker's original stdin and stdout, each 4 bytes of length (big-endian) followed by that many
bytes of JSON. Calls are pipelined. A worker answers them one at a time and in order, and writes each answer before it
begins the next call. So a worker's oldest unanswered call is the one that it is running: the deadline applies to that
call, and it is blamed if the process dies.
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from skyrl_train import trace
from skyrl_train.config.secrets import redact
from skyrl_train.data.json_values import jsonable, why_not_json
from skyrl_train.data.trajectory import Message, Prompt
from skyrl_train.environments import registry
from skyrl_train.environments.base import BAD_ROW, StepOutput, checked_messages, checked_step_output
from skyrl_train.environments.keeper import ENDS_S, keep
from skyrl_train.environments.own_classes import pack_own, register_own
from skyrl_train.errors import ConfigError, DataError, EnvironmentFailure
from skyrl_train.messages import visible

log = logging.getLogger(__name__)

MAX_FRAME = 64 * 2**20
"""Maximum bytes of one message; a larger observation fails its episode."""
START_DEADLINE_S = 120.0
"""Time for a worker process to start and import the plugins."""
CLOSE_GRACE_S = 5.0
"""Time for environments to close at the end, before their processes are killed."""
_LIBRARIES = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")})
MAX_DETAIL = 500
"""Number of characters kept of an error message."""

# ---------------------------------------------------------------------------------------------------- driver's end


@dataclass(slots=True, eq=False)
class _WireCall:
    op: str
    frame: bytes
    episode: HostedEpisode | None = None
    answer: asyncio.Future[dict[str, Any]] | None = None
    """None if nothing waits for the answer: hello, replays and close."""


@dataclass(slots=True, eq=False)
class HostedEpisode:
    """One environment, from `EnvironmentHost.start` to `close`."""

    host: EnvironmentHost
    number: int
    env_class: str
    messages: list[Message] = field(default_factory=list)
    """The messages that the environment opened with; render these instead of the row's."""
    metadata: dict[str, Any] = field(default_factory=dict)
    replayable: bool = True
    """`TextEnv.replayable`; valid once the environment has opened."""
    _worker: _Worker | None = None
    _history: list[bytes] = field(default_factory=list)
    """Frames that were answered; sending them to another process rebuilds the environment there."""
    _failure: Exception | None = None

    async def step(self, text: str) -> StepOutput:
        """Send the model's text to the environment.

        Raises EnvironmentFailure; every later step then raises the same failure.
        """
        return StepOutput(**await self.host._call(self, "step", text=text))

    async def close(self) -> None:
        """Queue the environment's `close` and return; its errors are logged. Safe to call twice and after a failure."""
        self.host._close_episode(self)


class _Worker(asyncio.SubprocessProtocol):
    """The driver's view of one process. `calls[0]` is the call that it is running."""

    def __init__(self, host: EnvironmentHost, hello: bytes):
        self.host = host
        self.calls: deque[_WireCall] = deque()
        self.episodes: set[HostedEpisode] = set()
        self.since = host.loop.time()
        """When calls[0] began to run."""
        self.exited: asyncio.Future[None] = host.loop.create_future()
        self.lost = False
        self._process: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._outbox: list[bytes] = []
        self._inbox = bytearray()
        self.submit(_WireCall("hello", hello))

    def submit(self, call: _WireCall) -> None:
        if not self.calls:
            self.since = self.host.loop.time()
        self.calls.append(call)
        if not self._outbox:  # one write for all calls of this turn of the event loop
            self.host.loop.call_soon(self._flush)
        self._outbox.append(call.frame)

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
        inbox = self._inbox
        inbox += data
        at = 0
        while not self.lost and len(inbox) - at >= 4:
            (size,) = struct.unpack_from("!I", inbox, at)
            if size > MAX_FRAME or not self.calls:
                self.lose("environment_died", "its process wrote something that is not an answer")
                return
            if len(inbox) - at < 4 + size:
                break
            try:
                reply = json.loads(inbox[at + 4 : at + 4 + size])
            except (ValueError, RecursionError):
                self.lose("environment_died", "its process wrote something that is not an answer")
                return
            at += 4 + size
            self._trace_end()
            self.since = self.host.loop.time()
            self.host._answered(self, self.calls.popleft(), reply)
        del inbox[:at]

    def _trace_end(self, how: str = "") -> None:
        if self.calls and self._process is not None and trace.on():
            row = f"process {self._process.get_pid()}"
            trace.add(f"{self.calls[0].op}{how}", trace.unix(self.since), row=row, process="environments")

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.lose("environment_died", "its process ended")

    def process_exited(self) -> None:
        self._kill_group()  # the keeper has ended; what is left if it was itself killed
        # a grandchild that left the group can hold the pipe open, so end-of-file may never come
        self.host.loop.call_later(0.5, self.connection_lost, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has exited, and all of its answers are read."""
        self.lose("environment_died", "its process ended")
        if not self.exited.done():
            self.exited.set_result(None)
            assert self._process is not None
            self._process.close()

    def overdue(self, now: float, late: float, step_deadline_s: float) -> bool:
        """Whether the running call is past its deadline; the event loop itself was blocked for `late` seconds of it."""
        self.since += late
        deadline = START_DEADLINE_S if self.calls and self.calls[0].op == "hello" else step_deadline_s
        return bool(self.calls) and now - self.since > deadline

    def lose(self, kind: str, detail: str) -> None:
        """Abandon the process: kill it and hand its calls back to the host. Does so only once."""
        if not self.lost:
            self.lost = True
            self._trace_end(f": {kind}")
            self.kill()
            self.host._lost(self, kind, detail)

    def kill(self) -> None:
        """Have the keeper kill all that runs there; should it not be able to, its group is killed."""
        if self._process is not None and not self.exited.done():
            with contextlib.suppress(ProcessLookupError):
                for number in (signal.SIGTERM, signal.SIGCONT):  # a keeper that is stopped goes on
                    self._process.send_signal(number)
            self.host.loop.call_later(ENDS_S + 1, self._kill_group)

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


class EnvironmentHost:
    """Runs environments in at most min(max_workers, 2 x cores) processes, which are started as needed.

    A failure fails one episode: it raises EnvironmentFailure with the kind under which it is counted. The kind is the
    exception's class name, "bad_row" (JSON cannot carry it), "bad_reward", "bad_step_output", "timeout" (the call ran
    for longer than `step_deadline_s`; its process is killed) or "environment_died" (the process ended during the call).
    The other episodes of a lost process are rebuilt in another one when they are next used, from their opening and the
    recorded texts; those that are not `replayable` fail with "environment_died". Deadlines count from the moment a call
    begins to run, not from when it is queued. A ConfigError concerns the whole run: an unknown environment, a
    constructor that raises one, or a plugin that cannot be imported.

    Example:
        async with EnvironmentHost({"search": {"topk": 3}}, max_workers=8, step_deadline_s=30.0) as host:
            episode = await host.start("gsm8k", prompt)
            output = await episode.step("... #### 18")
            await episode.close()
    """

    def __init__(
        self,
        env_configs: Mapping[str, Any],
        max_workers: int = 32,
        step_deadline_s: float = 60.0,
        plugins: tuple[str, ...] = (),
        log: Path | None = None,
    ):
        """`log`: a file for what the processes print, which is also shown on stderr, if less of it."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.max_workers = max(1, min(max_workers, 2 * cores))
        self.step_deadline_s = step_deadline_s
        self.plugins = tuple(plugins)
        self._log = log
        self._hello = _frame(
            {
                "op": "hello",
                "env_configs": {name: config for name, config in env_configs.items() if isinstance(config, Mapping)},
                "plugins": list(self.plugins),
                "own": pack_own(),
                "pythonpath": os.environ.get("PYTHONPATH"),
            }
        )
        self._workers: list[_Worker] = []
        self._unfinished: set[_Worker] = set()
        """Processes that may still exist, including lost ones."""
        self._starting: set[asyncio.Task[None]] = set()
        self._watcher: asyncio.Task[None] | None = None
        self._warned: set[tuple[str, str]] = set()
        self._next_number = 0
        self._fatal: Exception | None = None
        self._closing = False

    async def __aenter__(self) -> EnvironmentHost:
        self.loop = asyncio.get_running_loop()
        self._watcher = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def start(self, env_class: str, prompt: Prompt) -> HostedEpisode:
        """Start an episode: construct the environment and call its `init` with the prompt's messages and extras.

        Raises EnvironmentFailure, or ConfigError for an unknown environment.
        """
        episode = HostedEpisode(self, self._next_number, env_class)
        self._next_number += 1
        try:
            opened = await self._call(
                episode, "start", env_class=env_class, messages=prompt.messages, extras=prompt.env_extras
            )
        except (asyncio.CancelledError, EnvironmentFailure):
            self._close_episode(episode)
            raise
        episode.messages, episode.metadata = opened["messages"], opened["metadata"]
        return episode

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
            await asyncio.wait(exits, timeout=min(CLOSE_GRACE_S, self.step_deadline_s))
        for worker in list(self._unfinished):
            worker.lose("host_closed", "the environment host was closed")
        if self._unfinished:
            await asyncio.wait([worker.exited for worker in self._unfinished], timeout=CLOSE_GRACE_S)
        if self._unfinished:
            log.warning("%d environment processes were killed and have not ended", len(self._unfinished))

    async def _call(self, episode: HostedEpisode, op: str, **arguments: Any) -> dict[str, Any]:
        assert self._watcher is not None, "the host is used outside `async with`"
        if self._closing:  # an answer that arrived during `close` let the episode go on
            raise EnvironmentFailure("host_closed", "the environment host was closed")
        failure = self._fatal or episode._failure
        if failure is not None:
            raise failure
        try:
            frame = _frame({"op": op, "id": episode.number, **arguments})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # texts always pass
            raise EnvironmentFailure(BAD_ROW, f"the row holds what JSON cannot carry: {error}") from error
        answer: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        self._dispatch(_WireCall(op, frame, episode, answer))
        return await answer

    def _dispatch(self, call: _WireCall) -> None:
        """Send a call to its episode's worker; an episode without a worker is first rebuilt, call by call."""
        episode = call.episode
        assert episode is not None
        if episode._worker is None:
            episode._worker = self._least_busy()
            episode._worker.episodes.add(episode)
            for index, frame in enumerate(episode._history):
                episode._worker.submit(_WireCall("step" if index else "start", frame, episode))
        episode._worker.submit(call)

    def _close_episode(self, episode: HostedEpisode) -> None:
        worker, episode._worker = episode._worker, None
        if worker is not None and not self._closing:
            worker.episodes.discard(episode)
            worker.submit(_WireCall("close", _frame({"op": "close", "id": episode.number}), episode))
        episode._history.clear()
        episode._failure = episode._failure or EnvironmentFailure("closed", "the episode is closed")

    def _least_busy(self) -> _Worker:
        best = min(self._workers, key=lambda worker: (len(worker.calls), len(worker.episodes)), default=None)
        if best is not None and (
            len(self._workers) >= self.max_workers or all(call.op == "close" for call in best.calls)
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
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        try:
            await self.loop.subprocess_exec(
                lambda: worker,
                *(sys.executable, "-P", "-m", "skyrl_train.environments.host"),
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
        tick = min(0.25, self.step_deadline_s / 4)
        before = self.loop.time()
        while True:
            await asyncio.sleep(tick)
            now = self.loop.time()
            late = now - before - tick
            late = late if late > tick else 0.0  # the driver was busy, and answers may have been waiting for it
            for worker in list(self._workers):
                if worker.overdue(now, late, self.step_deadline_s):
                    worker.lose("timeout", f"no answer within {self.step_deadline_s:g} s")
            before = now

    def _answered(self, worker: _Worker, call: _WireCall, reply: dict[str, Any]) -> None:
        error, episode = reply.get("error"), call.episode
        if call.op == "hello":
            if error is not None:
                self._fatal = ConfigError(f"an environment process did not start: {reply['detail']}")
                worker.lose("environment_died", "its process did not start")
        elif call.op == "close":
            if error is not None:
                self._warn_of_close(episode.env_class if episode else "", error, reply["detail"])
        elif episode is not None:
            if error is not None:
                failure = (
                    ConfigError(reply["detail"]) if reply.get("fatal") else EnvironmentFailure(error, reply["detail"])
                )
                episode._failure = episode._failure or failure
            elif call.answer is not None and episode._worker is worker:
                episode._history.append(call.frame)
                episode.replayable = reply.get("replayable", episode.replayable)
            self._settle(call, reply)

    def _warn_of_close(self, env_class: str, error: str, detail: str) -> None:
        """Once for each kind: all episodes of a run may end so."""
        if (env_class, error) not in self._warned:
            self._warned.add((env_class, error))
            log.warning("closing %s: %s: %s (more of it is not said)", env_class, error, visible(redact(detail)))

    def _settle(self, call: _WireCall, reply: dict[str, Any] | None = None) -> None:
        """Resolve `call` with the reply, or with its episode's failure."""
        if call.answer is None or call.answer.done():  # done: the waiting task was cancelled
            return
        failure = self._fatal or (call.episode._failure if call.episode else None)
        if failure is not None:
            call.answer.set_exception(failure)
        else:
            assert reply is not None
            call.answer.set_result(reply)

    def _lost(self, worker: _Worker, kind: str, detail: str) -> None:
        """Handle the loss of a process: the episode of its running call fails, other pending calls are sent again."""
        if worker in self._workers:
            self._workers.remove(worker)
        calls = list(worker.calls)
        worker.calls.clear()
        if calls and calls[0].op == "hello" and not self._closing and self._fatal is None:
            plugins = f" (plugins: {', '.join(self.plugins)})" if self.plugins else ""
            self._fatal = ConfigError(f"an environment process failed while starting{plugins}: {kind}, {detail}")
        blamed = calls if self._closing else calls[:1]
        for call in blamed:
            if call.episode is not None:
                call.episode._failure = call.episode._failure or EnvironmentFailure(
                    kind, f"{call.episode.env_class} in {call.op}: {detail}"
                )
        for episode in worker.episodes:
            episode._worker = None
            if episode._history and not episode.replayable:
                episode._failure = episode._failure or EnvironmentFailure(
                    "environment_died", f"{episode.env_class} is not replayable, and its process was lost: {detail}"
                )
        for call in calls:
            if call.answer is None or call.answer.done():
                continue
            if self._fatal or (call.episode and call.episode._failure):
                self._settle(call)
            else:
                self._dispatch(call)


def _frame(message: Mapping[str, Any], default: Callable[[Any], Any] = jsonable) -> bytes:
    """Encode one message. ASCII, so that lone surrogates and control characters pass unchanged."""
    body = json.dumps(message, default=default).encode("ascii")
    if len(body) > MAX_FRAME:
        raise EnvironmentFailure("too_large", f"a message of {len(body)} bytes; at most {MAX_FRAME} pass")
    return struct.pack("!I", len(body)) + body


def _shown(value: Any) -> Any:
    """Like `jsonable`, with text for anything else: metadata is for people and should not fail an episode."""
    try:
        return jsonable(value)
    except TypeError:
        return f"{value!r:.{MAX_DETAIL}}"


# ---------------------------------------------------------------------------------------------------- worker's end


class _EnvironmentServer:
    """Holds the environments of one process and answers one call at a time."""

    def __init__(self, env_configs: Mapping[str, Any]):
        self.env_configs = env_configs
        self.environments: dict[int, Any] = {}

    def answer(self, call: dict[str, Any]) -> bytes:
        """Return the frame to send back. An exception of the environment, SystemExit included, becomes an error."""
        try:
            reply = getattr(self, call.pop("op"))(**call)
            if why := why_not_json(reply, _shown):
                raise EnvironmentFailure("bad_step_output", f"what it returned holds {why}")
            return _frame(reply, default=_shown)
        except ConfigError as error:
            return _frame({"error": "ConfigError", "detail": str(error), "fatal": isinstance(error, _CannotStart)})
        except EnvironmentFailure as failure:
            return _frame({"error": str(failure.kind), "detail": str(failure.detail)[:MAX_DETAIL]})
        except BaseException as error:
            return _frame({"error": type(error).__name__, "detail": _where(error)})

    def start(self, id: int, env_class: str, messages: list[Message], extras: dict[str, Any]) -> dict[str, Any]:
        try:
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
        return {
            "messages": checked_messages(opened[0]),
            "metadata": opened[1] or {},
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


def _where(error: BaseException) -> str:
    """An exception's message and the line it came from: the last one that is no library's, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<"))]
    place = "".join(f" ({frame.filename}:{frame.lineno} in {frame.name})" for frame in (own or frames)[-1:])
    return f"{str(error)[:MAX_DETAIL]}{place}"


def _take_wire() -> tuple[BinaryIO, int]:
    """Keep the wire for the server; environments that read or print use /dev/null and stderr instead."""
    source, sink = os.fdopen(os.dup(0), "rb"), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    os.close(null)
    assert isinstance(sys.stdout, io.TextIOWrapper)
    sys.stdout.reconfigure(line_buffering=True)  # a killed process flushes nothing
    return source, sink


def _receive(source: BinaryIO) -> dict[str, Any] | None:
    header = source.read(4)
    if len(header) < 4:
        return None
    body = source.read(struct.unpack("!I", header)[0])
    return json.loads(body)


def _send(sink: int, frame: bytes) -> None:
    while frame:
        frame = frame[os.write(sink, frame) :]


def serve() -> None:
    """Run a worker process until the driver closes the wire. Its argument is the host's `log`, if there is one."""
    keep(*sys.argv[1:])
    source, sink = _take_wire()
    hello = _receive(source)
    if hello is None:
        return
    if hello["pythonpath"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = hello["pythonpath"]
    try:
        for plugin in hello["plugins"]:
            importlib.import_module(plugin)
        register_own(hello["own"])
    except BaseException as error:
        _send(sink, _frame({"error": type(error).__name__, "detail": f"{type(error).__name__}: {_where(error)}"}))
        return
    _send(sink, _frame({}))
    server = _EnvironmentServer(hello["env_configs"])
    while (call := _receive(source)) is not None:
        _send(sink, server.answer(call))
    # skip interpreter shutdown, which an environment's threads or exit handlers could block
    os._exit(0)


if __name__ == "__main__":
    serve()
