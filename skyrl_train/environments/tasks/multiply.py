r"""Multi-turn multiplication, SkyRL's example of an environment. The answer is the number in \boxed{...}."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders.boxed import extract_boxed_answer
from skyrl_train.environments.graders.numbers import parse_number
from skyrl_train.environments.tasks.arithmetic import assign_split
from skyrl_train.environments.tasks.gsm8k import parse_numeric_ground_truth
from skyrl_train.environments.tasks.gsm8k_multi_turn import resolve_max_turns
from skyrl_train.errors import ConfigError

INSTRUCTION = r"Multiply the two numbers step by step and put the final answer in \boxed{}."


class MultiplyEnv(TextEnv):
    r"""An environment with up to `max_turns` answers, of which the last one is rewarded.

    The reward is 1 for the right number and `format_score` (0.5 by default) for another number. The answer is the
    content of \boxed{...} in the turn's final answer (`boxed.extract_boxed_answer`). It gives 0 if there is no box, if
    several boxes differ, or if the content is not a number. The right number ends the episode. After any other answer
    the model gets feedback, until it has used all turns.
    """

    parse_row = staticmethod(parse_numeric_ground_truth)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = parse_number(self.parse_row(self.extras))
        self.max_turns = resolve_max_turns(self.extras)
        self.format_score = float(self.env_config.get("format_score", 0.5))
        self.turns = 0

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        answer = parse_number(extract_boxed_answer(action) or "")
        right = answer == self.ground_truth
        metadata = {"turns": self.turns, "acc": float(right), "parsed_answer": answer and answer[:40]}
        if right or self.turns >= self.max_turns:
            reward = 1.0 if right else self.format_score if answer is not None else 0.0
            return StepOutput([], reward, done=True, metadata=metadata)
        feedback = r"Please provide your answer as one number in the format \boxed{your_answer}."
        if answer is not None:
            feedback = f"Your answer '{answer:.40}' is incorrect. Please try again."
        return StepOutput([{"role": "user", "content": feedback}], 0.0, done=False, metadata=metadata)


def generate(count: int, digits: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Generate different problems as rows in SkyRL's format. Equal arguments give equal rows.

    Args:
        count: Number of rows.
        digits: Number of digits of each factor, 1 to 12.
        seed: Seed of the random generator.
        split: "train" or "validation". The splits are disjoint for all seeds; see `arithmetic.assign_split`.

    Raises:
        ConfigError: `digits` or `split` is out of range, or there are too few different problems.
    """
    if not 1 <= digits <= 12:
        raise ConfigError(f"multiply: digits={digits} must be from 1 to 12.")
    if split not in ("train", "validation"):
        raise ConfigError(f"multiply: split={split!r} is not 'train' or 'validation'.")
    rng = random.Random(f"multiply {seed} {digits} {split}")
    rows: dict[str, dict[str, Any]] = {}
    misses = 0
    while len(rows) < count:
        a, b = (rng.randint(10 ** (digits - 1), 10**digits - 1) for _ in range(2))
        expression = f"{a}*{b}"
        if assign_split(expression) != split or expression in rows:
            misses += 1
            if misses > 1000:
                raise ConfigError(
                    f"multiply: found only {len(rows)} {split} problems of count={count} with digits={digits}. Lower "
                    "count, or increase digits."
                )
            continue
        misses = 0
        rows[expression] = {
            "data_source": "multiply",
            "prompt": [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": f"{a} * {b}"}],
            "env_class": "multiply",
            "reward_spec": {"method": "rule", "ground_truth": str(a * b)},
            "extra_info": {"split": split, "index": len(rows), "digits": digits},
        }
    return list(rows.values())
