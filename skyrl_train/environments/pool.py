"""Pools that run environments: what every pool does, and the pool of worker processes on this machine.

An environment is third-party synchronous code: it may hang in C, leak, print, exit or crash. So a `WorkerPool` runs
environments in worker processes (worker.py, which describes the wire) that it can kill. A `HostPool` (hosts.py)
spreads episodes over such pools in Ray actors.

A worker's oldest unanswered call is the one that it is running: the deadline applies to that call, and it is blamed if
the process dies. Every reply is checked. One with the number of another call, or one that is not valid for its call,
costs the process and the episode to blame.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from skyrl_train import trace
from skyrl_train.config.redaction import redact
from skyrl_train.data.json_values import find_non_json_value
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.environments.base import BAD_ROW, StepOutput, validate_messages, validate_step_output
from skyrl_train.environments.process_supervisor import KILL_TIMEOUT_S
from skyrl_train.environments.user_registrations import serialize_user_registrations
from skyrl_train.environments.worker import (
    HEADER,
    MAX_CONFIG_ERROR_CHARS,
    MAX_FRAME_BYTES,
    MAX_KIND_CHARS,
    encode_frame,
    encode_message,
)
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.metrics import MetricNameLimit
from skyrl_train.terminal import escape_control_chars

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""Time for a worker process to start and import the plugins."""
CLOSE_TIMEOUT_S = 5.0
"""Time for environments to close at the end, before their processes are killed."""
MAX_FAILURE_KINDS = 64
"""Kinds of failure that environments may introduce."""
OTHER_FAILURE_KIND = "other"
"""The kind of failures beyond MAX_KINDS."""
_NO_ANSWER = "its process wrote something that is not an answer"


@dataclass(slots=True, eq=False)
class Episode:
    """One environment, from `EnvironmentPool.start` to `close`."""

    pool: EnvironmentPool
    episode_id: int
    env_class: str
    messages: list[Message] = field(default_factory=list)
    """The messages that the environment opened with; render these instead of the row's."""
    metadata: dict[str, Any] = field(default_factory=dict)
    replayable: bool = True
    """`TextEnv.replayable`; valid once the environment has opened."""
    runner: Any = None
    """The worker or host that has the environment. None: the next call builds it there anew from `history`."""
    history: list[bytes] = field(default_factory=list)
    """Calls that were answered, as they were sent."""
    failure: Exception | None = None
    """What every later call raises."""
    pending_call: asyncio.Task[Any] | None = None
    """The last call to a host."""
    num_lost_calls: int = 0
    """Calls that were under way in a host when it was lost."""

    async def step(self, text: str) -> StepOutput:
        """Send the model's text to the environment.

        Raises EnvironmentFailure; every later step then raises the same failure.
        """
        return StepOutput(**await self.pool.call(self, "step", text=text))

    async def close(self) -> None:
        """Queue the environment's `close` and return; its errors are logged. Safe to call twice and after a failure."""
        self.pool.close_episode(self)

    def fail(self, failure: Exception) -> None:
        """Set what every later call raises; the first failure stays."""
        self.failure = self.failure or failure

    def fail_if_not_replayable(self, cause: str) -> None:
        """Fail an episode that has begun and must not be rebuilt."""
        if self.history and not self.replayable:
            detail = f"{self.env_class} is not replayable, and its process was lost: {cause}"
            self.fail(EnvironmentFailure("environment_died", detail))


