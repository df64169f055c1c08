"""Checks of nested plain values from YAML or the command line, and their conversion to the types of the dataclasses.

The checks find code to run, secrets of the environment, unknown keys and wrong types. Types are strict: text is not a
number, 1 is not true, and NaN is never valid.

Hydra and OmegaConf can call any function that a value names (`_target_`, resolvers), and a resolved configuration is
printed, saved and sent to trackers. Therefore values may only refer to other keys and to some environment variables.
"""

from __future__ import annotations

import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from skyrl_train.config.keys import (
    canonical_key,
    canonical_value,
    field_types,
    find_key,
    suggest_key,
    suggest_own_environment_key,
    union_members,
)
from skyrl_train.config.problems import Problem, UnknownKey
from skyrl_train.config.redaction import is_credential_name
from skyrl_train.config.section import Section
from skyrl_train.config.skyrl_keys import find_skyrl_key


def find_value_problems(key: str, value: Any) -> list[Problem]:
    """Return the problems of a key and of everything below it, before interpolations are resolved.

    Args:
        key: Dotted name of a key or section; "" is the root.
        value: Its plain value, nested for a section.

    Returns:
        Unsafe values, unknown keys and wrong types. The type of an unsafe value is not checked.
    """
    problems = list(find_unsafe_values(key, value))
    unsafe_keys = {problem.key for problem in problems}
    return problems + [problem for problem in _find_key_problems(key, value) if problem.key not in unsafe_keys]


def _find_key_problems(key: str, value: Any) -> Iterator[Problem]:
    known = find_key(key)
    if find_skyrl_key(key) is not None:
        return  # skyrl_keys.find_skyrl_key_problems checks it with the complete configuration
    if key and known is None:
        yield UnknownKey(key, value, "a known key", unknown_key_advice(key))
    elif known is None or known.is_section:
        if isinstance(value, Mapping):
            for name, item in value.items():
                yield from _find_key_problems(f"{key}.{name}" if key else str(name), item)
        elif not is_interpolation(value):
            yield Problem(key, value, "a section", f"Set the keys below it: {key}.KEY=VALUE.")
    elif known.is_free_form and canonical_key(key) != known.name:
        return
    elif not is_interpolation(canonical := canonical_value(known.name, value)):
        try:
            parse_value(canonical, known.type_hint)
        except InvalidValue as invalid:
            yield Problem(key, value, invalid.allowed, invalid.advice)


def unknown_key_advice(key: str) -> str:
    """Return the advice for an unknown key: the most similar known key, or where all keys are listed."""
    if own_key := suggest_own_environment_key(key):
        return f"Did you mean {own_key}? It holds the settings of environments that are not built in."
    close = suggest_key(key)
    return f"Did you mean {close}?" if close else "docs/reference/configuration/index.md lists all keys."


# -- Code and secrets


ALLOWED_RESOLVERS = frozenset({"oc.env"})
INSTANTIATE_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})

PUBLIC_VARIABLES = frozenset({"HOME", "PWD", "TMPDIR", "SCRATCH", "USER", "LOGNAME", "HOSTNAME"})
PUBLIC_VARIABLE_SUFFIXES = ("_DIR", "_HOME", "_PATH", "_ROOT", "_FOLDER", "_JOB_ID", "_JOB_NAME")

_KEY_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_][\w.\[\]-]*\}")
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,[^${}]*)?\}")


def is_interpolation(value: Any) -> bool:
    """True if a value is text with an interpolation, which OmegaConf replaces when it resolves the configuration."""
    return isinstance(value, str) and "${" in value


def is_public_variable(variable: str) -> bool:
    """True if, by its name, an environment variable holds a folder or a name and no credential."""
    is_folder_or_name = variable in PUBLIC_VARIABLES or variable.endswith(PUBLIC_VARIABLE_SUFFIXES)
    return is_folder_or_name and not is_credential_name(variable)


def find_unsafe_values(key: str, value: Any) -> Iterator[Problem]:
    """Yield the values of a key and of everything below it that would run code or reveal secrets when resolved.

    Args:
        key: Dotted name of a key or section; "" is the root.
        value: Its plain value, nested for a section, with unresolved interpolations.
    """
    if not INSTANTIATE_KEYS.isdisjoint(key.split(".")):
        yield Problem(key, value, "a key that runs no code", "Remove it: configurations never instantiate objects.")
    elif isinstance(value, Mapping):
        for name, item in value.items():
            yield from find_unsafe_values(f"{key}.{name}" if key else str(name), item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from find_unsafe_values(key, item)
    elif isinstance(value, str):
        yield from _unsafe_text(key, value)


def find_hydra_targets(hydra: Any, key: str = "hydra") -> Iterator[Problem]:
    """Yield the objects that Hydra's own section would instantiate, except those of Hydra and its installed plugins.

    Args:
        hydra: The section `hydra`, as nested plain values.
        key: Dotted name of the section.
    """
    if isinstance(hydra, Mapping):
        for name, item in hydra.items():
            if name == "_target_" and not str(item).startswith(("hydra.", "hydra_plugins.")):
                yield Problem(f"{key}.{name}", item, "Hydra's own", "Remove it: configurations never run code.")
            yield from find_hydra_targets(item, f"{key}.{name}")


def _unsafe_text(key: str, text: str) -> Iterator[Problem]:
    if "_target_" in text:
        yield Problem(key, text, "text without '_target_'", "Remove it: configurations never instantiate objects.")
    for variable in _VARIABLE.findall(text):
        if not is_public_variable(variable):
            yield Problem(
                key,
                text,
                "free of secrets",
                f"${{oc.env:{variable}}} would be printed and saved. Use a variable that holds a folder (HOME, *_DIR, "
                "*_PATH, *_HOME). The libraries that need credentials read them from the environment.",
            )
    if "${" in _VARIABLE.sub("\0", _KEY_REFERENCE.sub("\0", text)):
        allowed = "plain text, ${another.key} or ${oc.env:NAME}"
        yield Problem(key, text, allowed, "Other resolvers can run code.")


# -- Types


S = TypeVar("S", bound=Section)

TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "text", type(None): "null"}


