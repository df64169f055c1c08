r"""The answer in \boxed{...}, by one rule for every environment that reads it."""

from __future__ import annotations

import re
from collections.abc import Iterator

from skyrl_train.environments.tasks.gsm8k import NUMBER, canonical

TOKEN = re.compile(r"(?P<box>\\{1,2}(?:boxed|fbox)\s*\{)|\\.|[{}]", re.DOTALL)
"""Models that saw much JSON write \\boxed."""
SPACE = re.compile(r"\s+")


def boxed_contents(text: str) -> Iterator[str]:
    r"""What stands in every \boxed{...} (or \fbox) that closes, outermost ones only, in one pass over the text."""
    opened: list[bool] = []  # for every open brace: is it a box's
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


def boxed_answer(text: str) -> str | None:
    r"""The content of \boxed{...}, or None when there is none, an empty one, or several that differ.

    The rule: what stands before the last "</think>" is thinking and no answer; after it, all boxes must hold the same
    (white space and dollar signs around it apart). So boxing several guesses is no answer; repeating one is allowed.
    """
    answer: str | None = None
    for content in boxed_contents(text.rpartition("</think>")[2]):
        content = SPACE.sub(" ", content).strip(" $")
        if answer is not None and content != answer:
            return None
        answer = content
    return answer or None


def number(text: str) -> str | None:
    """`text` as a number in the form that equal numbers share ("1,234.50" -> "1234.5"), or None when it is not one."""
    match = NUMBER.fullmatch(text.strip().rstrip("."))
    return canonical(match) if match else None