class EnvironmentPool(ABC):
    """Runs environments that may hang, crash or be lost. Use it as an async context manager.

    A failure fails one episode: it raises EnvironmentFailure with the kind under which it is counted. Episodes of a
    worker or host that was lost are rebuilt in another one when they are next used, from their opening and the recorded
    texts; those that are not `replayable` fail with "environment_died".
    """

    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        self._next_episode_id = 0
        self._closing = False
        self._fatal: ConfigError | None = None
        """What every call raises."""
        self._failure_kinds = MetricNameLimit(MAX_FAILURE_KINDS, MAX_KIND_CHARS)

    @abstractmethod
    async def __aenter__(self) -> EnvironmentPool:
        """Begin; a ConfigError or SkyRLError says what cannot be had."""

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Close all environments; none is left running on return."""

    @abstractmethod
    async def send(self, episode: Episode, op: str, frame: bytes) -> dict[str, Any]:
        """Return the environment's answer to a packed call. Raises EnvironmentFailure, or what ends the run."""

    async def start(self, env_class: str, prompt: Prompt) -> Episode:
        """Start an episode: construct the environment and call its `init` with the prompt's messages and extras.

        Raises EnvironmentFailure, or ConfigError for an unknown environment.
        """
        episode = Episode(self, self._next_episode_id, env_class)
        self._next_episode_id += 1
        try:
            opened = await self.call(
                episode, "start", env_class=env_class, messages=prompt.messages, extras=prompt.env_extras
            )
        except (asyncio.CancelledError, EnvironmentFailure):
            self.close_episode(episode)
            raise
        episode.messages, episode.metadata = opened["messages"], opened["metadata"]
        return episode

    async def call(self, episode: Episode, op: str, **arguments: Any) -> dict[str, Any]:
        """Return the environment's answer. Raises as `send` does."""
        if not hasattr(self, "loop"):
            raise RuntimeError("the pool is used outside `async with`")
        try:
            frame = encode_message({"op": op, "id": episode.episode_id, **arguments})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # texts always pass
            raise EnvironmentFailure(BAD_ROW, f"the row holds what JSON cannot carry: {error}") from error
        return await self.send(episode, op, frame)

    def close_episode(self, episode: Episode) -> None:
        """Queue the environment's `close`; see Episode.close."""
        place, episode.runner = episode.runner, None
        if place is not None and not self._closing:
            place.episodes.discard(episode)
            place.close_episode(episode)
        episode.history.clear()
        episode.fail(EnvironmentFailure("closed", "the episode is closed"))

    def _raise_if_failed(self, episode: Episode) -> None:
        if self._closing:  # an answer that arrived during `close` let the episode go on
            raise EnvironmentFailure("host_closed", "the environment pool was closed")
        if (failure := self._fatal or episode.failure) is not None:
            raise failure

    def _failure(self, kind: str, detail: str) -> EnvironmentFailure:
        """Return a failure of a kind that an environment has named, or of OTHER_KIND."""
        if self._failure_kinds.admits(kind):
            return EnvironmentFailure(kind, detail)
        return EnvironmentFailure(OTHER_FAILURE_KIND, f"{kind:.{MAX_KIND_CHARS}}: {detail}")


@dataclass(slots=True, eq=False)
class _PendingCall:
    op: str
    frame: bytes
    episode: Episode
    answer: asyncio.Future[dict[str, Any]] | None = None
    """None if nothing waits for the answer: hello, replays and close."""


