"""Single-turn answers without a reward from the environment, for runs with a reward model."""

from __future__ import annotations

from skyrl_train.environments.base import StepOutput, TextEnv


class ChatEnv(TextEnv):
    """A single-turn environment with reward 0. The reward model of `trainer.reward` adds the answer's score."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], 0.0, done=True)
