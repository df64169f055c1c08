"""Runs of agents: a command in a sandbox or a coroutine in a worker process, with the reward of each run."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.agents.agent_session import AgentSession
from skyrl_train.agents.commands import CommandResult
from skyrl_train.agents.coroutine_worker import CRASHED
from skyrl_train.agents.coroutines import TIMEOUT, CoroutinePool
from skyrl_train.agents.rewards import (
    NO_CALL,
    NO_REWARD,
    AgentReward,
    describe_end,
    describe_exit,
    grade,
    has_raised,
    lacks_reward_line,
    last_line,
    parse_reward,
)
from skyrl_train.agents.sandboxes import COPY_TIMEOUT_S, SANDBOX_FAILURE, START_TIMEOUT_S, AgentSandbox, make_sandbox
from skyrl_train.agents.server import SessionServer
from skyrl_train.agents.session import Session
from skyrl_train.aio import finish_despite_cancellation
from skyrl_train.config.redaction import redact
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.environments.base import BAD_ROW
from skyrl_train.environments.placeholders import PlaceholderValues, expand, prompt_text
from skyrl_train.environments.pool import EnvironmentPool
from skyrl_train.environments.tasks.agent import LISTENER, AgentEnv
from skyrl_train.errors import EnvironmentFailure, SkyRLError
from skyrl_train.rollouts.conversation import finite_numbers
from skyrl_train.terminal import escape_control_chars

T = TypeVar("T")
log = logging.getLogger(__name__)

API_KEY = "session"
"""Key for clients that require one. The session's URL is the secret."""
CONVERSATION = "conversation"
"""Key of the agent's messages in the extras that a reward function reads."""
NO_CALL_REASON = "it ended without a call of the model at its base URL"
NO_REWARD_REASON = "neither the agent nor a grader gave a reward"
SANDBOX_GRACE_S = 120.0
"""Seconds after its own time limit at which a call of a sandbox is cancelled."""


