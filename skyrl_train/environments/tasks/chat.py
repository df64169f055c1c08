"""One answer to whatever the row asks, without a reward of its own: for runs that a reward model judges."""

from __future__ import annotations

from skyrl_train.environments.base import StepOutput, TextEnv


class ChatEnv(TextEnv):
    """One turn, reward 0; `trainer.reward` adds what the answer is worth."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], 0.0, done=True)
