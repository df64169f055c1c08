"""Reads files of runs that may be anything: copied from elsewhere, half written, damaged, or made to do harm.

`to_json` and `plain` give pages such content as JSON in which text is text and nothing else.
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
"""PyYAML reads some 50 KB a second."""
MAX_LINES_BYTES = 2 << 30
"""Of metrics.jsonl: millions of steps."""
MAX_STEP = 2**31 - 1
"""The largest step of a run: rollouts hold it in 32 bits."""
_MAX_YAML_NODES = 20_000
"""Values of a YAML file, those behind an alias once for each use."""
_MAX_NUMBER_LENGTH = 400
"""Characters of a number: PyYAML computes numbers in base 60, and their size is not limited."""


@contextmanager
def open_untrusted(file: Path, max_bytes: int | None = None) -> Iterator[BinaryIO]:
    """Open a regular file for reading; whatever goes wrong with it inside is an OSError that names it.

    Raises FileNotFoundError, and OSError for anything else that is not a regular file (FIFOs and devices are not waited
    for), for a file of more than `max_bytes`, and for any exception that its content causes inside.
    """
    descriptor = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{escape_control_chars(str(file))} is not a regular file.")
        if max_bytes is not None and status.st_size > max_bytes:
            raise OSError(
                f"{escape_control_chars(str(file))} has {status.st_size} bytes; at most {max_bytes} are read."
            )
        with os.fdopen(descriptor, "rb", closefd=False) as handle:
            yield handle
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:
        why = escape_control_chars(
            str(error) if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {error}"
        )
        raise OSError(
            why if str(file) in why else f"{escape_control_chars(str(file))} cannot be read: {why}"
        ) from error
    finally:
        os.close(descriptor)


def is_step(value: Any) -> TypeGuard[int]:
    """True for a whole number that can be a step, or a number of steps."""
    return type(value) is int and 0 <= value <= MAX_STEP


def read_bytes(file: Path, max_bytes: int) -> bytes:
    """Return a file's content. Raises OSError as `opened` does."""
    with open_untrusted(file, max_bytes) as handle:
        return handle.read(max_bytes)


def read_json_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file; an empty one if it cannot be read or holds something else."""
    try:
        found = from_json(read_bytes(file, MAX_JSON_BYTES), {})
    except OSError:
        return {}
    return found if isinstance(found, dict) else {}


def parse_yaml_mapping(content: bytes) -> dict[str, Any]:
    """Return the mapping that YAML holds, as JSON would hold it. Raises ValueError if it holds none.

    Aliases are followed to a bounded number of values: a few lines of them can stand for billions.
    """
    try:
        loader = yaml.SafeLoader(content.decode())
        try:
            node = loader.get_single_node()
            found = loader.construct_document(node) if node and _count(node, {}) <= _MAX_YAML_NODES else None
        finally:
            loader.dispose()
        value = from_json(json.dumps(found, default=str), None)
    except Exception as error:  # tags and keys make PyYAML raise anything
        raise ValueError(f"not YAML: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"not a mapping of at most {_MAX_YAML_NODES} values")
    return value


def _count(node: yaml.Node, known: dict[int, float]) -> float:
    """Return the number of values in a node: infinity if it contains itself, or a number that is too long."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = float("inf")  # until it is known
    if isinstance(node, yaml.ScalarNode):
        is_number = node.tag in ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
        count = float("inf") if is_number and len(node.value) > _MAX_NUMBER_LENGTH else 1.0
    else:
        inner = [one for pair in node.value for one in pair] if isinstance(node, yaml.MappingNode) else node.value
        count = 1 + sum(_count(one, known) for one in inner)
    known[id(node)] = count
    return count


def to_json(value: Any) -> str:
    """JSON that every browser reads: numbers that are not finite are null, lone surrogates U+FFFD."""
    text = json.dumps(replace_non_finite(value), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def to_json_value(value: Any) -> Any:
    """What is left of a value in such JSON."""
    return json.loads(to_json(value))


def from_json(text: str | bytes | None, default: Any) -> Any:
    """What a column or a file of JSON holds; `otherwise` if that is not JSON, or nested too deeply to be shown."""
    try:
        found = None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return default
    return default if text is None or find_non_json_value(found) else found


def replace_non_finite(value: Any) -> Any:
    """Return the value with None in the place of numbers that are not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): replace_non_finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(one) for one in value]
    return value
