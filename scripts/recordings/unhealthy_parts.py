"""Environments (for `trainer.plugins`) and experiments that make recorded runs unhealthy."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.registry import register
from skyrl_train.environments.tasks.arithmetic import ArithmeticEnv
from skyrl_train.experiment.base import Experiment

SPIKES = (20, 23)
"""Steps, counted from 0, whose rewards are a thousand times as large."""


class SameReward(ArithmeticEnv):
    """An environment in which every answer has the same reward."""

    def step(self, action: str) -> StepOutput:
        return replace(super().step(action), reward=1.0)


class Fours(TextEnv):
    """An environment that rewards the fraction of digits 4, so the policy unlearns the task."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], action.count("4") / max(1, len(action)), done=True)


class EndsInFour(TextEnv):
    """An environment that rewards answers that end in 4, a task other than that of evaluations."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], float(action.endswith("4")), done=True)


class Letters(TextEnv):
    """An environment that rewards the fraction of lower-case letters, which differs between samples of a random model."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], sum(map(str.islower, action)) / max(1, len(action)), done=True)


class Raises(ArithmeticEnv):
    """An environment with a bug that raises an error in 30% of its steps."""

    def step(self, action: str) -> StepOutput:
        if random.random() < 0.3:
            raise ValueError("no such row in the solutions")
        return super().step(action)


for cls in (SameReward, Fours, EndsInFour, Letters, Raises):
    register(cls.__name__.lower(), f"unhealthy_parts:{cls.__name__}")


class WithAlteredGroups(Experiment):
    """An experiment that alters training rollouts before the trainer gets them."""

    def alter(self, group: TrajectoryGroup, position: int) -> None:
        raise NotImplementedError

    def build_generator(self, client: Any, environments: Any, *, evaluation: bool) -> Any:
        generator: Any = super().build_generator(client, environments, evaluation=evaluation)
        if evaluation:
            return generator
        rollout = generator.rollout

        async def altered(prompt: Prompt, position: int) -> TrajectoryGroup:
            group: TrajectoryGroup = await rollout(prompt, position)
            self.alter(group, position)
            return group

        generator.rollout = altered
        return generator


class MisreportedLogprobs(WithAlteredGroups):
    """An experiment whose log-probs are wrong, like those of an engine that ignores the temperature."""

    def alter(self, group: TrajectoryGroup, position: int) -> None:
        for item in group.trajectories:
            item.logprobs = 1.5 * item.logprobs


class Outliers(WithAlteredGroups):
    """An experiment in which the rewards of a few steps are a thousand times as large."""

    def alter(self, group: TrajectoryGroup, position: int) -> None:
        if position // self.config.trainer.train_batch_size in SPIKES:
            for item in group.trajectories:
                item.reward *= 1000.0
