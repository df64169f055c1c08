"""GSM8K in several turns: a wrong or missing answer is told, and another try is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tasks.gsm8k import ground_truth_of, score, strict_answer

MAX_TURNS = 5
"""SkyRL's, where neither the row nor generator.max_turns says."""


def turns_of(extras: Mapping[str, Any]) -> int:
    """The smallest of a row's `max_turns` (generator.max_turns where it has none) and `extra_info.max_turns`."""
    info = extras.get("extra_info")
    said = [extras.get("max_turns"), info.get("max_turns") if isinstance(info, Mapping) else None]
    turns = min((int(number) for number in said if number is not None), default=MAX_TURNS)
    if turns < 1:
        raise ValueError(f"max_turns={turns}: an episode has at least one turn")
    return turns


class GSM8KMultiTurnEnv(TextEnv):
    """Up to `max_turns` answers by gsm8k's strict rule; the rewards of all turns sum to 1 at most.

    A wrong number after "####" pays `format_score` / max_turns (SkyRL's 0.2 over all turns), no number or several
    differing ones in a turn pay 0. The right number pays what is missing to 1 and ends the episode: getting there is
    worth 1 however many tries it took, where SkyRL-Gym pays 1 on top of what earlier wrong turns earned.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = ground_truth_of(self.extras)
        self.max_turns = turns_of(self.extras)
        self.format_score = float(self.env_config.get("format_score", 0.2)) / self.max_turns
        self.turns = 0
        self.paid = 0.0

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        reward = score(action, self.ground_truth, "strict", self.format_score)
        right = score(action, self.ground_truth, "strict") == 1.0
        reward = 1.0 - self.paid if right else reward
        self.paid += reward
        done = right or self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": self._feedback(strict_answer(action))}]
        return StepOutput(observations, reward, done, metadata={"turns": self.turns, "acc": float(right)})

    def _feedback(self, answer: str | None) -> str:
        last = " This is your last try." if self.turns == self.max_turns - 1 else ""
        if answer is None:
            return f'There is no single number after "####". Give your final answer in the form "#### NUMBER".{last}'
        return f'{answer:.40} is not right. Check your steps and answer again in the form "#### NUMBER".{last}'
