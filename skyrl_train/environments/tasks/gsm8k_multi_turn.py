"""Multi-turn GSM8K. The model gets feedback that its answer is wrong or missing, and may try again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tasks.gsm8k import extract_strict_answer, parse_numeric_ground_truth, score

DEFAULT_MAX_TURNS = 5
"""SkyRL's default, which is used if neither the row nor generator.max_turns sets a number."""


def resolve_max_turns(extras: Mapping[str, Any]) -> int:
    """Return the maximum number of turns of an episode.

    Args:
        extras: Columns of the row. The result is the smaller one of `max_turns`, which defaults to generator.max_turns,
            and `extra_info.max_turns`. It is DEFAULT_MAX_TURNS if neither is set.

    Raises:
        ValueError: The result is below 1.
    """
    info = extras.get("extra_info")
    limits = [extras.get("max_turns"), info.get("max_turns") if isinstance(info, Mapping) else None]
    turns = min((int(limit) for limit in limits if limit is not None), default=DEFAULT_MAX_TURNS)
    if turns < 1:
        raise ValueError(f"max_turns={turns}: an episode has at least one turn")
    return turns


class GSM8KMultiTurnEnv(TextEnv):
    """An environment with up to `max_turns` answers by gsm8k's strict rules. The rewards of all turns sum to at most 1.

    A turn with a wrong number after "####" gives `format_score` / max_turns, where `format_score` is 0.2 by default as
    in SkyRL. A turn without a number, or with different numbers, gives 0. The right number ends the episode and gives
    the remainder to 1, so a successful episode is worth 1 after any number of tries. SkyRL-Gym instead adds 1 to the
    rewards of earlier wrong turns.
    """

    parse_row = staticmethod(parse_numeric_ground_truth)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = self.parse_row(self.extras)
        self.max_turns = resolve_max_turns(self.extras)
        self.format_score = float(self.env_config.get("format_score", 0.2)) / self.max_turns
        self.turns = 0
        self.total_reward = 0.0

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        reward = score(action, self.ground_truth, "strict", self.format_score)
        right = score(action, self.ground_truth, "strict") == 1.0
        reward = 1.0 - self.total_reward if right else reward
        self.total_reward += reward
        done = right or self.turns >= self.max_turns
        observations = [] if done else [{"role": "user", "content": self._feedback(extract_strict_answer(action))}]
        return StepOutput(observations, reward, done, metadata={"turns": self.turns, "acc": float(right)})

    def _feedback(self, answer: str | None) -> str:
        last = " This is your last try." if self.turns == self.max_turns - 1 else ""
        if answer is None:
            return f'There is no single number after "####". Give your final answer in the form "#### NUMBER".{last}'
        return f'{answer:.40} is not right. Check your steps and answer again in the form "#### NUMBER".{last}'
