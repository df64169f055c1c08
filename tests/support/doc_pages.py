"""The pages of the documentation, their fenced blocks, and the commands of their shell blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = [
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "integrations/**/*.md")
    for path in sorted(REPOSITORY.glob(pattern))
]
FENCE = re.compile(r"^ *```(\w*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_SUBSTITUTION = re.compile(r"\$\((?:[^()]|\([^()]*\))*\)")
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


class Command(NamedTuple):
    """A command of a shell block, without leading variables and without what `uv run` adds."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return shlex.join(self.words)


def fenced_blocks(*languages: str) -> list[tuple[str, str]]:
    """Yield (page, text) for every fenced block in one of these languages."""
    return [
        (page.relative_to(REPOSITORY).as_posix(), text)
        for page in PAGES
        for found, text in FENCE.findall(page.read_text(encoding="utf-8"))
        if found in languages
    ]


def snippets(page: str, language: str = "python") -> list[str]:
    """Return the fenced blocks of one page, whose path is relative to the repository."""
    return [text for name, text in fenced_blocks(language) if name == page]


def commands() -> list[Command]:
    """Return every command of every shell block, in the order of the pages."""
    return [command for page, text in fenced_blocks("bash") for command in commands_of(page, text)]


def commands_of(page: str, text: str) -> Iterator[Command]:
    """Yield the commands of one block without comments. Continued lines are joined, and lines are split at `&&`."""
    for line in _SUBSTITUTION.sub("SUBSTITUTED", text.replace("\\\n", " ")).splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), "&&"]:
            if word != "&&":
                words.append(word)
                continue
            if command := _bare(words):
                yield Command(page, tuple(command))
            words = []


def _bare(words: list[str]) -> list[str]:
    while words and _ASSIGNMENT.fullmatch(words[0]):
        words = words[1:]
    if words[:2] != ["uv", "run"]:
        return words
    words = words[2:]
    while words and words[0].startswith("--"):  # --extra NAME
        words = words[2:]
    script = words[0].endswith(".py") or words[0] == "-m"
    return ["python", *words] if script else words


def find_commands(start: str) -> list[Command]:
    """Return the distinct commands whose start matches a regular expression, in the order of the pages."""
    return list({one.words: one for one in commands() if re.match(start, str(one))}.values())
