"""Episodes of agents: programs that hold their conversation themselves and call the model through a session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from skyrl_train.agents.rewards import NO_CALL, NO_REWARD, AgentReward
from skyrl_train.agents.runner import NO_CALL_REASON, NO_REWARD_REASON, AgentRunner
from skyrl_train.agents.session import Session, SessionSettings
from skyrl_train.aio import finish_despite_cancellation
from skyrl_train.config.redaction import redact
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import FAILED, Trajectory, TrajectoryGroup
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import EnginesLost, EnvironmentFailure
from skyrl_train.rollouts.conversation import EnvironmentMetrics, EpisodeLimiter

TOO_MANY_TOKENS = "agent_too_many_tokens"


class Generator(Protocol):
    """An object that generates the trajectories of a prompt."""

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """Generate and score the group of a prompt; see `ConversationGenerator.rollout`."""


class EnvironmentDispatcher:
    """A generator that chooses another one by the environment of a prompt.

    Args:
        default: Generator of all other environments.
        by_env_class: Generators by the name of their environment.
    """

    def __init__(self, default: Generator, by_env_class: Mapping[str, Generator]):
        self._default, self._by_env_class = default, dict(by_env_class)

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """Generate and score the group of a prompt."""
        return await self._by_env_class.get(prompt.env_class, self._default).rollout(prompt, position)


class AgentGenerator:
    """Generates the trajectories of a prompt whose episodes are runs of an agent.

    An episode that fails becomes a failed trajectory, which is masked and counted under one of these kinds:

    - "engine", "deadline": the engine failed, or the calls ran for too long
    - "agent_too_many_tokens": the agent asked for more calls or tokens than the limits allow
    - "agent_crashed": the command's exit code is not 0, or the coroutine raised
    - "agent_timeout": the agent was killed at its time limit, or it blocked the event loop
    - "agent_no_call": the agent never called the model
    - "agent_no_reward": nothing gave a reward
    - "agent_sandbox": the sandbox failed
    - "grader_crashed", "grader_timeout", "bad_reward", or a kind of the environment that computes the reward
    """

    def __init__(
        self,
        runner: AgentRunner,
        settings: SessionSettings,
        *,
        client: EngineClient,
        num_samples: Callable[[Prompt], int],
        limiter: EpisodeLimiter | None = None,
    ):
        """Create the generator.

        Args:
            runner: Runs the agents.
            settings: The settings of the sessions.
            client: The client of the engines.
            num_samples: Returns the number of episodes of a prompt.
            limiter: Limits the number of concurrent episodes; None for no limit.
        """
        self._runner = runner
        self._settings = settings
        self._client = client
        self._num_samples = num_samples
        self._limiter = limiter or EpisodeLimiter()
        self._metrics = EnvironmentMetrics()

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        """Run the agent for all samples of a prompt, concurrently, and score the runs.

        When the call ends, also by an error or cancellation, all processes of its agents have ended, and its sessions
        are closed.

        Args:
            prompt: The prompt.
            position: Its position in the run's order of prompts, which makes seeds differ between epochs.

        Returns:
            The group with `num_samples(prompt)` trajectories. Episodes that failed have status `failed`.

        Raises:
            EnginesLost: No engine is left.
            ConfigError: The agent, its sandbox or the server of the sessions cannot be used.
        """
        samples = self._num_samples(prompt)
        await self._runner.started()
        await self._limiter.admit(samples)
        tasks = [asyncio.create_task(self._run_episode(prompt, sample, position)) for sample in range(samples)]
        try:
            return TrajectoryGroup(prompt, list(await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()
            try:
                await asyncio.gather(*tasks, return_exceptions=True)
            finally:
                self._limiter.release(samples)

    async def _run_episode(self, prompt: Prompt, sample: int, position: int) -> Trajectory:
        server = self._runner.server
        failure: EnvironmentFailure | None = None
        reward: AgentReward | None = None
        session = server.open(prompt, sample=sample, position=position, settings=self._settings)
        async with self._client.episode():
            try:
                reward = await self._runner.run(session, prompt)
            except EnvironmentFailure as caught:
                failure = caught
            finally:
                await finish_despite_cancellation(server.close(session))
        # Log-probs are undefined at temperature 0, so those of greedy rollouts are computed at temperature 1.
        item = session.trajectory(prompt, sample, self._settings.sampling_params.temperature or 1.0)
        _raise_if_fatal(session)
        failure = _find_cause(session, failure)
        if failure is None and reward is None and item.status != FAILED:
            try:
                reward = await self._runner.score(prompt, item.messages)
            except EnvironmentFailure as caught:
                failure = caught
            if reward is None and session.reward is not None:
                reward = AgentReward(session.reward)
        if failure is None and reward is None:
            failure = EnvironmentFailure(NO_REWARD, NO_REWARD_REASON)
        if item.status != FAILED and failure is not None:
            item.fail(failure.kind, redact(failure.detail))
        if item.status != FAILED and reward is not None:
            self._set_reward(item, reward)
        return item

    def _set_reward(self, item: Trajectory, reward: AgentReward) -> None:
        item.reward = reward.reward
        item.turns[-1] = replace(item.turns[-1], reward=reward.reward)
        item.env_metrics |= self._metrics.select(reward.metrics, item.prompt.env_class)


def _raise_if_fatal(session: Session) -> None:
    error = session.failure.error if session.failure is not None else None
    if isinstance(error, EnginesLost):
        raise error  # every later call would fail in the same way


def _find_cause(session: Session, failure: EnvironmentFailure | None) -> EnvironmentFailure | None:
    """Return the failure of an episode: the session's, from which that of the agent may follow, or the agent's own."""
    if session.failure is not None:
        return EnvironmentFailure(session.failure.kind, session.failure.detail)
    if session.is_over_limit:
        detail = f"it was refused a call after {session.statistics.calls} calls"
        return EnvironmentFailure(TOO_MANY_TOKENS, detail if failure is None else f"{detail}; then {failure}")
    if failure is None and session.statistics.calls == 0:
        return EnvironmentFailure(NO_CALL, NO_CALL_REASON)
    return failure
