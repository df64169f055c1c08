r"""Extraction of answers in \boxed{...}. Every environment with such answers uses these rules."""

from __future__ import annotations

import re
from collections.abc import Iterator

from skyrl_train.data.reasoning import final_answer

TOKEN = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
"""Matches the start of a box, an escape or a brace. Models trained on much JSON write \\boxed."""
SPACE = re.compile(r"\s+")


def iter_boxed(text: str) -> Iterator[str]:
    r"""Yield the content of each closed \boxed{...} or \fbox{...}, first to last. Nested boxes are not separate."""
    opened: list[bool] = []  # for each open brace, True if it opens a box
    start, boxes = 0, 0
    for token in TOKEN.finditer(text):
        if token["box"] or token[0] == "{":
            opened.append(token["box"] is not None)
            if token["box"]:
                boxes += 1
                start = token.end() if boxes == 1 else start
        elif token[0] == "}" and opened and opened.pop():
            boxes -= 1
            if boxes == 0:
                yield text[start : token.start()]


def extract_boxed_answer(text: str) -> str | None:
    r"""Return the content of \boxed{...} in a response.

    Only the final answer is searched (`reasoning.final_answer`). All boxes must have the same content, so several
    guesses are not an answer, but a box may be repeated. Dollar signs and white space around the content are removed,
    and white space in it becomes one space.

    Returns:
        The content, or None if there is no box, if it is empty, or if several boxes differ.
    """
    answer: str | None = None
    for content in iter_boxed(final_answer(text)):
        content = SPACE.sub(" ", content).strip(" $")
        if answer is not None and content != answer:
            return None
        answer = content
    return answer or None
