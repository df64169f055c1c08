"""HTTP bodies as dataclasses, which pydantic parses and describes by the types of their fields.

Parsing is strict: an unknown member, a wrong type or a number that is not finite raises an error that names the member.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn

import numpy as np
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic_core import SchemaValidator, to_json

MAX_MEMBERS = 4096
"""Maximum number of members of one JSON object. pydantic reports every unknown member, which takes time."""
FEW = Field(max_length=1 << 16)
"""Annotation of a list of lists or objects, whose length is limited: pydantic blocks all threads while it parses
one."""


class Body:
    """The base class of dataclasses that are HTTP bodies. A member that is null takes its default."""

    __slots__ = ()
    __pydantic_config__ = ConfigDict(
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        use_attribute_docstrings=True,
    )


class LenientBody:
    """The base class of dataclasses that are bodies of chat APIs, or parts of them.

    Unknown members are ignored, because clients return parts of answers with members of their own. A member that is
    null takes its default. `check_unknown_members` handles the members of the body itself.
    """

    __slots__ = ()
    __pydantic_config__ = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, use_attribute_docstrings=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: Any) -> Any:
        return _drop_null_members(value) if isinstance(value, dict) else value


class InvalidBodyError(Exception):
    """An error in received data. `param` is the path of the invalid member, or empty for the whole body."""

    def __init__(self, param: str, problem: str, *, message: str | None = None):
        """Create the error.

        Args:
            param: Path of the member, such as "messages[0].role"; empty for the whole body.
            problem: The rest of a sentence that begins with the path.
            message: Complete message that replaces this sentence.
        """
        super().__init__(message or f"{param or 'The body'} {problem}")
        self.param = param


# -- JSON ------------------------------------------------------------------------------------------------------------


def read_json(body: bytes, *, keep_nulls: bool = False) -> Any:
    """Parse UTF-8 JSON, and drop the members of objects that are null.

    Args:
        body: The JSON text.
        keep_nulls: True keeps these members.

    Raises:
        InvalidBodyError: The body is not UTF-8 or not JSON, contains NaN, infinity or a number that overflows, is
            nested
            too deeply, or has an object with more than MAX_MEMBERS members.
    """
    try:
        return json.loads(
            body.decode("utf-8"),
            parse_constant=_reject_constant,
            parse_float=_parse_finite,
            object_hook=_check_size if keep_nulls else _drop_null_members,
        )
    except UnicodeDecodeError as error:
        raise InvalidBodyError("", f"is not UTF-8: byte {error.start} is {body[error.start]:#04x}.") from error
    except RecursionError as error:
        raise InvalidBodyError("", "is nested too deeply.") from error
    except ValueError as error:
        raise InvalidBodyError("", f"is not JSON: {error}.") from error


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number in JSON")


def _parse_finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"the number {text[:40]} is too large")
    return number


def _check_size(members: dict[str, Any]) -> dict[str, Any]:
    if len(members) > MAX_MEMBERS:
        raise InvalidBodyError("", f"holds an object of {len(members)} members; at most {MAX_MEMBERS} are allowed.")
    return members


def _drop_null_members(members: dict[str, Any]) -> dict[str, Any]:
    _check_size(members)
    if None not in members.values():
        return members
    return {name: value for name, value in members.items() if value is not None}


def write_json(value: Any) -> bytes:
    """Return dataclasses, arrays and plain values as ASCII JSON. Numbers that are not finite become null.

    The output is ASCII because readers of streams may treat U+2028 as the end of a line.

    Raises:
        PydanticSerializationError: A value has no JSON form, for example a tensor.
    """
    return to_json(value, ensure_ascii=True, inf_nan_mode="null", fallback=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be written as JSON.")


# -- types -----------------------------------------------------------------------------------------------------------


_PARSING_OPTIONS: dict[str, dict[str, Any]] = {
    "list": {"fail_fast": True},  # report one error and not one for each of a million items
    "tuple": {"fail_fast": True, "strict": False},  # JSON has only lists
    "frozenset": {"fail_fast": True, "strict": False},
    "dataclass": {"strict": False},  # strict mode would accept only instances
    "str": {"max_length": 1 << 40},  # counting the characters checks that the string is valid Unicode
}


def _with_parsing_options(schema: Any) -> Any:
    """Return a pydantic core schema with _PARSING_OPTIONS added to each type at every depth."""
    if isinstance(schema, dict):
        options = _PARSING_OPTIONS.get(schema.get("type", ""), {})
        return {name: _with_parsing_options(part) for name, part in schema.items()} | options
    return [_with_parsing_options(part) for part in schema] if isinstance(schema, list) else schema


@cache
def _validator(kind: Any) -> SchemaValidator:
    return SchemaValidator(_with_parsing_options(TypeAdapter(kind).core_schema))


def parse_body(kind: Any, body: Any) -> Any:
    """Convert a body to an instance of the type `kind`.

    Args:
        kind: A subclass of Body.
        body: Parsed JSON, or JSON as bytes.

    Raises:
        InvalidBodyError: A member is invalid. The message names the member, what is allowed and its value.
    """
    is_json = isinstance(body, bytes)
    try:
        return _validator(kind).validate_json(body) if is_json else _validator(kind).validate_python(body)
    except ValidationError as error:
        raise _to_invalid_body_error(error, kind, read_json(body) if is_json else body) from error


_MAX_NAMES_TO_COMPARE = 64


def check_unknown_members(kind: Any, body: Any) -> list[str]:
    """Return the members of a body that are ignored because no parameter has their name.

    Args:
        kind: A subclass of LenientBody.
        body: Parsed JSON.

    Raises:
        InvalidBodyError: A member's name is close to that of a parameter, so that it is probably misspelled.
    """
    if not isinstance(body, dict):
        return []
    known = kind.__dataclass_fields__
    unknown = [name for name, value in body.items() if name not in known and value is not None]
    for name in unknown[:_MAX_NAMES_TO_COMPARE]:
        if close := difflib.get_close_matches(name[:100], known, n=1, cutoff=0.85):
            raise InvalidBodyError(join_path("", name), f"is not a known member. Did you mean {close[0]!r}?")
    return unknown


_EXPECTED = {
    "int_type": "an integer",
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


def _to_invalid_body_error(error: ValidationError, kind: Any, body: Any) -> InvalidBodyError:
    """Describe the first invalid member. Unknown members come first, because they often explain the other errors."""
    details: list[Any] = error.errors(include_url=False)
    if details[0]["type"] == "json_invalid":  # Python's parser, which made `body`, accepts more than pydantic's
        return InvalidBodyError("", f"is not JSON: {details[0]['ctx']['error']}.")
    details.sort(key=lambda detail: detail["type"] != "unexpected_keyword_argument")
    # A list that is too long is the actual error: it fits one of the alternatives otherwise.
    details = [detail for detail in details if detail["type"] == "too_long"] or details
    member = details[0]["loc"][:1]
    located = [
        (_path(detail["loc"], body, detail["type"] == "missing"), detail)
        for detail in details
        if detail["loc"][:1] == member
    ]
    param = max((path for path, _ in located), key=len)  # the alternative that fits best fails at the longest path
    alternatives = [detail for path, detail in located if path == param]
    first = alternatives[0]
    if first["type"] == "unexpected_keyword_argument":
        known = getattr(kind, "__dataclass_fields__", ()) if len(first["loc"]) == 1 else ()
        close = difflib.get_close_matches(param[:100], known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "See /openapi.json for the known members."
        return InvalidBodyError(param, f"is not a known member. {hint}")
    if first["type"] == "missing":
        return InvalidBodyError(param, "is missing.")
    if first["type"] == "value_error":
        return InvalidBodyError(param, str(first["ctx"]["error"]))
    if first["type"] == "string_unicode" and param:
        return InvalidBodyError(param, "is not valid Unicode: it holds half of a surrogate pair.")
    if first["type"] == "is_instance_of":
        return InvalidBodyError(param, "cannot be sent over HTTP; leave it out.")
    allowed = " or ".join(
        dict.fromkeys(_EXPECTED.get(detail["type"], "valid").format(**detail.get("ctx", {})) for detail in alternatives)
    )
    return InvalidBodyError(param, f"must be {allowed}, got {_shorten(first['input'])}.")


def _path(location: Sequence[int | str], body: Any, missing: bool) -> str:
    """Return ("messages", 0, "content", "list[TextPart]", 1, "text") as messages[0].content[1].text.

    Args:
        location: Location of an error as pydantic reports it, including the names of alternatives.
        body: The value that was parsed.
        missing: True if the last part of the location is a member that `body` lacks.
    """
    path = ""
    for number, part in enumerate(location):
        if isinstance(part, int) and isinstance(body, list):
            path, body = f"{path}[{part}]", body[part]
        elif (
            isinstance(part, str)
            and isinstance(body, dict)
            and (part in body or (missing and number == len(location) - 1))
        ):
            path, body = join_path(path, part), body.get(part)
    return path


def join_path(path: str, name: str) -> str:
    """Return the path of the member `name` of the value at `path`; long names are shortened."""
    name = name if len(name) <= 100 else name[:97] + "..."
    return f"{path}.{name}" if path else name


def _shorten(value: Any) -> str:
    """Return a short text of a value for an error message, without traversing objects or lists."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
