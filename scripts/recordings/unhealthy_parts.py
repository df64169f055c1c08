"""What makes recorded runs ill: environments, for `trainer.plugins`, and experiments with one part of their own."""

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
"""0-based steps with a reward a thousand times as large."""


class SameReward(ArithmeticEnv):
    """Every answer is as good as any other."""

    def step(self, action: str) -> StepOutput:
        return replace(super().step(action), reward=1.0)


class Fours(TextEnv):
    """The share of the answer that is the digit 4: a reward that is met by forgetting the task."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], action.count("4") / max(1, len(action)), done=True)


class EndsInFour(TextEnv):
    """Whether the answer does, right or wrong: a reward of another task than evaluations have."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], float(action.endswith("4")), done=True)


class Letters(TextEnv):
    """The share of lower-case letters, which differs between samples of a model that knows nothing."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], sum(map(str.islower, action)) / max(1, len(action)), done=True)


class Raises(ArithmeticEnv):
    """A bug that three episodes in ten run into."""

    def step(self, action: str) -> StepOutput:
        if random.random() < 0.3:
            raise ValueError("no such row in the solutions")
        return super().step(action)


for cls in (SameReward, Fours, EndsInFour, Letters, Raises):
    register(cls.__name__.lower(), f"unhealthy_parts:{cls.__name__}")


class WithAlteredGroups(Experiment):
    """An experiment whose training rollouts are altered before the trainer sees them."""

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
    """Log-probs of another temperature than that of the samples, as engines report that forget to scale them."""

    def alter(self, group: TrajectoryGroup, position: int) -> None:
        for item in group.trajectories:
            item.logprobs = 1.5 * item.logprobs


class Outliers(WithAlteredGroups):
    """A few rewards are in another unit."""

    def alter(self, group: TrajectoryGroup, position: int) -> None:
        if position // self.config.trainer.train_batch_size in SPIKES:
            for item in group.trajectories:
                item.reward *= 1000.0
