"""The tables of names in config/choices.py list everything that users can choose."""

from __future__ import annotations

import ast
from pathlib import Path

from skyrl_train.config import choices
from skyrl_train.registry import load_object
from tests.support.table_cases import check_each

PACKAGE = Path(__file__).resolve().parents[2] / "skyrl_train"
TABLES = {name: value for name, value in vars(choices).items() if name.isupper() and isinstance(value, dict)}
OPTIONAL = {"vllm", "sglang", "mlflow", "trackio"}
ENTRIES = [(table, name, target) for table, names in TABLES.items() for name, target in names.items()]


def decorated() -> list[tuple[str, str]]:
    """Return (name, "module:object") for everything in the package that a decorator registers."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(["skyrl_train", *path.relative_to(PACKAGE).with_suffix("").parts])
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and "register" in ast.unparse(decorator.func):
                    found += [
                        (str(a.value), f"{module}:{node.name}")
                        for a in decorator.args[:1]
                        if isinstance(a, ast.Constant)
                    ]
    return found


def loads_callable(entry: tuple[str, str, str]) -> None:
    _, name, target = entry
    if name in OPTIONAL:  # importing the library takes long, where it is installed: look instead
        module, _, wanted = target.partition(":")
        tree = ast.parse((PACKAGE.parent / f"{module.replace('.', '/')}.py").read_text())
        assert wanted in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        return
    assert callable(load_object(target))


def test_every_choice_loads_a_callable():
    check_each(ENTRIES, loads_callable)


def test_decorated_objects_are_listed_in_choices():
    assert set(decorated()) <= {(name, target) for _, name, target in ENTRIES}


def test_tables_are_sorted_into_one_place():
    """Only choices.py contains "module:object" strings; the other modules of config must not repeat them."""
    for path in sorted((PACKAGE / "config").glob("*.py")):
        if path.name != "choices.py":
            repeated = [target for _, _, target in ENTRIES if target in path.read_text()]
            assert repeated == [], path.name
