"""Finds fenced code blocks in Markdown. Graders and tool parsers share these rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PYTHON_LANGUAGES = ("python", "python3", "py")
"""Language tags of fenced blocks that contain Python."""
_LANGUAGE = re.compile(r"\{?\s*\.?([\w+#-]+)")
_LIST_ITEM = re.compile(r"\s*(?:[-*+]|\d+[.)])\s+")
_BLANK_LINES = re.compile(r"(?:[^\S\n]*+\n)*+")
_TAG = re.compile(r"\{?\.?[A-Za-z]")


@dataclass(frozen=True, slots=True)
class FencedBlock:
    """A fenced block of a text."""

    language: str
    """First word of the info string in lower case, such as "python" of ```` ```Python title="a.py" ````, or ""."""
    body: str
    """Lines of the block. The opening fence's indentation is removed if the first line has it."""
    is_closed: bool
    """False if another block or the end of the text interrupts the block."""
    start: int
    """Index of the first character of the opening fence's line, or of the fence itself if text precedes it."""
    end: int
    """Index after the last character of the block, including its closing fence."""


@dataclass(slots=True)
class _Opening:
    mark: str
    language: str
    indent: str
    start: int
    body: int


def find_fenced_blocks(text: str) -> list[FencedBlock]:
    """Return the fenced blocks of a text, first to last.

    As in CommonMark, a fence consists of three or more backticks or tildes. It may be indented and have an info string.
    The closing fence has at least as many of the same marks. Models deviate from CommonMark in three ways that are
    accepted here:

    - An opening fence with a language may follow text on its line.
    - Text may follow a closing fence.
    - A fence with a language ends an open block with the same marks. That block counts as not closed.
    """
    return list(_fences(text))


def extract_blocks(text: str, languages: Sequence[str]) -> list[str]:
    """Return the bodies of the closed blocks whose language is in `languages`, first to last."""
    return [fence.body for fence in find_fenced_blocks(text) if fence.is_closed and fence.language in languages]


def text_outside(text: str, blocks: Sequence[FencedBlock]) -> str:
    """Return `text` with each of its fenced `blocks` replaced by a line break."""
    begins, ends = [0, *(block.end for block in blocks)], [*(block.start for block in blocks), len(text)]
    return "\n".join(text[begin:end] for begin, end in zip(begins, ends, strict=True))


def _fences(text: str) -> Iterator[FencedBlock]:
    opening: _Opening | None = None
    at = 0
    for line in text.split("\n"):
        mark, info = _mark(line, anywhere=opening is None)
        following = at + len(line) + 1
        if mark and opening is None:
            head = _leading_space(line) if line.lstrip().startswith(mark) else line[: line.rindex(mark)]
            start = at + len(head) if head.strip() else at
            opening = _Opening(mark, _language(info), _indent(head), start, following)
        elif mark and opening is not None and mark[0] == opening.mark[0] and len(mark) >= len(opening.mark):
            restarts = _TAG.match(info) is not None
            yield _fence(text, opening, at, at if restarts else at + len(line), closed=not restarts)
            opening = _Opening(mark, _language(info), _leading_space(line), at, following) if restarts else None
        at = following
    if opening is not None:
        yield _fence(text, opening, len(text) + 1, len(text), closed=False)


def _fence(text: str, opening: _Opening, body_end: int, end: int, *, closed: bool) -> FencedBlock:
    """Return the block of `opening`. Its body ends before the line break that precedes `body_end`."""
    body = text[opening.body : max(opening.body, body_end - 1)]
    blank = _BLANK_LINES.match(body)
    if opening.indent and blank and body.startswith(opening.indent, blank.end()):
        body = "\n".join(line.removeprefix(opening.indent) for line in body.split("\n"))
    return FencedBlock(opening.language, body, closed, opening.start, end)


def _mark(line: str, *, anywhere: bool) -> tuple[str, str]:
    """Return the marks and the info string of a line that has a fence, else two empty strings."""
    stripped = line.strip()
    if stripped.startswith(("```", "~~~")):
        info = stripped.lstrip(stripped[0])
        if "`" not in info or stripped[0] == "~":
            return stripped[: len(stripped) - len(info)], info
        return "", ""
    head, mark, info = stripped.rpartition("```")
    if anywhere and mark and _TAG.match(info):
        return "`" * (len(head) - len(head.rstrip("`")) + 3), info
    return "", ""


def _leading_space(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _indent(head: str) -> str:
    """Return the indentation of a block whose fence follows `head` on its line, such as "1. "."""
    return re.sub(r"\S", " ", head) if _LIST_ITEM.fullmatch(head) else _leading_space(head)


def _language(info: str) -> str:
    match = _LANGUAGE.match(info.strip())
    return match[1].lower() if match else ""
