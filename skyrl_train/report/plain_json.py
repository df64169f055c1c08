"""JSON for pages: what a model wrote in it is text and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from skyrl_train.data.json_values import why_not_json


def to_json(value: Any) -> str:
    """JSON that every browser reads: numbers that are not finite are null, lone surrogates U+FFFD."""
    text = json.dumps(_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def plain(value: Any) -> Any:
    """What is left of a value in such JSON."""
    return json.loads(to_json(value))


def from_json(text: str | bytes | None, otherwise: Any) -> Any:
    """What a column or a file of JSON holds; `otherwise` if that is not JSON, or nested too deeply to be shown."""
    try:
        found = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return otherwise
    return otherwise if text is None or why_not_json(found) else found


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
