"""No module imports itself through others. Imports in functions and for type checking count too."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = "skyrl_train"


def imports_of(module: str, source: str, is_package: bool, known: Mapping[str, object]) -> Iterator[str]:
    """Return the modules among `known` that a module imports by a statement in any place."""
    parents = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            home = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                name = f"{home}.{alias.name}"
                if (found := name if name in known else home) in known:
                    yield found


def cycles(graph: Mapping[str, set[str]]) -> set[tuple[str, ...]]:
    """Return the sets of modules that reach each other, each sorted."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [start]
        while waiting:
            new = graph[waiting.pop()] - seen
            seen |= new
            waiting += new
        return seen

    below = {module: reached(module) for module in graph}
    return {
        tuple(sorted({module, *(other for other in below[module] if module in below[other])}))
        for module in graph
        if module in below[module]
    }


def graph_of_package() -> dict[str, set[str]]:
    paths = sorted((REPOSITORY / PACKAGE).rglob("*.py"))
    names = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): path for path in paths
    }
    graph = {
        name: set(imports_of(name, path.read_text(), path.name == "__init__.py", names)) - {name}
        for name, path in names.items()
    }
    graph[PACKAGE] = set()  # the public names, each loaded when it is first used
    return graph


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("import p.b", "import p.a"),
        ("from p import b", "from p.a import name"),
        ("from . import b", "def f():\n    from .a import name"),
        ("if TYPE_CHECKING:\n    from p.b import Name", "from .a import name"),
    ],
)
def test_cycle_is_found(first: str, second: str):
    sources = {"p": "", "p.a": first, "p.b": second, "p.c": "import p.a"}
    graph = {name: set(imports_of(name, text, name == "p", sources)) for name, text in sources.items()}
    assert cycles(graph) == {("p.a", "p.b")}


def test_package_has_no_import_cycle():
    assert cycles(graph_of_package()) == set()
