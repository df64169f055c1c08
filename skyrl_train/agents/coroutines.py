"""Agents that are coroutines: a pool of supervised worker processes, each with an event loop for many agents."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyrl_train.agents import coroutine_worker
from skyrl_train.agents.agent_session import AgentSession
from skyrl_train.agents.coroutine_worker import BLOCKED, CRASHED
from skyrl_train.aio import finish_despite_cancellation, mark_exception_retrieved
from skyrl_train.environments.base import BAD_ROW
from skyrl_train.environments.process_supervisor import KILL_TIMEOUT_S
from skyrl_train.environments.tasks.agent import interpreter_command, interpreter_path
from skyrl_train.environments.user_registrations import serialize_user_registrations
from skyrl_train.environments.worker import HEADER, MAX_FRAME_BYTES, encode_frame, encode_message
from skyrl_train.errors import ConfigError, EnvironmentFailure

log = logging.getLogger(__name__)

TIMEOUT = "agent_timeout"
MAX_BLOCKED_S = 10.0
"""Seconds for which an agent may block the event loop that it shares with others."""
CANCEL_TIMEOUT_S = 5.0
"""Seconds that an agent has to end after it was cancelled at its time limit."""
START_TIMEOUT_S = 120.0


class CoroutinePool:
    """A pool of worker processes that run one coroutine function with many sessions and rows.

    A worker is started when all others run at least as many agents as there are workers. When an agent blocks the event
    loop, or does not end after it was cancelled, its worker is killed, and the other agents of that worker fail, too.

    Args:
        name: Name of the coroutine function; see `agent_registry.find_agent`.
        python: Interpreter of the workers; None for this one. Another one imports no plugins.
        max_workers: Maximum number of worker processes.
        plugins: Modules that each worker imports.
        log_file: File for the output of agents; None for stderr.
        max_blocked_s: Seconds for which an agent may block its event loop.
    """

    def __init__(
        self,
        name: str,
        *,
        max_workers: int,
        python: str | None = None,
        plugins: Sequence[str] = (),
        log_file: Path | None = None,
        max_blocked_s: float = MAX_BLOCKED_S,
    ):
        self.name = name
        self.workers: list[_Worker] = []
        self._max_workers = max(1, max_workers)
        self._log_file = log_file if log_file is not None and log_file.parent.is_dir() else None
        self._python = python
        self._hello = encode_message(
            {
                "name": name,
                "plugins": [] if python else list(plugins),
                "own": [] if python else serialize_user_registrations(),
                "pythonpath": os.environ.get("PYTHONPATH"),
                "max_blocked_s": max_blocked_s,
            }
        )

    async def run(self, session: AgentSession, row: Mapping[str, Any], timeout_s: float) -> Any:
        """Run the agent and return the value that it returned, which JSON can represent.

        Args:
            session: The session of the episode.
            row: The row of the data.
            timeout_s: Seconds after which the agent is cancelled.

        Raises:
            EnvironmentFailure: The agent raised (kind "agent_crashed"), took too long or blocked its event loop
                ("agent_timeout"), its worker died ("agent_crashed"), or JSON cannot represent the row ("bad_row").
            ConfigError: The worker cannot import the agent.
        """
        try:
            call = encode_message({"op": "run", "name": self.name, "session": asdict(session), "row": row})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise EnvironmentFailure(
                BAD_ROW, f"the row contains a value that JSON cannot represent: {error}"
            ) from error
        worker = self._select()
        number, answer = worker.submit(call)
        try:
            await asyncio.shield(worker.started)  # other agents wait for it, too
            try:
                async with asyncio.timeout(timeout_s):
                    return await asyncio.shield(answer)
            except TimeoutError:
                raise EnvironmentFailure(TIMEOUT, f"it did not end within {timeout_s:g} s") from None
        finally:
            if not answer.done():
                await finish_despite_cancellation(self._cancel(worker, number, answer))
            mark_exception_retrieved(answer)

    async def close(self) -> None:
        """Kill all workers."""
        workers, self.workers = self.workers, []
        await asyncio.gather(*(worker.kill("the run has ended") for worker in workers))

    def _select(self) -> _Worker:
        """Return the worker with the fewest agents, or a new one."""
        self.workers = [worker for worker in self.workers if not worker.is_lost]
        best = min(self.workers, key=lambda worker: len(worker.answers), default=None)
        if best is not None and (len(self.workers) >= self._max_workers or len(best.answers) < len(self.workers)):
            return best
        worker = _Worker(self._hello, self._log_file, self._python)
        self.workers.append(worker)
        return worker

    async def _cancel(self, worker: _Worker, number: int, answer: asyncio.Future[Any]) -> None:
        worker.send(number, encode_message({"op": "cancel"}))
        if not worker.started.done():
            return  # it handles the call after its start, which may take long
        await asyncio.wait([answer], timeout=CANCEL_TIMEOUT_S)
        if not answer.done():
            await worker.kill("another agent in its process did not end after it was cancelled")


class _Worker:
    """The driver's end of one worker process."""

    def __init__(self, hello: bytes, log_file: Path | None, python: str | None):
        loop = asyncio.get_running_loop()
        self.answers: dict[int, asyncio.Future[Any]] = {}
        """Futures of the agents that run, by the number of their call."""
        self.is_lost = False
        self.started: asyncio.Future[None] = mark_exception_retrieved(loop.create_future())
        self._next = 1
        self._outbox = [encode_frame(0, hello)]
        self._process: asyncio.subprocess.Process | None = None
        self._reason = "its process ended"
        self._log_file, self._python = log_file and str(log_file), python
        self._serving = asyncio.create_task(self._serve())

    @property
    def pid(self) -> int | None:
        """Process id of the worker's supervisor; None until the process has started."""
        return None if self._process is None else self._process.pid

    def submit(self, call: bytes) -> tuple[int, asyncio.Future[Any]]:
        """Send an encoded call, and return its number and the future of its answer."""
        number, self._next = self._next, self._next + 1
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.answers[number] = answer
        answer.add_done_callback(lambda _: self.answers.pop(number, None))
        self.send(number, call)
        return number, answer

    def send(self, number: int, call: bytes) -> None:
        """Send an encoded call without waiting."""
        frame = encode_frame(number, call)
        if self._process is None:
            self._outbox.append(frame)
        elif self._process.stdin is not None and not self._process.stdin.is_closing():
            self._process.stdin.write(frame)

    async def kill(self, reason: str) -> None:
        """Kill the process with all processes that it started. Its agents fail with `reason`."""
        self.is_lost, self._reason = True, reason
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                for number in (signal.SIGTERM, signal.SIGCONT):
                    process.send_signal(number)
            try:
                async with asyncio.timeout(KILL_TIMEOUT_S + 1):
                    await process.wait()
            except TimeoutError:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
        await asyncio.wait([self._serving])

    async def _serve(self) -> None:
        """Start the process and read its answers until it ends. Then all agents without an answer fail."""
        try:
            if not self.is_lost:
                await self._start()
            if not self.is_lost:  # it may have been killed before its process id was known
                await self._read()
        except TimeoutError:
            self._reason = f"its process did not start within {START_TIMEOUT_S:g} s; its module may block when imported"
        except Exception as error:
            self._reason = f"its process cannot be used: {type(error).__name__}: {error}"
        finally:
            self.is_lost = True
            await self._end()

    async def _start(self) -> None:
        path = os.pathsep.join(dict.fromkeys(entry or os.getcwd() for entry in sys.path))
        module, arguments = coroutine_worker.__name__, [str(os.getpid()), *([self._log_file] if self._log_file else [])]
        command = [sys.executable, "-P", "-m", module, *arguments]
        if self._python is not None:
            path = interpreter_path()
            command = interpreter_command(self._python, f"from {module} import main; main()", *arguments)
        self._process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(b"".join(self._outbox))

    async def _read(self) -> None:
        if self._process is None:
            return
        assert self._process.stdout is not None
        deadline: float | None = START_TIMEOUT_S
        while True:
            try:
                async with asyncio.timeout(deadline):
                    size, number = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
                    if size > MAX_FRAME_BYTES:
                        raise ValueError(f"it sent a message of {size} bytes")
                    reply = json.loads(await self._process.stdout.readexactly(size))
            except asyncio.IncompleteReadError:
                return
            deadline = None
            if number == 0:
                if "error" in reply:
                    self.started.set_exception(
                        ConfigError(f"environment.skyrl_gym.agent.run cannot be used in its process: {reply['detail']}")
                    )
                    return
                self.started.set_result(None)
            elif (answer := self.answers.get(number)) is not None and not answer.done():
                _set_answer(answer, reply)

    async def _end(self) -> None:
        process = self._process
        if process is not None and process.returncode is None:
            with suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
        if process is not None and process.returncode is not None and process.returncode < 0:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        failure = EnvironmentFailure(CRASHED, self._reason)
        if not self.started.done():
            self.started.set_exception(failure)
        for answer in list(self.answers.values()):
            if not answer.done():
                answer.set_exception(failure)


def _set_answer(answer: asyncio.Future[Any], reply: Mapping[str, Any]) -> None:
    if "error" not in reply:
        answer.set_result(reply.get("result"))
        return
    kind = TIMEOUT if reply["error"] == BLOCKED else CRASHED
    answer.set_exception(EnvironmentFailure(kind, str(reply.get("detail", ""))))
