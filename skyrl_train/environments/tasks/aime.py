r"""Single-turn competition problems with numeric answers (AIME, DAPO-Math-17k): "Answer: 204" or \boxed{204}."""

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
"""Number of final characters that are examined, as in SkyRL-Gym. A solution may mention many values before them."""
ANSWER_LINE = re.compile(r"answer[*_]{0,2}[ \t]*:([^\n]+)", re.IGNORECASE)


class AIMEEnv(TextEnv):
    r"""An environment that rewards the right number with 1 and anything else with -1, as SkyRL-Gym does.

    Only the last 300 characters of the final answer (`reasoning.final_answer`) are examined. The rest of each line
    after "Answer:" and the content of each \boxed{...} are answers if they have a digit. Each answer must be a number
    and nothing else (see graders/numbers.py), and all must be equal. So "Answer: 41 or 42" and "Answer: not 42" are
    wrong, and so is a response with "Answer: 41" and "Answer: 42", or with another number in a box. 042 equals 42. If
    the ground truth is a fraction, answers are parsed as fractions: \frac{2}{4} equals 1/2. The metric `acc` is the
    accuracy.

    The ground truth is the row's `reward_spec.ground_truth`, or `reward_model.ground_truth` as in DAPO's files.
    """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[Callable[[str], Any], Any]:
        """Return the function that parses answers, `parse_number` or `parse_fraction`, and the expected answer.

        Raises:
            ValueError: The row has no ground truth, or it is neither a number nor a fraction.
        """
        spec = extras.get("reward_spec") or extras.get("reward_model")
        if isinstance(spec, Mapping) and type(truth := spec.get("ground_truth")) is int:  # the form in some AIME files
            spec = {"ground_truth": str(truth)}
        text = parse_ground_truth({"reward_spec": spec})
        parse_answer: Callable[[str], Any] = parse_number if parse_number(text) is not None else parse_fraction
        if parse_answer(text) is None:
            raise ValueError(f"ground truth {text!r:.80} is neither a number nor a fraction")
        return parse_answer, parse_answer(text)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.parse_answer, self.ground_truth = self.parse_row(self.extras)

    def step(self, action: str) -> StepOutput:
        pred = extract_answer(action, self.parse_answer)
        right = pred == self.ground_truth
        metadata = {"acc": float(right), "no_answer": float(pred is None), "pred": None if pred is None else str(pred)}
        return StepOutput([], 1.0 if right else -1.0, done=True, metadata=metadata)


def _without_boxes(field: str) -> str:
    """Remove the contents of boxes from a field, because they are separate answers."""
    for content in iter_boxed(field):
        field = field.replace(content, "", 1)
    return field


def extract_answer(text: str, parse_answer: Callable[[str], Any] = parse_number) -> Any:
    """Extract the answer from the last MAX_TAIL_CHARS characters of a response's final answer.

    Args:
        text: The model's response, including reasoning.
        parse_answer: Parses one field and returns None if the field is not an answer.

    Returns:
        The parsed answer, or None if there is no answer, if several answers differ, or if one cannot be parsed.
    """
    tail = reasoning.final_answer(text)[-MAX_TAIL_CHARS:]
    fields = [*(_without_boxes(field) for field in ANSWER_LINE.findall(tail)), *iter_boxed(tail)]
    values = {parse_answer(field) for field in fields if any(map(str.isnumeric, field))}
    return values.pop() if len(values) == 1 else None
