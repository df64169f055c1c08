"""Placeholders in commands of agents, such as `{base_url}` and `{row.question}`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.data.messages import Prompt

NAMES = ("base_url", "model", "prompt", "uid")
ALLOWED = "{base_url}, {model}, {prompt}, {uid} or {row.COLUMN}"
_NAME = r"[A-Za-z_][\w.-]*"
_PLACEHOLDER = re.compile(rf"\{{(\{{{_NAME}\}})\}}|(?<!\$)\{{({_NAME})\}}")
"""A name in doubled braces, or in braces. Other braces, as in JSON, and shell variables such as ${HOME} are text."""


@dataclass(frozen=True)
class PlaceholderValues:
    """Values of the placeholders of one episode."""

    base_url: str
    model: str
    prompt: str
    uid: str
    row: Mapping[str, Any]


def prompt_text(prompt: Prompt) -> str:
    """Return the value of `{prompt}`: the texts of the row's messages, with an empty line between them."""
    return "\n\n".join(str(message.get("content") or "") for message in prompt.messages)


def find_placeholders(value: Any) -> Iterator[str]:
    """Yield the names of all placeholders in a text, or in the texts of nested lists and mappings."""
    if isinstance(value, str):
        for match in _PLACEHOLDER.finditer(value):
            if match[2]:
                yield match[2]
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from find_placeholders(item)
    elif isinstance(value, Sequence):
        for item in value:
            yield from find_placeholders(item)


def is_placeholder(name: str) -> bool:
    """True if a name in braces is a placeholder: one of NAMES, or `row.` and the path of a column."""
    return name in NAMES or (name.startswith("row.") and all(name.split(".")))


def find_column(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a row at a path such as "reward_spec.ground_truth".

    Raises:
        KeyError: The row has no such value. Its argument is the first part of the path that is missing.
    """
    value: Any = row
    for index, part in enumerate(parts := path.split(".")):
        if not isinstance(value, Mapping) or value.get(part) is None:
            raise KeyError(".".join(parts[: index + 1]))
        value = value[part]
    return value


def expand(value: Any, values: PlaceholderValues) -> Any:
    """Return a text, or nested lists and mappings of texts, with the values of an episode.

    Texts of a row are inserted unchanged, other values as JSON. A name in doubled braces keeps single ones.

    Args:
        value: The text, list or mapping.
        values: Values of the placeholders.

    Raises:
        KeyError: The row lacks a column.
    """
    if isinstance(value, str):
        return _PLACEHOLDER.sub(lambda match: match[1] or _format(match[2], values), value)
    if isinstance(value, Mapping):
        return {key: expand(item, values) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [expand(item, values) for item in value]
    return value


def _format(name: str, values: PlaceholderValues) -> str:
    content = find_column(values.row, name.removeprefix("row.")) if name.startswith("row.") else getattr(values, name)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
