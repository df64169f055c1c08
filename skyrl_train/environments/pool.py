"""The interface of environment pools, and the pool of worker processes on this machine.

An environment is third-party synchronous code. It may hang in C, leak, print, exit or crash. Therefore a `WorkerPool`
runs environments in worker processes that it can kill (worker.py describes the wire format). A `HostPool` (hosts.py)
distributes episodes over such pools in Ray actors.

A worker's oldest unanswered call is the one that it is running. The deadline applies to that call, and its episode
fails if the process dies. The pool validates every reply. If a reply has the number of another call or is not valid for
its call, the pool kills the process and fails the episode that caused the reply.
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
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

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
"""Maximum time for a worker process to start and import the plugins."""
CLOSE_TIMEOUT_S = 5.0
"""Time for environments to close when the pool is closed, before their processes are killed."""
MAX_FAILURE_KINDS = 64
"""Maximum number of failure kinds that environments may introduce. Each becomes a metric."""
OTHER_FAILURE_KIND = "other"
"""Failure kind that replaces new kinds once there are MAX_FAILURE_KINDS."""
_NO_ANSWER = "its process wrote something that is not an answer"


class EpisodeRunner(Protocol):
    """A worker or host that runs the environments of episodes."""

    episodes: set[Episode]

    def close_episode(self, episode: Episode) -> None:
        """Close the episode's environment after its earlier calls, without waiting."""


@dataclass(slots=True, eq=False)
class Episode:
    """An environment of a pool, from `EnvironmentPool.start` to `close`."""

    pool: EnvironmentPool
    episode_id: int
    env_class: str
    messages: list[Message] = field(default_factory=list)
    """Messages with which the environment opened the conversation. Render these instead of the row's."""
    metadata: dict[str, Any] = field(default_factory=dict)
    replayable: bool = True
    """`TextEnv.replayable` of the environment. Valid once the environment has opened."""
    runner: EpisodeRunner | None = None
    """Worker or host that runs the environment. If None, the next call rebuilds the environment from `history`."""
    history: list[bytes] = field(default_factory=list)
    """Encoded calls that were answered, in order."""
    failure: Exception | None = None
    """Exception that every later call raises."""
    pending_call: asyncio.Task[Any] | None = None
    """The latest call to a host."""
    num_lost_calls: int = 0
    """Number of calls that were in flight in a host when that host was lost."""

    async def step(self, text: str) -> StepOutput:
        """Send the model's text to the environment and return its output.

        Raises:
            EnvironmentFailure: The episode failed. Every later step raises the same failure.
            ConfigError: A problem concerns the whole run, for example workers that cannot start.
            EnvironmentHostsLost: All hosts of a HostPool are lost and cannot be restarted.
        """
        return StepOutput(**await self.pool.call(self, "step", text=text))

    async def close(self) -> None:
        """Queue the environment's `close` and return without waiting for it.

        Errors of `close` are logged. It is safe to call this twice and after a failure.
        """
        self.pool.close_episode(self)

    def fail(self, failure: Exception) -> None:
        """Set the exception that every later call raises, unless the episode has already failed."""
        self.failure = self.failure or failure

    def fail_if_not_replayable(self, cause: str) -> None:
        """Fail the episode with "environment_died" if it has begun and is not replayable.

        Args:
            cause: Why the episode's process or host was lost.
        """
        if self.history and not self.replayable:
            detail = f"{self.env_class} is not replayable, and its process was lost: {cause}"
            self.fail(EnvironmentFailure("environment_died", detail))


