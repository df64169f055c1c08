"""Which tests carry a mark with an id, read from their source: what promises are held by."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SETS_ASIDE = {"skip", "skipif", "xfail", "gpu"}


def marks(decorators: list[ast.expr]) -> Iterator[tuple[str, list[object]]]:
    """(name, constant arguments) of the pytest marks among decorators."""
    for decorator in decorators:
        call = decorator if isinstance(decorator, ast.Call) else None
        target = call.func if call else decorator
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "pytest.mark":
            yield target.attr, [a.value for a in call.args if isinstance(a, ast.Constant)] if call else []


def claims(source: str, kind: str) -> Iterator[tuple[str, str]]:
    """(id, test) of every test of a module that carries mark `kind`, is collected and not set aside."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
            carried = list(marks(node.decorator_list))
            if not SETS_ASIDE & {name for name, _ in carried}:
                yield from ((str(id), node.name) for name, ids in carried if name == kind for id in ids)


@cache
def all_claims(tests: Path, kind: str) -> dict[str, set[str]]:
    """Tests below a folder by the ids of their marks `kind`."""
    found: dict[str, set[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        source = path.read_text()
        if "pytestmark" not in source:  # a mark on a whole module may set it aside: such modules prove nothing here
            for id, test in claims(source, kind):
                found.setdefault(id, set()).add(f"{path.relative_to(tests)}::{test}")
    return found
