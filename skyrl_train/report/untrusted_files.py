"""Readers for files of runs that may be incomplete, damaged or malicious, for example copies from elsewhere.

`to_json` and `to_json_value` turn such content into JSON that pages can show as literal text.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

import yaml

from skyrl_train.data.json_values import find_non_json_value
from skyrl_train.terminal import escape_control_chars

MAX_JSON_BYTES = 16 << 20
MAX_YAML_BYTES = 256 << 10
"""Maximum size of a YAML file. PyYAML parses about 50 KB per second."""
MAX_LINES_BYTES = 2 << 30
"""Maximum size of a metrics.jsonl, enough for millions of steps."""
MAX_STEP = 2**31 - 1
"""Maximum step of a run: rollout files store it in 32 bits."""
_MAX_YAML_NODES = 20_000
"""Maximum number of values in a YAML file. A value counts once for each use of its alias."""
_MAX_NUMBER_LENGTH = 400
"""Maximum number of characters in a YAML number: PyYAML computes base-60 numbers of any size."""


@contextmanager
def open_untrusted(file: Path, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading, without blocking on FIFOs and devices.

    Args:
        file: File to open.
        max_bytes: Maximum size; None for no limit.

    Raises:
        FileNotFoundError: If the file does not exist.
        PermissionError: If the file may not be read.
        OSError: If it is not a regular file or is too large. Any other exception that is raised inside the context
            becomes an OSError that names the file.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{escape_control_chars(str(file))} is not a regular file.")
        if max_bytes is not None and status.st_size > max_bytes:
            name = escape_control_chars(str(file))
            raise OSError(f"{name} has {status.st_size} bytes; at most {max_bytes} are allowed.")
        with os.fdopen(descriptor, "rb", closefd=False) as handle:
            yield handle
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        reason = escape_control_chars(
            str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        )
        raise OSError(
            reason if str(file) in reason else f"{escape_control_chars(str(file))} cannot be read: {reason}"
        ) from error
    finally:
        os.close(descriptor)


def is_step(value: Any) -> TypeGuard[int]:
    """True if a value is an integer from 0 to MAX_STEP, and so can be a step or a number of steps."""
    return type(value) is int and 0 <= value <= MAX_STEP


def read_bytes(file: Path, max_bytes: int) -> bytes:
    """Return the content of a file. Raises OSError as `open_untrusted` does."""
    with open_untrusted(file, max_bytes) as handle:
        return handle.read(max_bytes)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file cannot be read, is too large or holds something else."""
    try:
        value = from_json(read_bytes(file, MAX_JSON_BYTES), {})
    except OSError:
        return {}
    return value if isinstance(value, dict) else {}


def parse_yaml_mapping(content: bytes) -> dict[str, Any]:
    """Return the mapping in a YAML document, with JSON types only: other values become text, and so do keys.

    Raises:
        ValueError: If the content is not valid YAML, not a mapping, or has more than 20,000 values. A value counts once
            for each use of its alias, because a few lines of aliases can expand to billions of values.
    """
    try:
        loader = yaml.SafeLoader(content.decode())
        try:
            node = loader.get_single_node()
            is_small = node is not None and _count(node, {}) <= _MAX_YAML_NODES
            document = loader.construct_document(node) if node is not None and is_small else None
        finally:
            loader.dispose()
        value = from_json(json.dumps(document, default=str), None)
    except Exception as error:  # PyYAML raises exceptions of any class for some tags and keys
        raise ValueError(f"not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"not a mapping of at most {_MAX_YAML_NODES} values")
    return value


def _count(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a node; infinity if it contains itself or a number that is too long."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = float("inf")  # the result if the node contains itself
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        count = float("inf") if is_number and len(node.value) > _MAX_NUMBER_LENGTH else 1.0
    else:
        is_mapping = isinstance(node, yaml.MappingNode)
        children = [child for pair in node.value for child in pair] if is_mapping else node.value
        count = 1 + sum(_count(child, known) for child in children)
    known[id(node)] = count
    return count


def to_json(value: Any) -> str:
    """Return JSON that every browser can parse: null for numbers that are not finite, U+FFFD for lone surrogates."""
    text = json.dumps(replace_non_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_json_value(value: Any) -> Any:
    """Return a value after a round trip through `to_json`."""
    return json.loads(to_json(value))


def from_json(text: str | bytes | None, default: Any) -> Any:
    """Return the value of a JSON text; `default` if it is None, not JSON, or nested too deeply."""
    try:
        value = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return default
    return default if text is None or find_non_json_value(value) else value


def replace_non_finite(value: Any) -> Any:
    """Return a JSON value with None for numbers that are not finite, text for keys, and lists for tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return value
