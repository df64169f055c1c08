"""Checks that third-party names used by skyrl_train exist: rows of names.py, imports, and overridden methods."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import skyrl_train

PACKAGE = Path(skyrl_train.__file__).parent
_PLAIN = {"torch", "torch.Tensor", "torch.nn"}
"""Names that every file imports."""


class Missing(Exception):
    """A third-party name does not exist, or cannot be called as skyrl_train calls it."""


def rows(table: Mapping[str, str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the file and the expression of every row."""
    for file, text in table.items():
        for statement in ast.parse(textwrap.dedent(text)).body:
            assert isinstance(statement, ast.Expr), ast.unparse(statement)
            yield file, statement.value


def imported(root: str) -> Iterator[tuple[str, ast.expr]]:
    """Yield every name that skyrl_train imports from package `root`, as (file, expression)."""
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == root:
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names if alias.name.partition(".")[0] == root}
        yield from ((file, ast.parse(name, mode="eval").body) for name in sorted(names - _PLAIN))


def check(row: ast.expr) -> None:
    """Raise Missing with the problem if a row is wrong."""
    if isinstance(row, ast.Compare):
        assert isinstance(row.left, ast.Constant)
        if row.left.value not in _entries(find(ast.unparse(row.comparators[0]))):
            raise Missing("no such entry")
    elif isinstance(row, ast.Call):
        _check_call(find(ast.unparse(row.func)), row)
    else:
        find(ast.unparse(row))


def find(path: str) -> Any:
    """Return the object at a dotted path; None for an attribute that only instances have. Raise Missing otherwise."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            target: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not path.startswith(f"{error.name}.") and path != error.name:
                raise Missing(f"{'.'.join(parts[:count])} needs {error.name}, which is not installed") from error
            continue
        for index, name in enumerate(parts[count:], count):
            if hasattr(target, name):
                target = getattr(target, name)
            elif isinstance(target, type) and name in _assigned(target):
                return None
            else:
                raise Missing(f"{'.'.join(parts[:index])} has no {name}")
        return target
    raise Missing(f"no module {parts[0]}")


@cache
def _assigned(kind: type) -> frozenset[str]:
    """Return the attributes that a class or its bases annotate, or that their methods assign to `self`."""
    names: set[str] = set()
    for base in kind.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):
            continue  # The class is not written in Python.
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return frozenset(names)


def _entries(table: Any) -> set[Any]:
    """Return the paths of a router, or the first items of a table's entries."""
    if hasattr(table, "routes"):
        return {getattr(route, "path", None) for route in table.routes}
    return {entry[0] if isinstance(entry, tuple) else entry for entry in table}


def _check_call(function: Any, row: ast.Call) -> None:
    """Raise Missing if the call fits none of the function's signatures."""
    arguments = [ast.unparse(argument) for argument in row.args]
    keywords = dict.fromkeys(keyword.arg for keyword in row.keywords if keyword.arg is not None)
    is_partial = arguments[:1] == ["..."]
    arguments = arguments[1:] if is_partial else arguments
    problems = []
    for signature in signatures(function):
        try:
            (signature.bind_partial if is_partial else signature.bind)(*arguments, **keywords)
        except TypeError as error:
            problems.append(f"{error}: {signature}")
            continue
        pairs = zip(arguments, signature.parameters, strict=False)
        wrong = [f"{expected} is {name}" for expected, name in pairs if expected not in (name, "_")]
        fields = getattr(function, "model_fields", keywords)  # pydantic models may accept any other keyword, too.
        wrong += [f"no {name}" for name in keywords if name not in fields]
        if not wrong:
            return
        problems.append(f"{', '.join(wrong)}: {signature}")
    raise Missing("; ".join(problems))


def signatures(function: Any) -> list[inspect.Signature]:
    """Return the function's signature, or those that the docstring of a C++ function lists; raise Missing if none."""
    try:
        return [inspect.signature(function)]
    except (ValueError, TypeError):
        pass
    source = function.__init__ if inspect.isclass(function) else function
    lines = re.findall(r"^(?:\d+\. )?\w+\((.*)\) -> ", getattr(source, "__doc__", None) or "", re.MULTILINE)
    documented = [_parse_signature(line) for line in lines if not line.startswith("*args")]
    if not documented:
        raise Missing("its signature is not known")
    if inspect.isclass(function):
        return [signature.replace(parameters=list(signature.parameters.values())[1:]) for signature in documented]
    return documented


def _parse_signature(line: str) -> inspect.Signature:
    """Parse pybind11's form of a signature: `self: Store, port: int, world_size: int | None = None`."""
    flat = line
    while flat != (flat := re.sub(r"\[[^\[\]]*\]|\([^()]*\)|<[^<>]*>", "", flat)):
        pass
    parameters = []
    for parameter in filter(None, flat.split(", ")):
        name, _, rest = parameter.partition(":")
        default = None if "=" in rest else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name.strip(), inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def overridden(kind: type, root: str) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """Yield (name, override, overridden method) of a class's methods that override those of bases in package `root`."""
    bases = [base for base in kind.__mro__[1:] if base.__module__.partition(".")[0] == root]
    for name, ours in vars(kind).items():
        theirs = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if inspect.isfunction(ours) and theirs is not None and name != "__init__":
            yield name, ours, getattr(theirs, "__func__", theirs)


def check_override(ours: Callable[..., Any], theirs: Callable[..., Any], by_name: bool = True) -> None:
    """Raise Missing if our override does not accept every call that the overridden function accepts.

    Args:
        ours: The override.
        theirs: The function that it overrides.
        by_name: True to also check calls with keyword arguments.
    """
    own, base = inspect.signature(ours), inspect.signature(theirs)
    if by_name:
        own, base = _without_self(own), _without_self(base)
    plain = [p for p in base.parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p.name for p in plain if p.kind is not p.KEYWORD_ONLY]
    keyword_only = {p.name: None for p in plain if p.kind is p.KEYWORD_ONLY}
    named = {p.name: None for p in plain if p.kind is not p.POSITIONAL_ONLY}
    try:
        own.bind(*positional, **keyword_only)
        if by_name:
            own.bind(**named)
    except TypeError as error:
        raise Missing(f"{error}: ours {own}, theirs {base}") from error


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=[p for p in signature.parameters.values() if p.name != "self"])