class EnvironmentPool(ABC):
    """A pool that runs environments, which may hang or crash. Use it as an async context manager.

    A failure affects one episode: its calls raise EnvironmentFailure with the kind under which the failure is counted.
    If a worker or host is lost, its episodes are rebuilt in another one on their next call, by replaying `start` and
    the recorded texts. Episodes that are not `replayable` fail with "environment_died" instead.
    """

    loop: asyncio.AbstractEventLoop
    log_file: Path | None = None
    """File for the output of environments on this machine; None for stderr."""

    def __init__(self) -> None:
        self.dependents = AsyncExitStack()
        """Resources of the run that use the pool, and are closed before it."""
        self._next_episode_id = 0
        self._closing = False
        self._fatal: ConfigError | None = None
        """Error that every call raises."""
        self._failure_kinds = MetricNameLimit(MAX_FAILURE_KINDS, MAX_KIND_CHARS)

    @abstractmethod
    async def __aenter__(self) -> EnvironmentPool:
        """Start the pool. Raises a SkyRLError, such as ConfigError, if it cannot start."""

    async def __aexit__(self, *exc_info: object) -> None:
        try:
            await self.dependents.aclose()
        finally:
            await self.close()

    @abstractmethod
    async def close(self) -> None:
        """Close all environments, and end or kill the processes that run them."""

    @abstractmethod
    async def send(self, episode: Episode, op: str, frame: bytes) -> dict[str, Any]:
        """Send an encoded call to an episode's environment and return the answer.

        Args:
            episode: Episode of the call.
            op: Name of the call: "start" or "step".
            frame: The encoded call; see `worker.encode_message`.

        Raises:
            EnvironmentFailure: The episode failed.
            SkyRLError: A problem ends the run; see `Episode.step`.
        """

    async def start(self, env_class: str, prompt: Prompt) -> Episode:
        """Start an episode. Its worker constructs the environment with the prompt's extras and calls `init`.

        Args:
            env_class: Name of the environment.
            prompt: Prompt with the messages that `init` receives.

        Raises:
            EnvironmentFailure: The episode failed.
            ConfigError: The environment is unknown or cannot work with its settings.
            EnvironmentHostsLost: All hosts of a HostPool are lost and cannot be restarted.
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
        """Encode a call, send it and return the environment's answer.

        Args:
            episode: Episode of the call.
            op: Name of the call: "start" or "step".
            **arguments: Arguments of the call, which JSON must be able to represent.

        Raises:
            EnvironmentFailure: The episode failed, or JSON cannot represent the arguments (kind "bad_row").
            RuntimeError: The pool was not entered with `async with`.
            SkyRLError: A problem ends the run; see `Episode.step`.
        """
        if not hasattr(self, "loop"):
            raise RuntimeError("the environment pool was not entered; use it in `async with`")
        try:
            frame = encode_message({"op": op, "id": episode.episode_id, **arguments})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:  # never for a text of the model
            raise EnvironmentFailure(
                BAD_ROW, f"the row contains a value that JSON cannot represent: {error}"
            ) from error
        return await self.send(episode, op, frame)

    def close_episode(self, episode: Episode) -> None:
        """Queue the environment's `close` and return without waiting for it; see Episode.close."""
        runner, episode.runner = episode.runner, None
        if runner is not None and not self._closing:
            runner.episodes.discard(episode)
            runner.close_episode(episode)
        episode.history.clear()
        episode.fail(EnvironmentFailure("closed", "the episode is closed"))

    def _raise_if_failed(self, episode: Episode) -> None:
        if self._closing:  # an answer that arrived during `close` can make an episode continue
            raise EnvironmentFailure("host_closed", "the environment pool was closed")
        if (failure := self._fatal or episode.failure) is not None:
            raise failure

    def _failure(self, kind: str, detail: str) -> EnvironmentFailure:
        """Return a failure of the environment's own kind, or of OTHER_FAILURE_KIND if there are too many kinds."""
        if self._failure_kinds.admits(kind):
            return EnvironmentFailure(kind, detail)
        return EnvironmentFailure(OTHER_FAILURE_KIND, f"{kind:.{MAX_KIND_CHARS}}: {detail}")


@dataclass(slots=True, eq=False)
class _PendingCall:
    op: str
    frame: bytes
    episode: Episode
    answer: asyncio.Future[dict[str, Any]] | None = None
    """None if no caller waits for the answer, as for hello, replays and close."""