class AgentRunner:
    """Runs the agent that the settings name, once per session. Training and evaluation share it.

    It starts nothing before the first run. Close it at the end.

    Args:
        settings: The section `environment.skyrl_gym.agent`.
        server: Server of the sessions, which this starts and stops.
        model_name: Name of the model for clients.
        environments: Runs registered reward functions.
        max_workers: Maximum number of worker processes for coroutines.
        plugins: Modules that the workers import.
        log_file: File for the output of coroutines; None for stderr.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        server: SessionServer,
        *,
        model_name: str,
        environments: EnvironmentPool,
        max_workers: int = 1,
        plugins: tuple[str, ...] = (),
        log_file: Path | None = None,
    ):
        self.server = server
        self._settings = settings
        self._model_name = model_name
        self._environments = environments
        self._commands = asyncio.Semaphore(settings["max_concurrent_commands"])
        self._pool = (
            CoroutinePool(
                settings["run"],
                max_workers=max_workers,
                python=settings["python"],
                plugins=plugins,
                log_file=log_file,
            )
            if settings["run"]
            else None
        )
        self._max_command_s = max(settings["timeout_s"], settings["grader_timeout_s"])
        self._shown: set[str] = set()
        """Cases that may be mistakes of graders or agents, and that were logged once."""
        self._stack = AsyncExitStack()
        self._start: asyncio.Task[None] | None = None

    async def started(self) -> None:
        """Start the server, unless it is started.

        Raises:
            ConfigError: The server cannot listen at its address.
        """
        if self._start is None:
            self._start = asyncio.create_task(self._enter())
        await asyncio.shield(self._start)

    async def _enter(self) -> None:
        try:
            await self._stack.enter_async_context(self.server)
        except OSError as error:
            raise LISTENER.address_error(self._settings["host"], self._settings["port"], error) from error

    async def close(self) -> None:
        """End all workers and the server."""
        if self._pool is not None:
            await self._pool.close()
        if self._start is not None:
            await asyncio.wait([self._start])
        await self._stack.aclose()

    async def run(self, session: Session, prompt: Prompt) -> AgentReward | None:
        """Run the agent and its grader, and close the session between them.

        Returns:
            The reward that the coroutine returned or the grader gave; None if there is neither.

        Raises:
            EnvironmentFailure: The agent or the grader failed. Nothing that they started is left.
            ConfigError: The agent or its sandbox cannot be used at all.
        """
        if self._pool is not None:
            return await self._run_coroutine(self._pool, session, prompt)
        async with self._commands:
            values = self._values(session, prompt)
            try:
                sandbox = make_sandbox(self._settings["sandbox"], values, self._max_command_s + 4 * SANDBOX_GRACE_S)
                files = AgentEnv.parse_row(prompt.env_extras)
            except SkyRLError:
                raise
            except (KeyError, ValueError) as error:  # rows of files are checked when they are loaded
                raise EnvironmentFailure(BAD_ROW, f"{type(error).__name__}: {error}") from error
            except Exception as error:  # of the constructor of a user's class
                raise EnvironmentFailure(SANDBOX_FAILURE, f"{type(error).__name__}: {error}") from error
            try:
                return await self._run_command(sandbox, session, values, files)
            except SkyRLError:
                raise
            except Exception as error:  # also of a user's sandbox
                raise EnvironmentFailure(SANDBOX_FAILURE, f"{type(error).__name__}: {error}") from error
            finally:
                await finish_despite_cancellation(_stop(sandbox))

    async def _run_coroutine(self, pool: CoroutinePool, session: Session, prompt: Prompt) -> AgentReward | None:
        row = {**prompt.env_extras, "prompt": prompt.messages, "uid": prompt.uid}
        result = await pool.run(
            AgentSession(session.base_url, API_KEY, self._model_name), row, self._settings["timeout_s"]
        )
        if result is None:
            return None
        reward = parse_reward(result, "the value that the agent returned")
        self._show_dropped_metric(reward, prompt.uid)
        return reward

    async def _run_command(
        self,
        sandbox: AgentSandbox,
        session: Session,
        values: PlaceholderValues,
        files: Mapping[str, Mapping[str, str]],
    ) -> AgentReward | None:
        settings = self._settings
        await _limit("start", START_TIMEOUT_S, sandbox.start())
        await _upload(sandbox, files["files"])
        variables = _to_text({**_session_variables(session), **expand(settings["env"], values)})
        result = await self._exec(sandbox, settings["command"], values, variables, settings["timeout_s"])
        await self.server.close(session)
        if result.timed_out:
            reason = f"it did not end within {settings['timeout_s']:g} s"
            raise EnvironmentFailure(TIMEOUT, describe_end(reason, result))
        if result.returncode:
            raise EnvironmentFailure(CRASHED, describe_exit(result))
        if session.statistics.calls == 0:
            raise EnvironmentFailure(NO_CALL, describe_end(NO_CALL_REASON, result))
        if not settings["grader"]:
            if session.reward is None and not settings["reward"]:
                raise EnvironmentFailure(NO_REWARD, describe_end(NO_REWARD_REASON, result))
            return None
        await _upload(sandbox, files["grader_files"])
        timeout_s = settings["grader_timeout_s"]
        variables = _to_text(expand(settings["env"], values))
        result = await self._exec(sandbox, settings["grader"], values, variables, timeout_s)
        reward = grade(result, timeout_s)
        if has_raised(result):
            advice = "If the grader itself is at fault, let it exit with a code other than 0 and 1: that is a failure."
            self._show_grader("raised", describe_exit(result), reward, values.uid, advice)
        elif lacks_reward_line(result):
            what = "printed a last line that is neither a number nor a JSON object, so its exit code counts"
            self._show_grader(what, f"{last_line(result.stdout):.200}", reward, values.uid)
        self._show_dropped_metric(reward, values.uid)
        return reward

    def _show_grader(self, what: str, detail: str, reward: AgentReward, uid: str, advice: str = "") -> None:
        text = f"The grader of prompt {uid} {what}, and the reward is {reward.reward:g}: {detail}"
        self._show_first(what, text, advice)

    def _show_dropped_metric(self, reward: AgentReward, uid: str) -> None:
        numbers = finite_numbers(reward.metrics)
        if dropped := next((name for name in reward.metrics if name not in numbers), None):
            value = f"{reward.metrics[dropped]!r:.80}"
            advice = "Give numbers only. What else is worth keeping can be printed."
            text = f"Prompt {uid} has the value {value} for {dropped:.80} beside its reward, which is no metric"
            self._show_first("dropped", text, advice)

    def _show_first(self, case: str, text: str, advice: str) -> None:
        """Log the first of the cases that may be a mistake, but are no failure."""
        if case not in self._shown:
            self._shown.add(case)
            text = escape_control_chars(redact(text))
            log.warning("%s. Further cases are not shown. %s", text, advice)

    async def _exec(
        self,
        sandbox: AgentSandbox,
        command: list[str],
        values: PlaceholderValues,
        variables: Mapping[str, str],
        timeout_s: float,
    ) -> CommandResult:
        argv = expand(list(command), values)
        call = sandbox.exec(
            argv, env=variables, timeout_s=timeout_s, max_output_bytes=self._settings["max_output_bytes"]
        )
        return await _limit("exec", timeout_s, call)

    def _values(self, session: Session, prompt: Prompt) -> PlaceholderValues:
        return PlaceholderValues(session.base_url, self._model_name, prompt_text(prompt), prompt.uid, prompt.env_extras)

    async def score(self, prompt: Prompt, messages: list[Message]) -> AgentReward | None:
        """Return the reward of the registered reward function; None if the settings name none.

        Args:
            prompt: The row.
            messages: The agent's messages. The function reads the text of the last one as the response, and all of them
                as `extras["conversation"]`.

        Raises:
            EnvironmentFailure: The function failed.
        """
        name = self._settings["reward"]
        if not name:
            return None
        extras = {**prompt.env_extras, CONVERSATION: messages}
        response = str(messages[-1].get("content") or "") if messages else ""
        episode = await self._environments.start(name, replace(prompt, env_class=name, env_extras=extras))
        try:
            output = await episode.step(response)
        finally:
            await episode.close()
        if not output.done:
            raise EnvironmentFailure(
                "bad_step_output", f"environment {name} did not end after the agent's final message"
            )
        return AgentReward(output.reward, output.metadata)


def _session_variables(session: Session) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": session.base_url,
        "OPENAI_API_BASE": session.base_url,
        "OPENAI_API_KEY": API_KEY,
        "ANTHROPIC_BASE_URL": session.anthropic_base_url,
        "ANTHROPIC_API_KEY": API_KEY,
    }


def _to_text(variables: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items() if value is not None}


async def _upload(sandbox: AgentSandbox, files: Mapping[str, str]) -> None:
    if files:
        contents = {os.path.normpath(path): text.encode() for path, text in files.items()}
        await _limit("upload", COPY_TIMEOUT_S, sandbox.upload(contents))


async def _limit(method: str, seconds: float, call: Awaitable[T]) -> T:
    """Return the result of a sandbox's method, which a user's class may never end."""
    seconds += SANDBOX_GRACE_S
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call
    except TimeoutError as error:
        if limit.expired():
            reason = f"its method {method} did not end within {seconds:g} s"
            raise EnvironmentFailure(SANDBOX_FAILURE, reason) from error
        raise


async def _stop(sandbox: AgentSandbox) -> None:
    try:
        await _limit("stop", COPY_TIMEOUT_S, sandbox.stop())
    except Exception as error:  # of a user's class; the episode has its result already
        log.warning("A sandbox of an agent could not be stopped: %s: %s", type(error).__name__, error)
