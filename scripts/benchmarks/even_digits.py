"""Plugin of measured runs (`trainer.plugins`): an environment whose reward needs no reference answers."""

from __future__ import annotations

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.registry import register


def even_share(text: str) -> float:
    """Return the fraction of even digits in a text, a reward that differs between samples of a prompt."""
    return sum(character in "02468" for character in text) / max(1, len(text))


class EvenDigits(TextEnv):
    """A single-turn environment whose reward is `even_share`."""

    def step(self, action: str) -> StepOutput:
        return StepOutput([], even_share(action), done=True)


register("even_digits", "even_digits:EvenDigits")
