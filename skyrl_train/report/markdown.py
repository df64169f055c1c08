"""Markdown around texts that anybody may have written: names of runs, data and metrics stay text."""

from __future__ import annotations

import re
from collections.abc import Sequence

_LONGEST = 200
_AS_CODE = re.compile(r"[\w.+/:=@,()\[\]{}'\" -]+", re.ASCII)
"""What is shown as code: nothing in it ends code or a table's cell, or is markup."""


def text(value: object) -> str:
    """A value as a text that Markdown renders as it is, whatever is in it; long ones are cut.

    Line breaks become spaces; characters that are not seen, or that turn a line around, become U+FFFD.
    """
    words = " ".join(str(value).split())
    shown = "".join(sign if sign.isprintable() else "\N{REPLACEMENT CHARACTER}" for sign in words)
    if len(shown) > _LONGEST:
        shown = f"{shown[:_LONGEST]}..."
    if _AS_CODE.fullmatch(shown):
        return f"`{shown}`"
    # A character reference is never part of Markdown's structure, and a sign of punctuation may be.
    return re.sub(r"[!-/:-@\[-`{-~]", lambda sign: f"&#{ord(sign[0])};", shown)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
