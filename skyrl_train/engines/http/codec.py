"""Converts dataclasses to JSON and back, by their annotations: only numbers, text, lists and objects, no code.

Reading is strict: an unknown member, a wrong type, a number that is none is an error that names its place.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, NoReturn, Union, get_args, get_origin, get_type_hints

import numpy as np


class Malformed(Exception):
    """Received data is invalid; `param` is the path of the faulty member, empty for the whole body."""

    def __init__(self, param: str, problem: str, *, message: str | None = None):
        """`problem` continues a sentence that begins with the path; `message` replaces the whole sentence."""
        super().__init__(message or f"{param or 'The body'} {problem}")
        self.param = param


class Untransferable(TypeError):
    """A value that has no JSON form."""


def read_json(body: bytes) -> Any:
    """Parse UTF-8 JSON. Raises Malformed, also for NaN and infinities, even in the form of 1e999."""
    try:
        return json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except UnicodeDecodeError as error:
        raise Malformed("", f"is not UTF-8: byte {error.start} is {body[error.start]:#04x}.") from error
    except RecursionError as error:
        raise Malformed("", "is nested too deeply.") from error
    except ValueError as error:
        raise Malformed("", f"is not JSON: {error}.") from error


def write_json(value: Any) -> bytes:
    """`encode(value)` as UTF-8 JSON."""
    return json.dumps(encode(value), allow_nan=False, separators=(",", ":")).encode()


def encode(value: Any) -> Any:
    """The value in a form that json.dumps accepts. Non-finite numbers become null. Raises Untransferable."""
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value) if math.isfinite(value) else None
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, np.ndarray):
        return encode(value.tolist())
    if isinstance(value, list | tuple):
        kinds = set(map(type, value))
        if kinds <= {int, str} or (kinds == {float} and all(map(math.isfinite, value))):
            return list(value)
        return [encode(item) for item in value]
    if isinstance(value, frozenset | set):
        return sorted(value)
    if isinstance(value, Mapping):
        return {str(name): encode(item) for name, item in value.items()}
    raise Untransferable(f"{type(value).__name__} cannot be written as JSON.")


def decode(kind: Any, value: Any, param: str = "") -> Any:
    """Convert parsed JSON to a value of type `kind`. Raises Malformed.

    null stands for the default of a member that has one and is no option itself, and for NaN in a list of numbers.
    """
    origin = get_origin(kind)
    if kind is bool or kind is NoneType:
        return value if type(value) is kind else _wrong(kind, value, param)
    if kind is int:
        return value if type(value) is int else _wrong(kind, value, param)
    if kind is float:
        return _number(value, param)
    if kind is str:
        return _text(value, param)
    if is_dataclass(kind):
        return _object(kind, value, param)
    if origin in (Union, UnionType):
        return _option(get_args(kind), value, param)
    if origin in (list, tuple, frozenset, Sequence):
        items = _items(get_args(kind)[0], value, param)
        return items if origin in (list, Sequence) else origin(items)
    if origin is np.ndarray:
        (scalar,) = get_args(get_args(kind)[1])
        if not issubclass(scalar, np.integer):
            return np.array(_items(float, value, param), scalar)
        items, bounds = _items(int, value, param), np.iinfo(scalar)
        if items and not bounds.min <= min(items) <= max(items) <= bounds.max:
            raise Malformed(param, f"must be whole numbers from {bounds.min} to {bounds.max}.")
        return np.array(items, scalar)
    if origin in (dict, Mapping):
        if type(value) is not dict:
            _wrong(dict, value, param)
        return {_text(name, param): decode(get_args(kind)[1], item, below(param, name)) for name, item in value.items()}
    raise Malformed(param, f"does not travel over HTTP; it must be left out, got {seen(value)}.")


def _object(kind: Any, value: Any, param: str) -> Any:
    if type(value) is not dict:
        _wrong(dict, value, param)
    members = _members(kind)
    for name in value:
        if name not in members:
            close = difflib.get_close_matches(name[:100], members, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else f" Known: {', '.join(members)}."
            raise Malformed(below(param, name), f"is not known here.{hint}")
    found = {}
    for name, (hint_type, required) in members.items():
        given = value.get(name)
        if name not in value and required:
            raise Malformed(below(param, name), "is missing.")
        if name not in value or (given is None and not required and not _optional(hint_type)):
            continue
        found[name] = decode(hint_type, given, below(param, name))
    return kind(**found)


def _items(kind: Any, value: Any, param: str) -> list[Any]:
    if type(value) is not list:
        _wrong(list, value, param)
    if kind in (int, float) and set(map(type, value)) <= {kind}:
        return value
    if kind is float:
        return [math.nan if item is None else _number(item, f"{param}[{i}]") for i, item in enumerate(value)]
    return [decode(kind, item, f"{param}[{index}]") for index, item in enumerate(value)]


def _option(kinds: Sequence[Any], value: Any, param: str) -> Any:
    """The value as the first alternative that it fits. Raises the error of the alternative that fits best."""
    if type(value) in kinds:
        return decode(type(value), value, param)
    errors = []
    for kind in kinds:
        try:
            return decode(kind, value, param)
        except Malformed as error:
            errors.append(error)
    inner = [error for error in errors if error.param != param]
    if inner:
        raise max(inner, key=lambda error: len(error.param))
    allowed = " or ".join(dict.fromkeys(_name(kind) for kind in kinds if kind is not NoneType))
    raise Malformed(param, f"must be {allowed}, got {seen(value)}.")


@cache
def _members(kind: type) -> dict[str, tuple[Any, bool]]:
    """Name of a field -> (type, whether it is required)."""
    hints = get_type_hints(kind)
    return {
        field.name: (hints[field.name], field.default is MISSING and field.default_factory is MISSING)
        for field in fields(kind)
    }


def _optional(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind)


def _number(value: Any, param: str) -> float:
    if type(value) not in (int, float):
        _wrong(float, value, param)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        _wrong(float, value, param)
    return number


def _text(value: Any, param: str) -> str:
    if type(value) is not str:
        _wrong(str, value, param)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise Malformed(param, "is not valid Unicode: it holds half of a surrogate pair.") from error
    return value


def _wrong(kind: Any, value: Any, param: str) -> NoReturn:
    raise Malformed(param, f"must be {_name(kind)}, got {seen(value)}.")


_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a string",
    dict: "an object",
    list: "a list",
    NoneType: "null",
}


def _name(kind: Any) -> str:
    plain = get_origin(kind) or kind
    if is_dataclass(plain) or plain is Mapping:
        plain = dict
    elif plain in (tuple, frozenset, Sequence, np.ndarray):
        plain = list
    if plain is list and get_args(kind):
        return f"a list of {_name(get_args(kind)[0]).removeprefix('a ').removeprefix('an ')}s"
    return _NAMES.get(plain, "null")


def seen(value: Any) -> str:
    """A value for an error message: short, and without traversing values that may be nested a thousand times."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def below(param: str, name: str) -> str:
    """The path of a member of the value at `path`."""
    name = name if len(name) <= 100 else name[:97] + "..."
    return f"{param}.{name}" if param else name


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number
