r"""Competition problems whose answer is an integer (AIME, DAPO-Math-17k): one turn, "Answer: 204" or \boxed{204}."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_train.data import reasoning
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders.boxed import iter_boxed
from skyrl_train.environments.graders.numbers import parse_fraction, parse_number
from skyrl_train.environments.tasks.gsm8k import parse_ground_truth

MAX_TAIL_CHARS = 300
"""Number of final characters that are examined, as in SkyRL-Gym: a solution tries many values before it answers."""
ANSWER_LINE = re.compile(r"answer[*_]{0,2}[ \t]*:([^\n]+)", re.IGNORECASE)


class AIMEEnv(TextEnv):
    r"""Rewards the right number with 1 and anything else with -1, as SkyRL-Gym does; the metric `acc` is the accuracy.

    Only the last 300 characters of the final answer (`reasoning.final_answer`) are examined: the rest of every line
    after "Answer:" and every \boxed{...} that have digits are answers. Each must be a number and nothing else (see
    graders/numbers.py), and all must be the same. So "Answer: 41 or 42", "Answer: not 42", "Answer: 41" and later
    "Answer: 42", or another number in a box are no answer. 042 equals 42. If the expected answer is a fraction, answers
    are fractions: \frac{2}{4} equals 1/2.

    The expected answer is the row's `reward_spec.ground_truth`, or `reward_model.ground_truth` as in DAPO's files.
    """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[Callable[[str], Any], Any]:
        """Return how answers are read, and the expected one."""
        spec = extras.get("reward_spec") or extras.get("reward_model")
        if (
            isinstance(spec, Mapping) and type(truth := spec.get("ground_truth")) is int
        ):  # as some files of AIME have it
            spec = {"ground_truth": str(truth)}
        text = parse_ground_truth({"reward_spec": spec})
        read: Callable[[str], Any] = parse_number if parse_number(text) is not None else parse_fraction
        if read(text) is None:
            raise ValueError(f"ground truth {text!r:.80} is neither a number nor a fraction")
        return read, read(text)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.parse_answer, self.ground_truth = self.parse_row(self.extras)

    def step(self, action: str) -> StepOutput:
        pred = extract_answer(action, self.parse_answer)
        right = pred == self.ground_truth
        metadata = {"acc": float(right), "no_answer": float(pred is None), "pred": None if pred is None else str(pred)}
        return StepOutput([], 1.0 if right else -1.0, done=True, metadata=metadata)


def _without_boxes(field: str) -> str:
    """A field without the contents of its boxes, which are answers of their own."""
    for content in iter_boxed(field):
        field = field.replace(content, "", 1)
    return field


def extract_answer(text: str, parse_answer: Callable[[str], Any] = parse_number) -> Any:
    """What the end of `text` gives as its answer, as `read` reads a field; None if it gives none, or several."""
    tail = reasoning.final_answer(text)[-MAX_TAIL_CHARS:]
    fields = [*(_without_boxes(field) for field in ANSWER_LINE.findall(tail)), *iter_boxed(tail)]
    values = {parse_answer(field) for field in fields if any(map(str.isnumeric, field))}
    return values.pop() if len(values) == 1 else None
