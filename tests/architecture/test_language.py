"""Prose is plain English: no private words, docstrings that begin as sentences do, and one per public function."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.architecture.test_tracked_files import REPOSITORY, tracked

PRIVATE_WORDS = re.compile(r"(?i)\b(mend(?:s|ed|ing)?|learnt|whoever|torn|several\s+machines)\b")
BAD_OPENINGS = re.compile(r"(?:Of|What|Whether|Who|Those)\b")
MAYBE_BAD_OPENING = re.compile(r"\"[\s\\]*" + BAD_OPENINGS.pattern)
CODE = re.compile(r"```.*?```|`[^`\n]*`", re.DOTALL)
PROSE_FILES = {".md", ".ts", ".tsx", ".sh", ".yaml", ".toml"}
TEXT_TOKENS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
Function = ast.FunctionDef | ast.AsyncFunctionDef

NOT_CHECKED = (
    "skyrl_train/environments/tasks/mini_swe.py",
    "examples/mini_swe_agent/swebench.yaml",
)
"""Prompts, whose words are data: a change moves the tokens of a run."""


def test_no_private_words():
    problems = [
        f"{name(path)}:{line + text.count(chr(10), 0, match.start())}: {match.group()}"
        for path in checked_files()
        if path != Path(__file__) and PRIVATE_WORDS.search(read(path))
        for line, text in prose(path)
        for match in PRIVATE_WORDS.finditer(text)
    ]
    assert problems == []


def test_docstrings_begin_as_sentences():
    problems = [
        f"{name(path)}:{line}: {text[:60]}"
        for path in checked_files()
        if path.suffix == ".py" and MAYBE_BAD_OPENING.search(read(path))
        for line, text in docstrings(parse(path))
        if BAD_OPENINGS.match(text.lstrip())
    ]
    assert problems == []


def test_public_functions_have_docstrings():
    modules = [path for path in tracked() if path.suffix == ".py" and name(path).startswith("skyrl_train/")]
    documented = {method for path in modules for method in documented_methods(parse(path))}
    problems = [
        f"{name(path)}:{definition.lineno}: {definition.name}"
        for path in modules
        if path in checked_files()
        for definition in public_definitions(parse(path), documented)
        if ast.get_docstring(definition) is None
    ]
    assert problems == []


def name(path: Path) -> str:
    return path.relative_to(REPOSITORY).as_posix()


@cache
def checked_files() -> tuple[Path, ...]:
    """Return the tracked files that contain prose and are already rewritten."""
    exempt = [REPOSITORY / entry for entry in NOT_CHECKED]
    return tuple(
        path
        for path in tracked()
        if path.suffix in PROSE_FILES | {".py"} and not any(path.is_relative_to(entry) for entry in exempt)
    )


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read(path))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for the comments, docstrings and messages of a file. Code in backticks is not prose."""
    if path.suffix != ".py":
        yield 1, without_code(read(path))
        return
    for token in tokenize.generate_tokens(io.StringIO(read(path)).readline):
        is_identifier = token.type == tokenize.STRING and re.fullmatch(r"\w*([\"'])\w+\1", token.string)
        if token.type in TEXT_TOKENS and not is_identifier:
            yield token.start[0], without_code(token.string)


def without_code(text: str) -> str:
    """Replace code in backticks by as many line breaks as it has, which keeps line numbers correct."""
    return CODE.sub(lambda match: "\n" * match.group().count("\n"), text)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for every docstring, those of attributes and constants included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def documented_methods(tree: ast.Module) -> Iterator[str]:
    """Yield the names of methods with a docstring. A method of the same name in a subclass needs none of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield from (item.name for item in node.body if isinstance(item, Function) and ast.get_docstring(item))


def public_definitions(tree: ast.Module, documented: set[str]) -> Iterator[Function | ast.ClassDef]:
    """Yield public functions and classes, and public methods that override no documented one."""
    for node in tree.body:
        if isinstance(node, Function | ast.ClassDef) and not node.name.startswith("_"):
            yield node
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            inherited = documented if node.bases else set()
            for item in node.body:
                if isinstance(item, Function) and not item.name.startswith("_") and item.name not in inherited:
                    yield from () if is_overload_or_setter(item) else (item,)


def is_overload_or_setter(function: Function) -> bool:
    names = {getattr(node, "id", getattr(node, "attr", "")) for node in function.decorator_list}
    return bool(names & {"overload", "setter"})
