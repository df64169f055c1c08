"""Whether what our code touches of other packages is there: rows of names.py, imports, methods that we override."""

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
"""What every file imports."""


class Missing(Exception):
    """A name is not there, or cannot be called as we do."""


def rows(table: Mapping[str, str]) -> Iterator[tuple[str, ast.expr]]:
    """(file, expression) of every row."""
    for file, text in table.items():
        for statement in ast.parse(textwrap.dedent(text)).body:
            assert isinstance(statement, ast.Expr), ast.unparse(statement)
            yield file, statement.value


def imported(root: str) -> Iterator[tuple[str, ast.expr]]:
    """(file, expression) of every name that skyrl_train imports from package `root`, as rows."""
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
    """Raises Missing, with what is wrong."""
    if isinstance(row, ast.Compare):
        assert isinstance(row.left, ast.Constant)
        if row.left.value not in _entries(find(ast.unparse(row.comparators[0]))):
            raise Missing("no such entry")
    elif isinstance(row, ast.Call):
        _check_call(find(ast.unparse(row.func)), row)
    else:
        find(ast.unparse(row))


def find(path: str) -> Any:
    """The object at a dotted path; None for an attribute that only instances have. Raises Missing."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not path.startswith(f"{error.name}.") and path != error.name:
                raise Missing(f"{'.'.join(parts[:count])} needs {error.name}, which is not installed") from error
            continue
        for place, name in enumerate(parts[count:], count):
            if hasattr(found, name):
                found = getattr(found, name)
            elif isinstance(found, type) and name in _assigned(found):
                return None
            else:
                raise Missing(f"{'.'.join(parts[:place])} has no {name}")
        return found
    raise Missing(f"no module {parts[0]}")


@cache
def _assigned(kind: type) -> frozenset[str]:
    """Attributes that a class or its bases annotate, or that their methods assign to `self`."""
    names: set[str] = set()
    for one in kind.__mro__:
        names |= set(getattr(one, "__annotations__", {}))
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(one)))
        except (OSError, TypeError, SyntaxError):
            continue  # not written in Python
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return frozenset(names)


def _entries(table: Any) -> set[Any]:
    """Of a router its paths, of a table the first items of its entries."""
    if hasattr(table, "routes"):
        return {getattr(route, "path", None) for route in table.routes}
    return {entry[0] if isinstance(entry, tuple) else entry for entry in table}


def _check_call(function: Any, row: ast.Call) -> None:
    """The call must fit one of the function's signatures."""
    given = [ast.unparse(argument) for argument in row.args]
    keywords = dict.fromkeys(keyword.arg for keyword in row.keywords if keyword.arg is not None)
    some = given[:1] == ["..."]
    given = given[1:] if some else given
    problems = []
    for signature in signatures(function):
        try:
            (signature.bind_partial if some else signature.bind)(*given, **keywords)
        except TypeError as error:
            problems.append(f"{error}: {signature}")
            continue
        wrong = [f"{want} is {name}" for want, name in zip(given, signature.parameters, strict=False) if want != name]
        wrong = [one for one in wrong if not one.startswith("_ is ")]
        fields = getattr(function, "model_fields", keywords)  # of pydantic, which may let any other keyword pass
        wrong += [f"no {name}" for name in keywords if name not in fields]
        if not wrong:
            return
        problems.append(f"{', '.join(wrong)}: {signature}")
    raise Missing("; ".join(problems))


def signatures(function: Any) -> list[inspect.Signature]:
    """One, or those that the documentation of a function in C++ lists. Raises Missing if there is none."""
    try:
        return [inspect.signature(function)]
    except (ValueError, TypeError):
        pass
    source = function.__init__ if inspect.isclass(function) else function
    lines = re.findall(r"^(?:\d+\. )?\w+\((.*)\) -> ", getattr(source, "__doc__", None) or "", re.MULTILINE)
    found = [_documented(line) for line in lines if not line.startswith("*args")]
    if not found:
        raise Missing("its signature is not known")
    if inspect.isclass(function):
        found = [one.replace(parameters=list(one.parameters.values())[1:]) for one in found]
    return found


def _documented(line: str) -> inspect.Signature:
    """From pybind11's `self: Store, port: int, world_size: int | None = None`."""
    flat = line
    while flat != (flat := re.sub(r"\[[^\[\]]*\]|\([^()]*\)|<[^<>]*>", "", flat)):
        pass
    parameters = []
    for one in filter(None, flat.split(", ")):
        name, _, rest = one.partition(":")
        default = None if "=" in rest else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name.strip(), inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def overridden(kind: type, root: str) -> Iterator[tuple[str, Callable[..., Any], Callable[..., Any]]]:
    """(name, ours, theirs) of every method of a subclass of ours that replaces one of its bases in package `root`."""
    bases = [base for base in kind.__mro__[1:] if base.__module__.partition(".")[0] == root]
    for name, ours in vars(kind).items():
        theirs = next((vars(base)[name] for base in bases if name in vars(base)), None)
        if inspect.isfunction(ours) and theirs is not None and name != "__init__":
            yield name, ours, getattr(theirs, "__func__", theirs)


def check_override(ours: Callable[..., Any], theirs: Callable[..., Any], by_name: bool = True) -> None:
    """Ours must take every call that theirs takes, positional and, unless not `by_name`, by keyword. Raises Missing."""
    own, base = (inspect.signature(one) for one in (ours, theirs))
    if by_name:
        own, base = _without_self(own), _without_self(base)
    plain = [one for one in base.parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)]
    positional = [one.name for one in plain if one.kind is not one.KEYWORD_ONLY]
    others = {one.name: None for one in plain if one.kind is one.KEYWORD_ONLY}
    named = {one.name: None for one in plain if one.kind is not one.POSITIONAL_ONLY}
    try:
        own.bind(*positional, **others)
        if by_name:
            own.bind(**named)
    except TypeError as error:
        raise Missing(f"{error}: ours {own}, theirs {base}") from error


def _without_self(signature: inspect.Signature) -> inspect.Signature:
    return signature.replace(parameters=[one for one in signature.parameters.values() if one.name != "self"])
