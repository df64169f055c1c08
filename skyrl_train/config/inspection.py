"""Keys and types of nested plain values, from the command line or from YAML: every problem, nothing raised."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.config.convert import Unfit, read
from skyrl_train.config.keys import canonical, find, nearest, spelt
from skyrl_train.config.problems import Problem, UnknownKey
from skyrl_train.config.safety import is_reference, unsafe
from skyrl_train.config.skyrl_keys import skyrl_key


def inspect(key: str, value: Any) -> list[Problem]:
    """What is wrong with a key and everything below it, before interpolations are resolved; "" is the root."""
    problems = list(unsafe(key, value))
    refused = {problem.key for problem in problems}
    return problems + [problem for problem in _misplaced(key, value) if problem.key not in refused]


def _misplaced(key: str, value: Any) -> Iterator[Problem]:
    known = find(key)
    if skyrl_key(key) is not None:
        return  # judged with the rest of the configuration, see skyrl_keys.py
    if key and known is None:
        yield UnknownKey(key, value, "a known key", unknown_key_advice(key))
    elif known is None or known.is_section:
        if isinstance(value, Mapping):
            for name, item in value.items():
                yield from _misplaced(f"{key}.{name}" if key else str(name), item)
        elif not is_reference(value):
            yield Problem(key, value, "a section", f"Set the keys below it, {key}.KEY=VALUE.")
    elif known.is_free and canonical(key) != known.name:
        return
    elif not is_reference(meant := spelt(known.name, value)):
        try:
            read(meant, known.hint)
        except Unfit as unfit:
            yield Problem(key, value, unfit.allowed, unfit.advice)


def unknown_key_advice(key: str) -> str:
    close = nearest(key)
    return f"Did you mean {close}?" if close else "docs/configuration.md lists all keys."