class InvalidValue(Exception):
    """Raised for a value that does not have its key's type.

    Args:
        allowed: Allowed values, as a phrase that follows "must be".
        advice: What to do, as complete sentences.
    """

    def __init__(self, allowed: str, advice: str = ""):
        super().__init__(allowed, advice)
        self.allowed = allowed
        self.advice = advice


def describe_type(hint: Any) -> str:
    """Return a type hint in words, such as "an integer or null", as a phrase that follows "must be"."""
    if hint in TYPE_NAMES:
        return TYPE_NAMES[hint]
    if len(union_members(hint)) > 1:
        return " or ".join(describe_type(member) for member in union_members(hint))
    if typing.get_origin(hint) is list:
        return f"a list ({describe_type(typing.get_args(hint)[0])} each)"
    if typing.get_origin(hint) is dict:
        value_hint = typing.get_args(hint)[1]
        return "a mapping" if value_hint is Any else f"a mapping ({describe_type(value_hint)} each)"
    return "any value"


def convert_value(value: Any, hint: Any) -> Any:
    """Convert a plain value to a type.

    Integers become floats, numbers become text, and a single text becomes a list of one where the type requires it. A
    value that has the type is returned unchanged, except that lists, tuples and mappings are copied.

    Args:
        value: A plain value: None, a boolean, a number, text, a list, a tuple or a mapping.
        hint: Type hint of a key, as in `Key.type_hint`.

    Raises:
        InvalidValue: The value does not have the type.
    """
    for member in union_members(hint):
        if _has_type(value, member):
            if member is float:
                return float(value)
            if typing.get_origin(member) is list:
                return [convert_value(item, typing.get_args(member)[0]) for item in value]
            if typing.get_origin(member) is dict:
                return {key: convert_value(item, typing.get_args(member)[1]) for key, item in value.items()}
            return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and str in union_members(hint):
        return str(value)
    if isinstance(value, str) and list[str] in union_members(hint):
        if value.startswith("["):
            raise InvalidValue(
                describe_type(hint),
                "The list is quoted, so it is text. Put the quotes around the whole argument: \"key=['a','b']\".",
            )
        return [value]
    raise InvalidValue(describe_type(hint), _conversion_advice(value, hint))


def parse_value(value: Any, hint: Any) -> Any:
    """Convert a value that a user wrote to a type.

    Like `convert_value`, but null or an empty text can also stand for an empty list, null for an empty mapping, and an
    empty text for null.

    Args:
        value: A plain value.
        hint: Type hint of a key, as in `Key.type_hint`.

    Raises:
        InvalidValue: The value does not have the type.
    """
    if value == "" and typing.get_origin(hint) is list:
        return []
    if value is None and typing.get_origin(hint) in (list, dict):
        return typing.get_origin(hint)()
    if isinstance(value, str) and not value and {str, type(None)} <= set(union_members(hint)):
        return None
    return convert_value(value, hint)


def _has_type(value: Any, member: Any) -> bool:
    if member is Any:
        return True
    if member is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if member is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if typing.get_origin(member) is list:
        item_hint = typing.get_args(member)[0]
        return isinstance(value, (list, tuple)) and all(_is_convertible(item, item_hint) for item in value)
    if typing.get_origin(member) is dict:
        value_hint = typing.get_args(member)[1]
        return isinstance(value, dict) and all(_is_convertible(item, value_hint) for item in value.values())
    return isinstance(value, typing.get_origin(member) or member)


def _is_convertible(value: Any, hint: Any) -> bool:
    try:
        convert_value(value, hint)
    except InvalidValue:
        return False
    return True


def _conversion_advice(value: Any, hint: Any) -> str:
    if isinstance(value, str) and not {int, float, bool}.isdisjoint(union_members(hint)):
        try:
            number = float(value)
        except ValueError:
            return ""
        return "Write the number without quotes." if math.isfinite(number) else ""
    if isinstance(value, float) and value.is_integer() and int in union_members(hint):
        return f"Write {int(value)}."
    if value in (0, 1) and bool in union_members(hint):
        return f"Write {str(bool(value)).lower()}."
    return ""


def build_section(section: type[S], get_key_value: Callable[[str, Any, Any], Any], prefix: str = "") -> S:
    """Build a section and the sections in it from the values that a function returns.

    Args:
        section: Class of the section.
        get_key_value: Function that returns a key's value, given its dotted name, its type hint and its default.
        prefix: Dotted name of the section with a trailing dot; "" for the root.
    """
    values = {}
    defaults = section()
    for name, hint in field_types(section).items():
        default = getattr(defaults, name)
        if isinstance(default, Section):
            values[name] = build_section(type(default), get_key_value, f"{prefix}{name}.")
        else:
            values[name] = get_key_value(prefix + name, hint, default)
    return section(**values)
