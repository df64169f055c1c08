"""HTTP bodies as dataclasses: pydantic reads and describes them by the types of their fields.

Reading is strict: an unknown member, a wrong type, a number that is not finite is an error that names its place.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import SchemaValidator, to_json

MAX_MEMBERS = 4096
"""Members of one JSON object. Every unknown member costs an error of its own."""
FEW = Field(max_length=1 << 16)
"""Annotation of a list of lists or objects: pydantic lets no other thread run while it makes a million of them."""


class Body:
    """Base class of the dataclasses that are bodies. null stands for the default of a member."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )


class InvalidBodyError(Exception):
    """Received data is invalid; `param` is the path of the faulty member, empty for the whole body."""

    def __init__(self, param: str, problem: str, *, message: str | None = None):
        """`problem` continues a sentence that begins with the path; `message` replaces the whole sentence."""
        super().__init__(message or f"{param or 'The body'} {problem}")
        self.param = param


# -- JSON ------------------------------------------------------------------------------------------------------------


def read_json(body: bytes) -> Any:
    """Parse UTF-8 JSON, and drop members that are null. Raises Malformed, also for NaN, infinities and 1e999."""
    try:
        return json.loads(
            body.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite, object_hook=_members
        )
    except UnicodeDecodeError as error:
        raise InvalidBodyError("", f"is not UTF-8: byte {error.start} is {body[error.start]:#04x}.") from error
    except RecursionError as error:
        raise InvalidBodyError("", "is nested too deeply.") from error
    except ValueError as error:
        raise InvalidBodyError("", f"is not JSON: {error}.") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON")


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is too large for a number")
    return number


def _members(found: dict[str, Any]) -> dict[str, Any]:
    if len(found) > MAX_MEMBERS:
        raise InvalidBodyError("", f"holds an object of {len(found)} members; {MAX_MEMBERS} are allowed.")
    return {name: value for name, value in found.items() if value is not None} if None in found.values() else found


def write_json(value: Any) -> bytes:
    """Return dataclasses, arrays and plain values as JSON in ASCII; numbers that are not finite become null.

    ASCII, because readers of streams may take U+2028 for the end of a line.

    Raises PydanticSerializationError for values without a JSON form, such as tensors.
    """
    return to_json(value, ensure_ascii=True, inf_nan_mode="null", fallback=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON.")


# -- types -----------------------------------------------------------------------------------------------------------


_READING: dict[str, dict[str, Any]] = {
    "list": {"fail_fast": True},  # one error, not one for each of a million items
    "tuple": {"fail_fast": True, "strict": False},  # JSON has lists only
    "frozenset": {"fail_fast": True, "strict": False},
    "dataclass": {"strict": False},  # or only instances would do
    "str": {"max_length": 1 << 40},  # to count its characters is to check that it is Unicode
}


def _for_reading(schema: Any) -> Any:
    """Return a core schema of pydantic's with what _READING adds to each type, however deep."""
    if isinstance(schema, dict):
        return {name: _for_reading(part) for name, part in schema.items()} | _READING.get(schema.get("type", ""), {})
    return [_for_reading(part) for part in schema] if isinstance(schema, list) else schema


@cache
def _validator(kind: Any) -> SchemaValidator:
    return SchemaValidator(_for_reading(TypeAdapter(kind).core_schema))


def parse_body(kind: Any, given: Any) -> Any:
    """Convert `given` to a dataclass of the type `kind`.

    Args:
        kind: A subclass of Body.
        given: Parsed JSON, or JSON as bytes.

    Raises:
        Malformed: A member is wrong. The text says which one, what is allowed and what was given.
    """
    is_json = isinstance(given, bytes)
    try:
        return _validator(kind).validate_json(given) if is_json else _validator(kind).validate_python(given)
    except ValidationError as error:
        raise _malformed(error, kind, read_json(given) if is_json else given) from error


_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "string_unicode": "valid Unicode",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dataclass_type": "an object",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than_equal": "at most {le}",
    "too_long": "at most {max_length} items",
    "literal_error": "one of {expected}",
}


def _malformed(error: ValidationError, kind: Any, given: Any) -> InvalidBodyError:
    """Describe the first member that is wrong; one that is not known comes first, as it explains more."""
    details: list[Any] = error.errors(include_url=False)
    if details[0]["type"] == "json_invalid":  # Python's parser takes more than pydantic's
        return InvalidBodyError("", f"is not JSON: {details[0]['ctx']['error']}.")
    details.sort(key=lambda one: one["type"] != "unexpected_keyword_argument")
    details = [one for one in details if one["type"] == "too_long"] or details  # it was refused for nothing else
    member = details[0]["loc"][:1]
    placed = [(_path(one["loc"], given, one["type"] == "missing"), one) for one in details if one["loc"][:1] == member]
    param = max((path for path, _ in placed), key=len)  # of several alternatives the one that fits furthest
    alternatives = [one for path, one in placed if path == param]
    first = alternatives[0]
    if first["type"] == "unexpected_keyword_argument":
        known = getattr(kind, "__dataclass_fields__", ()) if len(first["loc"]) == 1 else ()
        close = difflib.get_close_matches(param[:100], known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "/openapi.json describes what is taken."
        return InvalidBodyError(param, f"is not known here. {hint}")
    if first["type"] == "missing":
        return InvalidBodyError(param, "is missing.")
    if first["type"] == "value_error":
        return InvalidBodyError(param, str(first["ctx"]["error"]))
    if first["type"] == "string_unicode" and param:
        return InvalidBodyError(param, "is not valid Unicode: it holds half of a surrogate pair.")
    if first["type"] == "is_instance_of":
        return InvalidBodyError(param, "does not travel over HTTP; leave it out.")
    allowed = " or ".join(
        dict.fromkeys(_EXPECTED.get(one["type"], "valid").format(**one.get("ctx", {})) for one in alternatives)
    )
    return InvalidBodyError(param, f"must be {allowed}, got {_shown(first['input'])}.")


def _path(places: Sequence[int | str], given: Any, missing: bool) -> str:
    """Return ("messages", 0, "content", "list[TextPart]", 1, "text") as messages[0].content[1].text.

    Args:
        places: Where pydantic found an error, names of alternatives included.
        given: What was read.
        missing: True if the last place is a member that `given` lacks.
    """
    path = ""
    for number, place in enumerate(places):
        if isinstance(place, int) and isinstance(given, list):
            path, given = f"{path}[{place}]", given[place]
        elif (
            isinstance(place, str)
            and isinstance(given, dict)
            and (place in given or (missing and number == len(places) - 1))
        ):
            path, given = join_path(path, place), given.get(place)
    return path


def join_path(path: str, name: str) -> str:
    """Return the path of a member of the value at `path`."""
    name = name if len(name) <= 100 else name[:97] + "..."
    return f"{path}.{name}" if path else name


def _shown(value: Any) -> str:
    """Return a value for an error message: short, and without traversing values that may be nested a thousand times."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
