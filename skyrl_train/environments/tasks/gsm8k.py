"""Grade-school mathematics (arXiv:2110.14168): one turn, the answer is the number after "####"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders.numbers import NUMBER, canonicalize, parse_number

ANSWER_LINE = re.compile(r"(?<!#)####(?!#)(?P<field>[^\n]*)")
HEADING = re.compile(r"[^0-9A-Za-z\\]*[A-Za-z](?!\s*=)")
"""Of a field that begins with a word, as "Step 1" does; LaTeX and "x = 42" are no headings."""
ALTERNATIVES = re.compile(r"(?:[\s,;/|&()\[\]*?!\"']|or|and|either|maybe|perhaps|possibly)*", re.IGNORECASE)


def extract_strict_answer(text: str) -> str | None:
    """The number after "####", or None if there is none or more than one.

    The rule: every line of the final answer (`reasoning.final_answer`) with "####" and a digit behind it is an answer,
    from the marker to the end of the line, but for headings such as "#### Step 1". An answer must be a number and
    nothing else (see graders/numbers.py), and all answers must be equal. So "#### 41 or 42", "#### 41" followed by
    "#### 42" below, "#### 42k" and "#### 42 is wrong" are no answer; repeating one answer is allowed.
    """
    values: set[str | None] = set()
    for field in _answers(text):
        values.add(parse_number(field))
        if len(values) > 1 or None in values:
            return None
    return values.pop() if values else None


def _answers(text: str) -> Iterator[str]:
    """What stands behind the first "####" of every line, if it has a digit and is no heading."""
    for line in final_answer(text).splitlines():
        marked = ANSWER_LINE.search(line)
        if marked and any(map(str.isnumeric, marked["field"])) and not HEADING.match(marked["field"]):
            yield marked["field"]


def extract_flexible_answer(text: str) -> str | None:
    """The strict answer if a line has one (see there), else the last number; None for no number or for several guesses.

    The rule: the last two numbers are guesses if they differ and only spaces, punctuation other than ".:=#", "or",
    "and", "either", "maybe", "perhaps" or "possibly" are between them: "41 or 42", "41, 42", "41 (42?)".
    """
    if any(True for _ in _answers(text)):
        return extract_strict_answer(text)
    text = final_answer(text)
    last: re.Match[str] | None = None
    before: re.Match[str] | None = None
    for found in NUMBER.finditer(text):
        last, before = found, last
    if last is None:
        return None
    value = canonicalize(last)
    if before and canonicalize(before) != value and ALTERNATIVES.fullmatch(text, before.end(), last.start()):
        return None
    return value


ANSWER_EXTRACTORS = {"strict": extract_strict_answer, "flexible": extract_flexible_answer}


def score(text: str, ground_truth: str, method: str = "strict", format_score: float = 0.0) -> float:
    """Return 1.0 for the right number, `format_score` for one wrong one, 0.0 for none or several. 18 equals 18.00."""
    truth = parse_number(ground_truth)
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r:.80} is not a number")
    answer = ANSWER_EXTRACTORS[method](text)
    if answer is None:
        return 0.0
    return 1.0 if answer == truth else format_score


def parse_ground_truth(extras: Mapping[str, Any]) -> str:
    """Return a row's reward_spec.ground_truth. Raises ValueError unless it is a string with more than white space."""
    reward_spec = extras.get("reward_spec")
    truth = reward_spec.get("ground_truth") if isinstance(reward_spec, Mapping) else None
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(
            'the row needs reward_spec={"method": "rule", "ground_truth": "<answer>"}, in which the ground truth is a '
            f"string that is not empty, got {truth!r:.80}"
        )
    return truth


def parse_numeric_ground_truth(extras: Mapping[str, Any]) -> str:
    """Return a row's ground truth, as text. Raises ValueError unless it is a number."""
    truth = parse_ground_truth(extras)
    if parse_number(truth) is None:
        raise ValueError(f"ground truth {truth!r:.80} is not a number")
    return truth


class GSM8KEnv(TextEnv):
    """One question, one answer. Settings: `method` (strict or flexible) and `format_score`; see `score`.

    An empty or truncated response is scored by the same rule: 0 unless it already contains the answer.
    """

    parse_row = staticmethod(parse_numeric_ground_truth)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = self.parse_row(self.extras)
        self.method = self.env_config.get("method", "strict")
        if self.method not in ANSWER_EXTRACTORS:
            raise ValueError(f"method={self.method!r} is not one of {sorted(ANSWER_EXTRACTORS)}")
        self.format_score = float(self.env_config.get("format_score", 0.0))

    def step(self, action: str) -> StepOutput:
        reward = score(action, self.ground_truth, self.method, self.format_score)
        return StepOutput(
            [], reward, done=True, metadata={"no_answer": float(ANSWER_EXTRACTORS[self.method](action) is None)}
        )
