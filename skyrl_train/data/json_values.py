"""Values that JSON carries: rows reach an environment's process as JSON, and its answers come back so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import date, time, timedelta
from decimal import Decimal
from pathlib import PurePath
from typing import Any
from uuid import UUID

MAX_DEPTH = 100
"""Lists and mappings inside each other. Python's JSON and templates recurse, up to about 1,000 calls in all."""
ALLOWED_TYPES_TEXT = "text, numbers, booleans, null, dates, and lists and mappings of these"
_SCALARS = (str, int, float, type(None))
"""Also what JSON writes as a mapping's key."""


def json_default(value: Any) -> Any:
    """Convert mappings to dicts, numpy and torch values to numbers and lists, and dates, decimals and paths to text.

    The `default` of `json.dumps`. Raises TypeError for anything else.
    """
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, date | time | timedelta | Decimal | PurePath | UUID):
        return str(value)
    raise TypeError(f"a value of type {type(value).__name__}, which JSON cannot carry")


def find_non_json_value(value: Any, default: Callable[[Any], Any] = json_default, depth: int = 0) -> str | None:
    """What in `value` JSON cannot carry, to follow "it holds"; None if it can.

    `default` converts what JSON does not know, as in `json.dumps`. Texts are not read, so large ones cost nothing.
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
        if not isinstance(item, _SCALARS) and (why := find_non_json_value(item, default, depth + 1)):
            return why
    return None