class WorkerHandle(asyncio.SubprocessProtocol):
    """The pool's end of one worker process. `calls[0]` is the call that it is running."""

    def __init__(self, pool: WorkerPool, hello: bytes):
        self.pool = pool
        self.calls: deque[_PendingCall] = deque()
        self._sent = 0
        """Calls sent so far; a call's number is the count before it."""
        self._last_answered: _PendingCall | None = None
        """The call that was answered last."""
        self.episodes: set[Episode] = set()
        self.call_started_s = pool.loop.time()
        """When calls[0] began to run."""
        self.exited: asyncio.Future[None] = pool.loop.create_future()
        self.is_lost = False
        self._process: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._outbox: list[bytes] = []
        self._inbox = bytearray()
        self.spawning = pool.loop.create_task(pool.spawn(self))
        self.submit(_PendingCall("hello", hello, Episode(pool, -1, "hello")))  # of no episode that anything else knows

    @property
    def pid(self) -> int | None:
        """Process id of the worker's supervisor; None until it has started."""
        return None if self._process is None else self._process.get_pid()

    def submit(self, call: _PendingCall) -> None:
        """Send a call after those that were submitted before."""
        if not self.calls:
            self.call_started_s = self.pool.loop.time()
        self.calls.append(call)
        if not self._outbox:  # one write for all calls of this turn of the event loop
            self.pool.loop.call_soon(self._flush)
        self._outbox.append(encode_frame(self._sent, call.frame))
        self._sent += 1

    def _flush(self) -> None:
        if self._stdin is not None and self._outbox and not self.is_lost:
            self._stdin.write(b"".join(self._outbox))
            self._outbox.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._process = cast(asyncio.SubprocessTransport, transport)  # uvloop's, in a Ray task, is of no such class
        self._stdin = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))
        if self.is_lost:
            self.kill()
        self._flush()

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        assert isinstance(data, bytes)
        if self.is_lost:  # it may go on writing until it is killed
            return
        inbox = self._inbox
        inbox += data
        at = 0
        while not self.is_lost and len(inbox) - at >= HEADER.size:
            size, number = HEADER.unpack_from(inbox, at)
            if size > MAX_FRAME_BYTES or not self.calls or number != self._sent - len(self.calls):
                is_repeated = number == self._sent - len(self.calls) - 1
                blamed = self._last_answered if is_repeated or not self.calls else None
                self.pool.abandon(self, "environment_died", _NO_ANSWER, blamed)
                return
            end = at + HEADER.size + size
            if len(inbox) < end:
                break
            try:
                reply = _validate_reply(self.calls[0].op, inbox[at + HEADER.size : end])
            except (ValueError, RecursionError, EnvironmentFailure):
                self.pool.abandon(self, "environment_died", _NO_ANSWER)
                return
            at = end
            self.trace_call_end()
            self.call_started_s = self.pool.loop.time()
            self._last_answered = self.calls.popleft()
            self.pool.handle_reply(self, self._last_answered, reply)
        del inbox[:at]
        if inbox and not self.calls:  # not even the beginning of an answer is due
            self.pool.abandon(self, "environment_died", _NO_ANSWER, self._last_answered)

    def trace_call_end(self, how: str = "") -> None:
        """Add the running call, which ends now, to the trace."""
        if self.calls and self.pid is not None and trace.is_enabled():
            row = f"process {self.pid}"
            trace.add_span(
                f"{self.calls[0].op}{how}", trace.to_unix_time(self.call_started_s), track=row, process="environments"
            )

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 1:
            self.pool.abandon(self, "environment_died", "its process ended")

    def process_exited(self) -> None:
        self._kill_group()  # does something only if the supervisor was killed before it could do so itself
        # a grandchild that left the group can hold the pipe open, so end-of-file may never come
        self.pool.loop.call_later(0.5, self.connection_lost, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has exited, and all of its answers are read."""
        self.pool.abandon(self, "environment_died", "its process ended")
        if not self.exited.done():
            self.exited.set_result(None)
            assert self._process is not None
            self._process.close()

    def kill(self) -> None:
        """Ask the supervisor to kill the worker and its descendants; kill the process group if it does not answer."""
        if self._process is not None and not self.exited.done():
            # the transport's send_signal may reap the process, which asyncio then misses and logs on stderr
            with contextlib.suppress(ProcessLookupError):
                for number in (signal.SIGTERM, signal.SIGCONT):  # the latter in case the supervisor is stopped
                    if self._process.get_returncode() is None:
                        os.kill(self._process.get_pid(), number)
            self.pool.loop.call_later(KILL_TIMEOUT_S + 1, self._kill_group)

    def _kill_group(self) -> None:
        if self._process is not None and not self.exited.done():
            # already gone, or (macOS) only zombies are left in the group
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.get_pid(), signal.SIGKILL)

    def close_episode(self, episode: Episode) -> None:
        """Close an environment after the calls that were sent before."""
        self.submit(_PendingCall("close", encode_message({"op": "close", "id": episode.episode_id}), episode))

    def close_input(self) -> None:
        """Send no more calls: the worker answers the pending ones and exits at end-of-file."""
        self._flush()
        if self._stdin is not None:
            self._stdin.close()


class WorkerPool(EnvironmentPool):
    """Runs environments in at most min(max_env_workers, 2 x cores) worker processes, which are started as needed.

    The kind of a failure is the exception's class name, "bad_row" (JSON cannot carry it), "bad_reward",
    "bad_step_output", "timeout" (the call ran for longer than `environment_step_s`; its worker is killed) or
    "environment_died" (the worker ended in the call). Deadlines count from the moment a call begins to run, not from
    when it is queued. A ConfigError concerns the whole run: an unknown environment, a constructor that raises one, or a
    plugin that cannot be imported. On Linux all workers are killed when the thread that runs the event loop ends.

    Example:
        async with WorkerPool({"search": {"topk": 3}}, max_env_workers=8, environment_step_s=30.0) as pool:
            episode = await pool.start("gsm8k", prompt)
            output = await episode.step("... #### 18")
            await episode.close()
    """

    def __init__(
        self,
        env_configs: Mapping[str, Any],
        max_env_workers: int = 32,
        environment_step_s: float = 60.0,
        plugins: tuple[str, ...] = (),
        log_file: Path | None = None,
        *,
        registrations: list[dict[str, str]] | None = None,
        module_path: Sequence[str] = (),
        checks: bool = False,
    ):
        """
        Args:
            log: File for the output of environments; a note on stderr names it. Without one, or where its folder does
                not exist, output goes to stderr, capped for each worker.
            own: What `pack_own` returned in the program that registered environments; None: this one.
            path: Folders in which workers look for modules first, before those of this process.
            checks: True if workers call `TextEnv.check`, as they are not where the driver checked.
        """
        super().__init__()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.max_env_workers = max(1, min(max_env_workers, 2 * cores))
        self.environment_step_s = environment_step_s
        self.workers: list[WorkerHandle] = []
        """Workers that are in use."""
        self._plugins = tuple(plugins)
        self._log_file = log_file if log_file is not None and log_file.parent.is_dir() else None
        self._module_path = tuple(module_path)
        self._hello = encode_message(
            {
                "op": "hello",
                "env_configs": {name: config for name, config in env_configs.items() if isinstance(config, Mapping)},
                "plugins": list(self._plugins),
                "own": serialize_user_registrations() if registrations is None else registrations,
                "pythonpath": os.environ.get("PYTHONPATH"),
                "checks": checks,
            }
        )
        self._warned: set[tuple[str, str]] = set()
        self._exiting: set[WorkerHandle] = set()
        """Workers whose processes may still exist, including lost ones."""
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WorkerPool:
        self.loop = asyncio.get_running_loop()
        self._watcher = asyncio.create_task(self._enforce_deadlines())
        return self

    async def close(self) -> None:
        """Close all environments and end all workers; none is left running on return."""
        self._closing = True
        if self._watcher is not None:
            self._watcher.cancel()
        if self._exiting:
            await asyncio.wait([worker.spawning for worker in self._exiting])
        for worker in self.workers:
            worker.close_input()
        if self._exiting:
            exits = [worker.exited for worker in self._exiting]
            await asyncio.wait(exits, timeout=min(CLOSE_TIMEOUT_S, self.environment_step_s))
        for worker in list(self._exiting):
            self.abandon(worker, "host_closed", "the environment pool was closed")
        if self._exiting:
            await asyncio.wait([worker.exited for worker in self._exiting], timeout=CLOSE_TIMEOUT_S)
        if self._exiting:
            log.warning("%d environment workers were killed and have not ended", len(self._exiting))

    async def send(self, episode: Episode, op: str, frame: bytes) -> dict[str, Any]:
        """Return the environment's answer to a packed call."""
        self._raise_if_failed(episode)
        answer: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        self._dispatch(_PendingCall(op, frame, episode, answer))
        return await answer

    def handle_reply(self, worker: WorkerHandle, call: _PendingCall, reply: dict[str, Any]) -> None:
        """Take a worker's reply."""
        error, episode = reply.get("error"), call.episode
        if call.op == "hello":
            if error is not None:
                self._fatal = ConfigError(f"an environment worker did not start: {reply['detail']}")
                self.abandon(worker, "environment_died", "its process did not start")
            return
        if error is not None:
            failure = self._failure(error, reply["detail"])
            if call.op == "close":
                self._warn_close_failed(episode.env_class, failure)
            else:
                episode.fail(ConfigError(failure.detail) if reply["fatal"] else failure)
        elif call.answer is not None and episode.runner is worker:
            episode.history.append(call.frame)
            episode.replayable = reply.get("replayable", episode.replayable)
        if call.answer is None or call.answer.done():  # done: the waiting task was cancelled
            return
        if (cause := self._fatal or episode.failure) is not None:
            call.answer.set_exception(cause)
        else:
            call.answer.set_result(reply)

    def abandon(self, worker: WorkerHandle, kind: str, detail: str, failed_call: _PendingCall | None = None) -> None:
        """Abandon a worker, once: kill it, fail the episode of one call, and send its other pending calls again.

        `blamed`: that call; the running call by default.
        """
        if worker.is_lost:
            return
        worker.is_lost = True
        worker.trace_call_end(f": {kind}")
        worker.kill()
        if worker in self.workers:
            self.workers.remove(worker)
        if self._log_file is not None and not self._closing:
            detail += f" (environments print to {self._log_file})"
        calls = list(worker.calls)
        worker.calls.clear()
        if calls and calls[0].op == "hello" and not self._closing and self._fatal is None:
            plugins = f" (plugins: {', '.join(self._plugins)})" if self._plugins else ""
            self._fatal = ConfigError(f"an environment worker failed while starting{plugins}: {kind}, {detail}")
        for call in calls if self._closing else calls[:1] if failed_call is None else [failed_call]:
            call.episode.fail(EnvironmentFailure(kind, f"{call.episode.env_class} in {call.op}: {detail}"))
        for episode in worker.episodes:
            episode.runner = None
            episode.fail_if_not_replayable(detail)
        for call in calls:
            if call.answer is None or call.answer.done():
                continue
            if (failure := self._fatal or call.episode.failure) is not None:
                call.answer.set_exception(failure)
            else:
                self._dispatch(call)

    def _dispatch(self, call: _PendingCall) -> None:
        """Send a call to its episode's worker; an episode without one is first rebuilt, call by call."""
        episode = call.episode
        if episode.runner is None:
            episode.runner = self._select_worker()
            episode.runner.episodes.add(episode)
            for index, frame in enumerate(episode.history):
                episode.runner.submit(_PendingCall("step" if index else "start", frame, episode))
        episode.runner.submit(call)

    def _select_worker(self) -> WorkerHandle:
        """Return the worker with the fewest calls; start one if all have some, and another is allowed."""
        best = min(self.workers, key=lambda worker: (len(worker.calls), len(worker.episodes)), default=None)
        if best is not None and (
            len(self.workers) >= self.max_env_workers or all(call.op == "close" for call in best.calls)
        ):
            return best
        worker = WorkerHandle(self, self._hello)
        self.workers.append(worker)
        self._exiting.add(worker)
        worker.exited.add_done_callback(lambda _: self._exiting.discard(worker))
        return worker

    async def spawn(self, worker: WorkerHandle) -> None:
        """Start the process of a worker, which receives its output as an asyncio protocol."""
        # the driver's own sys.path in the same order: plugin names must refer to the same modules there
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in (*self._module_path, *sys.path)))
        try:
            await self.loop.subprocess_exec(
                lambda: worker,
                *(sys.executable, "-P", "-m", "skyrl_train.environments.worker", str(os.getpid())),
                *([] if self._log_file is None else [str(self._log_file)]),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=None,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": path},
            )
        except OSError as error:
            worker.exited.set_result(None)
            self.abandon(worker, "environment_died", f"its process could not be started: {error}")

    def _warn_close_failed(self, env_class: str, failure: EnvironmentFailure) -> None:
        """Warn once for each kind: all episodes of a run may end so."""
        if (env_class, failure.kind) not in self._warned:
            self._warned.add((env_class, failure.kind))
            self._warn(f"closing {env_class}: {escape_control_chars(redact(str(failure)))} (logged once)")

    async def _enforce_deadlines(self) -> None:
        """Kill the workers whose running call is past its deadline."""
        tick = min(0.25, self.environment_step_s / 4)
        before = self.loop.time()
        while True:
            await asyncio.sleep(tick)
            now = self.loop.time()
            late = now - before - tick
            late = late if late > tick else 0.0  # the driver was busy, and answers may have been waiting for it
            for worker in list(self.workers):
                worker.call_started_s += late
                starts = bool(worker.calls) and worker.calls[0].op == "hello"
                if worker.calls and now - worker.call_started_s > (
                    START_TIMEOUT_S if starts else self.environment_step_s
                ):
                    self.abandon(worker, "timeout", f"no answer within {self.environment_step_s:g} s")
            before = now

    def _warn(self, text: str) -> None:
        log.warning("%s", text)


def _validate_reply(op: str, body: bytes | bytearray) -> dict[str, Any]:
    """Return the reply to a call, with the members of that call's replies only.

    Raises ValueError, RecursionError or EnvironmentFailure for anything else.
    """
    reply = json.loads(body)
    if not isinstance(reply, dict) or find_non_json_value(reply):
        raise ValueError("not an object")
    if "error" in reply:
        kind, detail = reply["error"], reply.get("detail")
        if not isinstance(kind, str) or not isinstance(detail, str):
            raise ValueError("not an error")
        fatal = op == "start" and reply.get("fatal") is True
        return {"error": kind, "detail": detail[:MAX_CONFIG_ERROR_CHARS], "fatal": fatal}
    if op == "step":
        output = validate_step_output(reply)
        return {name: getattr(output, name) for name in StepOutput.__slots__}
    if op == "start":
        metadata, replayable = reply.get("metadata"), reply.get("replayable")
        if not isinstance(metadata, dict) or not isinstance(replayable, bool):
            raise ValueError("not an opening")
        return {"messages": validate_messages(reply.get("messages")), "metadata": metadata, "replayable": replayable}
    return {}
