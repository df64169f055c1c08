r"""Competition problems whose answer is an integer (AIME, DAPO-Math-17k): one turn, "Answer: 204" or \boxed{204}."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders.boxed import boxed_contents
from skyrl_train.environments.tasks.gsm8k import NUMBER, canonical, ground_truth_of

TAIL = 300
"""Number of final characters that are examined, as in SkyRL-Gym: a solution tries many values before it answers."""
MARKED = re.compile(r"answer[*_]{0,2}[ \t]*:([^\n]+)", re.IGNORECASE)
INTEGER = re.compile(r"-?[0-9]+")


class AIMEEnv(TextEnv):
    r"""Rewards the right integer with 1 and anything else with -1, as SkyRL-Gym does; the metric `acc` is the accuracy.

    Only the last 300 characters, after the last "</think>", are examined: the rest of every line after "Answer:" and
    every \boxed{...} that contain a number are answers, and all numbers in all of them must be the same integer. So
    "Answer: 41 or 42", "Answer: 41" and later "Answer: 42", or another number in a box are no answer. 042 equals 42.

    The expected answer is the row's `reward_spec.ground_truth`, or `reward_model.ground_truth` as in DAPO's files.
    """

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        spec = self.extras.get("reward_spec") or self.extras.get("reward_model")
        truth = integer_in([ground_truth_of({"reward_spec": spec})])
        if truth is None:
            raise ValueError(f"ground truth {spec['ground_truth']!r:.80} is not an integer")  # type: ignore[index]
        self.ground_truth = truth

    def step(self, action: str) -> StepOutput:
        pred = final_integer(action)
        right = pred == self.ground_truth
        metadata = {"acc": float(right), "no_answer": float(pred is None), "pred": pred}
        return StepOutput([], 1.0 if right else -1.0, done=True, metadata=metadata)


def final_integer(text: str) -> str | None:
    """The single integer that the end of `text` gives as its answer, or None."""
    tail = text[-TAIL:].rpartition("</think>")[2]
    return integer_in([*MARKED.findall(tail), *boxed_contents(tail)])


def integer_in(answers: list[str]) -> str | None:
    """The integer that is the only number in all `answers`, or None; answers without a number are ignored."""
    if any(c.isnumeric() and not c.isascii() for answer in answers for c in answer):
        return None  # 4², 18½: other values than the ASCII digits alone
    values = {canonical(match) for answer in answers for match in NUMBER.finditer(answer)}
    value = values.pop() if len(values) == 1 else ""
    return value if INTEGER.fullmatch(value) else None
