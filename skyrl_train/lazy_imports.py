"""Lazily imported public names of a package (PEP 562)."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


def names_for_type_checkers(file: str) -> dict[str, list[str]]:
    """Return module -> names that a source file imports under `if TYPE_CHECKING:`, in the order of the file.

    A package that lists its public names there, for type checkers, needs no second list for `lazy_exports`.
    """
    body = ast.parse(Path(file).read_bytes()).body
    blocks = [node.body for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    imports = [node for block in blocks for node in block if isinstance(node, ast.ImportFrom)]
    return {str(node.module): [alias.name for alias in node.names] for node in imports}


def lazy_exports(
    package: str, names: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package whose public names are imported on first use.

    Args:
        package: Name of the package.
        names: Module -> public names that it defines. For the package itself: its public modules.
    """
    module_by_name = {name: module for module, module_names in names.items() for name in module_names}

    def get(name: str) -> Any:
        if name not in module_by_name:
            raise AttributeError(f"module {package!r} has no attribute {name!r}", name=name)
        if module_by_name[name] == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(module_by_name[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *module_by_name}), sorted(module_by_name)
