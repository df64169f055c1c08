r"""The answer in \boxed{...}, by one rule for every environment that reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from skyrl_train.data.reasoning import final_answer

TOKEN = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
"""Models trained on much JSON write \\boxed."""
SPACE = re.compile(r"\s+")


def iter_boxed(text: str) -> Iterator[str]:
    r"""The content of every closed \boxed{...} (or \fbox), outermost ones only, in one pass over the text."""
    opened: list[bool] = []  # for every open brace: whether it opens a box
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
    r"""The content of \boxed{...}, or None if there is no box, an empty one, or several that differ.

    The rule: only the final answer counts (`reasoning.final_answer`), in which all boxes must have the same content,
    ignoring white space and dollar signs around it. So several guesses are no answer, but repeating one is.
    """
    answer: str | None = None
    for content in iter_boxed(final_answer(text)):
        content = SPACE.sub(" ", content).strip(" $")
        if answer is not None and content != answer:
            return None
        answer = content
    return answer or None
