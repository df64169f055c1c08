"""One answer to the row's prompt, without a reward of its own: for runs with a reward model."""

from __future__ import annotations

from skyrl_train.environments.base import StepOutput, TextEnv


class ChatEnv(TextEnv):
    """One turn with reward 0; the reward model of `trainer.reward` adds the answer's score."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], 0.0, done=True)
