"""Files and functions that a person can hold in the head."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
FILES = [
    path for top in ("skyrl_train", "tests", "examples", "scripts") for path in sorted((REPOSITORY / top).rglob("*.py"))
]


def test_there_is_something_to_measure():
    assert len(FILES) > 50


def too_long(path: Path) -> Iterator[str]:
    """Yield a line for the file and for each of its functions that is over its limit."""
    source, name = path.read_text(), path.relative_to(REPOSITORY)
    if (lines := len(source.splitlines())) > MAX_FILE_LINES:
        yield f"{name} has {lines} lines; at most {MAX_FILE_LINES} are allowed"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{name}:{node.lineno}: {node.name} has {lines} lines; at most {MAX_FUNCTION_LINES} are allowed"


def test_files_and_functions_stay_small():
    found = [line for path in FILES for line in too_long(path)]
    assert not found, "\n".join(found)
