"""Grade-school mathematics (arXiv:2110.14168) in a single turn. The answer is the number after "####"."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders.numbers import NUMBER, canonicalize, parse_number

ANSWER_LINE = re.compile(r"(?<!#)####(?!#)(?P<field>[^\n]*)")
HEADING = re.compile(r"[^0-9A-Za-z\\]*[A-Za-z](?!\s*=)")
"""Matches the start of a heading such as "#### Step 1". LaTeX and assignments such as "x = 42" do not match."""
ALTERNATIVES = re.compile(r"(?:[\s,;/|&()\[\]*?!\"']|or|and|either|maybe|perhaps|possibly)*", re.IGNORECASE)


def extract_strict_answer(text: str) -> str | None:
    """Return the number after "####" in canonical form, or None if there is no number or there are different ones.

    Each line of the final answer (`reasoning.final_answer`) that has a digit after "####" is an answer, which extends
    from the marker to the end of the line. Headings such as "#### Step 1" are excluded. An answer must be a number and
    nothing else (see graders/numbers.py), and all answers must be equal. So the result is None for "#### 41 or 42", for
    "#### 41" and "#### 42" on two lines, for "#### 42k" and for "#### 42 is wrong". An answer may be repeated.
    """
    values: set[str | None] = set()
    for field in _answers(text):
        values.add(parse_number(field))
        if len(values) > 1 or None in values:
            return None
    return values.pop() if values else None


def _answers(text: str) -> Iterator[str]:
    """Yield the text after the first "####" of each line, if it contains a digit and is not a heading."""
    for line in final_answer(text).splitlines():
        match = ANSWER_LINE.search(line)
        if match and any(map(str.isnumeric, match["field"])) and not HEADING.match(match["field"]):
            yield match["field"]


def extract_flexible_answer(text: str) -> str | None:
    """Return the answer of a response that may lack the marker "####".

    If a line of the final answer has an answer after "####", the result is that of `extract_strict_answer`. Otherwise
    it is the last number, in canonical form, or None if there is no number or if the last two numbers are alternatives.
    Two numbers are alternatives if they differ and only spaces, punctuation other than ".:=#" and the words "or",
    "and", "either", "maybe", "perhaps" and "possibly" are between them: "41 or 42", "41, 42", "41 (42?)".
    """
    if any(True for _ in _answers(text)):
        return extract_strict_answer(text)
    text = final_answer(text)
    last: re.Match[str] | None = None
    before: re.Match[str] | None = None
    for match in NUMBER.finditer(text):
        last, before = match, last
    if last is None:
        return None
    value = canonicalize(last)
    if before and canonicalize(before) != value and ALTERNATIVES.fullmatch(text, before.end(), last.start()):
        return None
    return value


ANSWER_EXTRACTORS = {"strict": extract_strict_answer, "flexible": extract_flexible_answer}


def score(text: str, ground_truth: str, method: str = "strict", format_score: float = 0.0) -> float:
    """Return the reward of a response: 1.0 if its answer equals the ground truth as a number ("18.00" equals "18").

    Args:
        text: The model's response, including reasoning.
        ground_truth: The expected number.
        method: "strict" accepts only an answer after the marker "####"; "flexible" also accepts the last number of a
            response without the marker.
        format_score: Reward of a wrong number. A response without an answer gets 0.0.

    Raises:
        ValueError: The ground truth is not a number.
        KeyError: The method is unknown.
    """
    truth = parse_number(ground_truth)
    if truth is None:
        raise ValueError(f"ground truth {ground_truth!r:.80} is not a number")
    answer = ANSWER_EXTRACTORS[method](text)
    if answer is None:
        return 0.0
    return 1.0 if answer == truth else format_score


def parse_ground_truth(extras: Mapping[str, Any]) -> str:
    """Return a row's reward_spec.ground_truth. Raise ValueError if it is not a string or is blank."""
    reward_spec = extras.get("reward_spec")
    truth = reward_spec.get("ground_truth") if isinstance(reward_spec, Mapping) else None
    if not isinstance(truth, str) or not truth.strip():
        raise ValueError(
            'the row needs reward_spec={"method": "rule", "ground_truth": "<answer>"}, in which the ground truth is a '
            f"string that is not empty, got {truth!r:.80}"
        )
    return truth


def parse_numeric_ground_truth(extras: Mapping[str, Any]) -> str:
    """Return the text of a row's ground truth. Raise ValueError if it is not a number."""
    truth = parse_ground_truth(extras)
    if parse_number(truth) is None:
        raise ValueError(f"ground truth {truth!r:.80} is not a number")
    return truth


class GSM8KEnv(TextEnv):
    """A single-turn environment that rewards the right number.

    Its settings are `method` ("strict" by default) and `format_score` (0.0 by default); see `score`. An empty or
    truncated response is scored by the same rules, so it gets 0 unless it already contains the answer.
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
