"""Checks and conversion of values that are sent as JSON, such as rows and responses of environment processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any
from uuid import UUID

MAX_DEPTH = 100
"""Maximum nesting of lists and mappings. Python's JSON module and templates recurse, up to about 1,000 calls."""
ALLOWED_TYPES_TEXT = "text, numbers, booleans, null, dates, and lists and mappings of these"
_SCALARS = (str, int, float, type(None))
"""Types that JSON represents directly. They are also the types of keys of mappings."""


def json_default(value: Any) -> Any:
    """Convert a value that JSON does not support. Pass this function to `json.dumps` as `default`.

    Mappings become dicts, numpy and torch values numbers and lists, and dates, decimals, paths and UUIDs text.

    Raises:
        TypeError: The value has another type.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, date | time | timedelta | Decimal | PurePath | UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__}, which JSON cannot represent")


def find_non_json_value(value: Any, default: Callable[[Any], Any] = json_default, depth: int = 0) -> str | None:
    """Return a description of the first part of a value that JSON cannot represent.

    Args:
        value: The value.
        default: Function that converts values of other types, as in `json.dumps`. It raises TypeError with a
            description.
        depth: Number of lists and mappings around the value. More than MAX_DEPTH are not allowed.

    Returns:
        A noun phrase that follows "holds" in a message, or None if JSON can represent the value.
    """
    if isinstance(value, _SCALARS):
        return None
    if depth > MAX_DEPTH:
        return f"lists or mappings more than {MAX_DEPTH} deep"
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, _SCALARS):
                return f"a mapping with a key of type {type(key).__name__}"
        inner: Any = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    else:
        try:
            inner = (default(value),)
        except TypeError as error:
            return str(error)
    for item in inner:
        if not isinstance(item, _SCALARS) and (description := find_non_json_value(item, default, depth + 1)):
            return description
    return None
