"""Files and functions that a person can hold in the head."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 60
FILES = [
    path for top in ("skyrl_train", "tests", "examples", "scripts") for path in sorted((REPOSITORY / top).rglob("*.py"))
]


def test_there_is_something_to_measure():
    assert len(FILES) > 50


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(REPOSITORY).as_posix())
def test_a_file_and_its_functions_stay_small(path: Path):
    source = path.read_text()
    assert len(source.splitlines()) <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            assert lines <= MAX_FUNCTION_LINES, f"line {node.lineno}: {node.name} has {lines} lines"
