"""For `trainer.plugins` of a measured run: an environment that needs no answers."""

from __future__ import annotations

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.registry import register


def even_share(text: str) -> float:
    """The reward: how much of a text is even digits. Samples of a prompt differ in it."""
    return sum(character in "02468" for character in text) / max(1, len(text))


class EvenDigits(TextEnv):
    """One turn, rewarded by `even_share`."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], even_share(action), done=True)


register("even_digits", "even_digits:EvenDigits")
