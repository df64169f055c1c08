"""Marks with an ID in the source of tests."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

EXCLUDING_MARKERS = {"skip", "skipif", "xfail", "gpu", "on_demand"}
SKIPS = {"pytest.skip", "pytest.importorskip"}


def marker_ids(decorators: list[ast.expr]) -> Iterator[tuple[str, list[object]]]:
    """Yield (name, constant arguments) of the pytest marks among decorators."""
    for decorator in decorators:
        call = decorator if isinstance(decorator, ast.Call) else None
        target = call.func if call else decorator
        if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "pytest.mark":
            yield target.attr, [a.value for a in call.args if isinstance(a, ast.Constant)] if call else []


def marked_tests(source: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yield (ID, test) for every test of a module that carries mark `kind`, is collected and is never skipped.

    Tests that carry a module-level name of a skipping mark count as skipped, as do those that call `pytest.skip` or
    `pytest.importorskip` in the test or the module.
    """
    body = ast.parse(source).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    others = [node for node in body if node not in functions and not isinstance(node, ast.ClassDef)]
    if any(map(_skips, others)):
        return
    aliases = _aliases(others)
    for node in functions:
        if not node.name.startswith("test_") or _skips(node):
            continue
        carried = list(marker_ids(node.decorator_list))
        named = {decorator.id for decorator in node.decorator_list if isinstance(decorator, ast.Name)}
        aside = (
            EXCLUDING_MARKERS & {name for name, _ in carried}
            or named & aliases
            or any(map(_is_excluded, node.decorator_list))
        )
        if not aside:
            yield from ((str(id), node.name) for name, ids in carried if name == kind for id in ids)


def _is_excluded(decorator: ast.expr) -> bool:
    """True if the decorator is a `parametrize` in which every parameter set has an excluding mark."""
    if not isinstance(decorator, ast.Call) or ast.unparse(decorator.func) != "pytest.mark.parametrize":
        return False
    values = decorator.args[1] if len(decorator.args) > 1 else None
    sets = values.elts if isinstance(values, ast.List | ast.Tuple) else []
    return bool(sets) and all(
        any(f"pytest.mark.{mark}" in ast.unparse(one) for mark in EXCLUDING_MARKERS) for one in sets
    )


def _skips(node: ast.AST) -> bool:
    calls = (each.func for each in ast.walk(node) if isinstance(each, ast.Call))
    return any(ast.unparse(called) in SKIPS for called in calls)


def _aliases(statements: list[ast.stmt]) -> set[str]:
    """Return the names of a module that stand for an excluding mark."""
    found: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Assign) and EXCLUDING_MARKERS & {name for name, _ in marker_ids([node.value])}:
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return found


@cache
def all_marked_tests(tests: Path, kind: str) -> dict[str, set[str]]:
    """Return the tests below a folder by the IDs of their marks `kind`."""
    found: dict[str, set[str]] = {}
    for path in sorted(tests.rglob("test_*.py")):
        source = path.read_text()
        if "pytestmark" not in source:  # a mark on a whole module may set it aside: such modules prove nothing here
            for id, test in marked_tests(source, kind):
                found.setdefault(id, set()).add(f"{path.relative_to(tests)}::{test}")
    return found
