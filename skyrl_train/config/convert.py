"""Plain values -> the types of the dataclasses, strictly: text is no number, 1 is not true, NaN fits no type."""

from __future__ import annotations

import math
import sys
import typing
from collections.abc import Callable
from typing import Any, TypeVar

from skyrl_train.config.keys import arms, hints
from skyrl_train.config.section import Section

S = TypeVar("S", bound=Section)

NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "text", type(None): "null"}


class Unfit(Exception):
    """A value that is not of its key's type."""

    def __init__(self, allowed: str, advice: str = ""):
        super().__init__(allowed, advice)
        self.allowed = allowed
        self.advice = advice


def describe(hint: Any) -> str:
    """A type in words."""
    if hint in NAMES:
        return NAMES[hint]
    if len(arms(hint)) > 1:
        return " or ".join(describe(arm) for arm in arms(hint))
    if typing.get_origin(hint) is list:
        return f"a list ({describe(typing.get_args(hint)[0])} each)"
    return "a mapping" if typing.get_origin(hint) is dict else "any value"


def convert(value: Any, hint: Any) -> Any:
    """The value as the hint's type. Raises Unfit.

    What is converted: integers to floats, numbers to text, a single text to a list of one.
    """
    for arm in arms(hint):
        if _fits(value, arm):
            if arm is float:
                return float(value)
            if typing.get_origin(arm) is list:
                return [convert(item, typing.get_args(arm)[0]) for item in value]
            return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and str in arms(hint):
        return str(value)
    if isinstance(value, str) and list[str] in arms(hint):
        if value.startswith("["):
            raise Unfit(describe(hint), "It is quoted text now: write \"key=['a','b']\" with the quotes around it all.")
        return [value]
    raise Unfit(describe(hint), _advice(value, hint))


def read(value: Any, hint: Any) -> Any:
    """As `convert`, for what a person wrote: null or an empty text can stand for an empty list, null for an empty
    mapping, and an empty text for null."""
    if value == "" and typing.get_origin(hint) is list:
        return []
    if value is None and typing.get_origin(hint) in (list, dict):
        return typing.get_origin(hint)()
    if isinstance(value, str) and not value and {str, type(None)} <= set(arms(hint)):
        return None
    return convert(value, hint)


def _fits(value: Any, arm: Any) -> bool:
    if arm is Any:
        return True
    if arm is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if arm is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(arm) is list:
        return isinstance(value, (list, tuple)) and not any(_misfit(item, typing.get_args(arm)[0]) for item in value)
    return isinstance(value, typing.get_origin(arm) or arm)


def _misfit(item: Any, hint: Any) -> bool:
    try:
        convert(item, hint)
    except Unfit:
        return True
    return False


def _advice(value: Any, hint: Any) -> str:
    if isinstance(value, str) and not {int, float, bool}.isdisjoint(arms(hint)):
        try:
            number = float(value)
        except ValueError:
            return ""
        return "Write the number without quotes." if math.isfinite(number) else ""
    if isinstance(value, float) and value.is_integer() and int in arms(hint):
        return f"Write {int(value)}."
    if value in (0, 1) and bool in arms(hint):
        return f"Write {str(bool(value)).lower()}."
    return ""


def build(section: type[S], leaf: Callable[[str, Any, Any], Any], prefix: str = "") -> S:
    """A section whose values are `leaf(key, type, default)`, all the way down."""
    made = {}
    defaults = section()
    for name, hint in hints(section).items():
        default = getattr(defaults, name)
        if isinstance(default, Section):
            made[name] = build(type(default), leaf, f"{prefix}{name}.")
        else:
            made[name] = leaf(prefix + name, hint, default)
    return section(**made)