class WorkerHandle(asyncio.SubprocessProtocol):
    """The pool's end of one worker process. `calls[0]` is the call that the worker is running.

    Args:
        pool: Pool that owns the worker.
        hello: Encoded first call, which configures the worker.
    """

    def __init__(self, pool: WorkerPool, hello: bytes):
        self.pool = pool
        self.calls: deque[_PendingCall] = deque()
        self._sent = 0
        """Number of calls sent so far. A call's number is the value before it was sent."""
        self._last_answered: _PendingCall | None = None
        self.episodes: set[Episode] = set()
        self.call_started_s = pool.loop.time()
        """Time of the event loop's clock at which calls[0] began to run, in seconds."""
        self.exited: asyncio.Future[None] = pool.loop.create_future()
        self.is_lost = False
        self._process: asyncio.SubprocessTransport | None = None
        self._stdin: asyncio.WriteTransport | None = None
        self._outbox: list[bytes] = []
        self._inbox = bytearray()
        self.spawning = pool.loop.create_task(pool.spawn(self))
        self.submit(_PendingCall("hello", hello, Episode(pool, -1, "hello")))  # its episode exists only here

    @property
    def pid(self) -> int | None:
        """Process id of the worker's supervisor, or None until the process has started."""
        return None if self._process is None else self._process.get_pid()

    def submit(self, call: _PendingCall) -> None:
        """Queue a call. Calls are sent and answered in the order in which they are submitted."""
        if not self.calls:
            self.call_started_s = self.pool.loop.time()
        self.calls.append(call)
        if not self._outbox:  # one write for all calls of this iteration of the event loop
            self.pool.loop.call_soon(self._flush)
        self._outbox.append(encode_frame(self._sent, call.frame))
        self._sent += 1

    def _flush(self) -> None:
        if self._stdin is not None and self._outbox and not self.is_lost:
            self._stdin.write(b"".join(self._outbox))
            self._outbox.clear()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the queued calls now that the process has started, or kill it if it was abandoned before."""
        self._process = cast(
            asyncio.SubprocessTransport, transport
        )  # uvloop's transport, in a Ray task, is not a subclass
        self._stdin = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))
        if self.is_lost:
            self.kill()
        self._flush()

    def pipe_data_received(self, fd: int, data: bytes | str) -> None:
        """Read the worker's replies from its output. Abandon the worker if one of them is invalid."""
        assert isinstance(data, bytes)
        if self.is_lost:  # it may continue to write until it is killed
            return
        inbox = self._inbox
        inbox += data
        at = 0
        while not self.is_lost and len(inbox) - at >= HEADER.size:
            size, number = HEADER.unpack_from(inbox, at)
            if size > MAX_FRAME_BYTES or not self.calls or number != self._sent - len(self.calls):
                is_repeated = number == self._sent - len(self.calls) - 1
                failed_call = self._last_answered if is_repeated or not self.calls else None
                self.pool.abandon(self, "environment_died", _NO_ANSWER, failed_call)
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
        if inbox and not self.calls:  # no answer is expected, so these bytes are not the start of one
            self.pool.abandon(self, "environment_died", _NO_ANSWER, self._last_answered)

    def trace_call_end(self, suffix: str = "") -> None:
        """Add a span for the running call, which ends now, to the trace.

        Args:
            suffix: Text after the call's name in the span's name, such as why the call failed.
        """
        if self.calls and self.pid is not None and trace.is_enabled():
            row = f"process {self.pid}"
            trace.add_span(
                f"{self.calls[0].op}{suffix}",
                trace.to_unix_time(self.call_started_s),
                track=row,
                process="environments",
            )

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """Abandon the worker when its output ends."""
        if fd == 1:
            self.pool.abandon(self, "environment_died", "its process ended")

    def process_exited(self) -> None:
        """Kill what is left of the process group after the supervisor's exit, and abandon the worker soon after."""
        self._kill_group()  # has an effect only if the supervisor was killed before it could do this itself
        # a grandchild that left the group can keep the pipe open, so end-of-file may never arrive
        self.pool.loop.call_later(0.5, self.connection_lost, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Abandon the worker and mark it as exited. Called when the process has exited and its answers are read."""
        self.pool.abandon(self, "environment_died", "its process ended")
        if not self.exited.done():
            self.exited.set_result(None)
            assert self._process is not None
            self._process.close()

    def kill(self) -> None:
        """Ask the supervisor to kill the worker and its descendants, without waiting.

        The process group is killed if the supervisor has not exited after KILL_TIMEOUT_S + 1 seconds.
        """
        if self._process is not None and not self.exited.done():
            # the transport's send_signal may reap the process; asyncio would then not find it and log that on stderr
            with contextlib.suppress(ProcessLookupError):
                for number in (signal.SIGTERM, signal.SIGCONT):  # the latter in case the supervisor is stopped
                    if self._process.get_returncode() is None:
                        os.kill(self._process.get_pid(), number)
            self.pool.loop.call_later(KILL_TIMEOUT_S + 1, self._kill_group)

    def _kill_group(self) -> None:
        if self._process is not None and not self.exited.done():
            # the group no longer exists, or (macOS) contains only zombies
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.get_pid(), signal.SIGKILL)

    def close_episode(self, episode: Episode) -> None:
        """Submit the `close` of an episode's environment, which runs after the calls submitted before."""
        self.submit(_PendingCall("close", encode_message({"op": "close", "id": episode.episode_id}), episode))

    def close_input(self) -> None:
        """Send the queued calls and close the worker's input. The worker answers them and then exits."""
        self._flush()
        if self._stdin is not None:
            self._stdin.close()


class WorkerPool(EnvironmentPool):
    """A pool that runs environments in worker processes on this machine, and starts workers as needed.

    The number of workers is at most min(max_env_workers, 2 x cores). The kind of a failure is one of these:

    - the class name of the exception that the environment raised
    - "bad_row": JSON cannot represent the row
    - "bad_reward", "bad_step_output": the environment returned an invalid value
    - "too_large": a message is larger than `worker.MAX_FRAME_BYTES`
    - "timeout": the call ran for longer than `environment_step_s`, and its worker was killed
    - "environment_died": the worker ended during the call
    - "host_closed": the pool was closed

    The deadline counts from when a call begins to run, not from when it is queued. A ConfigError concerns the whole
    run: an unknown environment, a constructor that raises one, or a plugin that cannot be imported. On Linux, all
    workers are killed when the thread that runs the event loop ends.

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
        """Configure the pool. Workers start on the first calls.

        Args:
            env_configs: Settings of each environment, by name.
            max_env_workers: Maximum number of worker processes.
            environment_step_s: Deadline of each call, in seconds.
            plugins: Modules that each worker imports before it runs environments.
            log_file: File for the output of environments. A note on stderr names it. If it is None or its folder does
                not exist, output goes to stderr, up to a limit for each worker.
            registrations: Result of `serialize_user_registrations` in the program that registered environments. If
                None, the registrations of this process.
            module_path: Folders that workers search for modules before those in this process's `sys.path`.
            checks: True if workers call `TextEnv.check` because they do not run on the driver's machine.
        """
        super().__init__()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self.max_env_workers = max(1, min(max_env_workers, 2 * cores))
        self.environment_step_s = environment_step_s
        self.workers: list[WorkerHandle] = []
        """Workers that accept calls."""
        self._plugins = tuple(plugins)
        self.log_file = log_file if log_file is not None and log_file.parent.is_dir() else None
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
        """Workers whose processes may still exist, including abandoned ones."""
        self._watcher: asyncio.Task[None] | None = None

    async def __aenter__(self) -> WorkerPool:
        self.loop = asyncio.get_running_loop()
        self._watcher = asyncio.create_task(self._enforce_deadlines())
        return self

    async def close(self) -> None:
        """Close all environments and end all workers.

        Workers that have not ended after CLOSE_TIMEOUT_S (or `environment_step_s` if it is shorter) are killed. A
        warning is logged if killed workers have not ended after another CLOSE_TIMEOUT_S.
        """
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
        """Send an encoded call to the episode's worker and return the answer. Waits for a free worker if necessary.

        Raises:
            EnvironmentFailure: The episode failed, for example because its worker exceeded a deadline or died.
        """
        self._raise_if_failed(episode)
        answer: asyncio.Future[dict[str, Any]] = self.loop.create_future()
        self._dispatch(_PendingCall(op, frame, episode, answer))
        return await answer

    def handle_reply(self, worker: WorkerHandle, call: _PendingCall, reply: dict[str, Any]) -> None:
        """Process a worker's reply: record it in the episode and wake up the caller that waits for it.

        Args:
            worker: The worker that replied.
            call: The call to which the reply belongs.
            reply: The decoded reply. An error in it ends the episode and is raised to the caller.
        """
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
        """Abandon a worker: kill it, fail the episode of one call, and dispatch its other pending calls again.

        Does nothing if the worker was already abandoned. While the pool is closing, all pending calls fail. If the
        worker was starting, every call of the pool raises ConfigError from then on.

        Args:
            worker: Worker to abandon.
            kind: Failure kind of the episode that fails.
            detail: Why the worker is abandoned.
            failed_call: Call whose episode fails. Default: the call that the worker is running.
        """
        if worker.is_lost:
            return
        worker.is_lost = True
        worker.trace_call_end(f": {kind}")
        worker.kill()
        if worker in self.workers:
            self.workers.remove(worker)
        if self.log_file is not None and not self._closing:
            detail += f" (environments print to {self.log_file})"
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
        """Send a call to its episode's worker. If the episode has no worker, first replay its history in one."""
        episode = call.episode
        worker = episode.runner
        if worker is None:
            worker = episode.runner = self._select_worker()
            worker.episodes.add(episode)
            for index, frame in enumerate(episode.history):
                worker.submit(_PendingCall("step" if index else "start", frame, episode))
        assert isinstance(worker, WorkerHandle)
        worker.submit(call)

    def _select_worker(self) -> WorkerHandle:
        """Return the worker with the fewest calls. Start a worker if all are busy and the limit allows another."""
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
        """Start the process of a worker. `worker` becomes the asyncio protocol that receives the process's output.

        Abandons the worker if the process cannot be started.
        """
        # the driver's sys.path in the same order, so that plugin names refer to the same modules in the worker
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in (*self._module_path, *sys.path)))
        try:
            await self.loop.subprocess_exec(
                lambda: worker,
                *(sys.executable, "-P", "-m", "skyrl_train.environments.worker", str(os.getpid())),
                *([] if self.log_file is None else [str(self.log_file)]),
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
        """Warn once for each environment and kind, because every episode of a run may fail to close."""
        if (env_class, failure.kind) not in self._warned:
            self._warned.add((env_class, failure.kind))
            self._warn(
                f"closing an environment {env_class} failed: {escape_control_chars(redact(str(failure)))} (logged once)"
            )

    async def _enforce_deadlines(self) -> None:
        """Abandon workers whose running call is past its deadline. Runs until it is cancelled."""
        tick = min(0.25, self.environment_step_s / 4)
        before = self.loop.time()
        while True:
            await asyncio.sleep(tick)
            now = self.loop.time()
            late = now - before - tick
            late = late if late > tick else 0.0  # the driver was busy, and answers may have waited to be read
            for worker in list(self.workers):
                worker.call_started_s += late
                if not worker.calls:
                    continue
                timeout_s = START_TIMEOUT_S if worker.calls[0].op == "hello" else self.environment_step_s
                if now - worker.call_started_s > timeout_s:
                    self.abandon(worker, "timeout", f"no answer within {timeout_s:g} s")
            before = now

    def _warn(self, text: str) -> None:
        log.warning("%s", text)


def _validate_reply(op: str, body: bytes | bytearray) -> dict[str, Any]:
    """Parse the reply to a call, and return only the members that replies to that call have.

    Raises ValueError, RecursionError or EnvironmentFailure if the reply is not valid.
    """
    reply = json.loads(body)
    if not isinstance(reply, dict) or find_non_json_value(reply):
        raise ValueError("the reply is not a JSON object")
    if "error" in reply:
        kind, detail = reply["error"], reply.get("detail")
        if not isinstance(kind, str) or not isinstance(detail, str):
            raise ValueError("the error reply is malformed")
        fatal = op == "start" and reply.get("fatal") is True
        return {"error": kind, "detail": detail[:MAX_CONFIG_ERROR_CHARS], "fatal": fatal}
    if op == "step":
        output = validate_step_output(reply)
        return {name: getattr(output, name) for name in StepOutput.__slots__}
    if op == "start":
        metadata, replayable = reply.get("metadata"), reply.get("replayable")
        if not isinstance(metadata, dict) or not isinstance(replayable, bool):
            raise ValueError("the reply to start is malformed")
        return {"messages": validate_messages(reply.get("messages")), "metadata": metadata, "replayable": replayable}
    return {}
