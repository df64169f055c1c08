"""Nested plain values, from YAML or the command line -> the types of the dataclasses.

First everything that is wrong with them: code to run, secrets of the environment, unknown keys, wrong types. Types are
strict: text is no number, 1 is not true, NaN fits no type.

Hydra and OmegaConf can call any function a value names (`_target_`, resolvers), and a resolved configuration is
printed, saved and sent to trackers. So values may refer to other keys and to a few environment variables, no more.
"""

from __future__ import annotations

import math
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from skyrl_train.config.keys import canonical_key, canonical_value, field_types, find_key, suggest_key, union_members
from skyrl_train.config.problems import Problem, UnknownKey
from skyrl_train.config.redaction import is_credential_name
from skyrl_train.config.section import Section
from skyrl_train.config.skyrl_keys import find_skyrl_key


def find_value_problems(key: str, value: Any) -> list[Problem]:
    """What is wrong with a key and everything below it, before interpolations are resolved; "" is the root."""
    problems = list(find_unsafe_values(key, value))
    refused = {problem.key for problem in problems}
    return problems + [problem for problem in _find_key_problems(key, value) if problem.key not in refused]


def _find_key_problems(key: str, value: Any) -> Iterator[Problem]:
    known = find_key(key)
    if find_skyrl_key(key) is not None:
        return  # judged with the rest of the configuration, see skyrl_keys.py
    if key and known is None:
        yield UnknownKey(key, value, "a known key", unknown_key_advice(key))
    elif known is None or known.is_section:
        if isinstance(value, Mapping):
            for name, item in value.items():
                yield from _find_key_problems(f"{key}.{name}" if key else str(name), item)
        elif not is_interpolation(value):
            yield Problem(key, value, "a section", f"Set the keys below it, {key}.KEY=VALUE.")
    elif known.is_free_form and canonical_key(key) != known.name:
        return
    elif not is_interpolation(meant := canonical_value(known.name, value)):
        try:
            parse_value(meant, known.type_hint)
        except InvalidValue as unfit:
            yield Problem(key, value, unfit.allowed, unfit.advice)


def unknown_key_advice(key: str) -> str:
    close = suggest_key(key)
    return f"Did you mean {close}?" if close else "docs/configuration.md lists all keys."


# -- Code and secrets


ALLOWED_RESOLVERS = frozenset({"oc.env"})
INSTANTIATE_KEYS = frozenset({"_target_", "_partial_", "_recursive_", "_convert_", "_args_"})

PUBLIC_VARIABLES = frozenset({"HOME", "PWD", "TMPDIR", "SCRATCH", "USER", "LOGNAME", "HOSTNAME"})
PUBLIC_VARIABLE_SUFFIXES = ("_DIR", "_HOME", "_PATH", "_ROOT", "_FOLDER", "_JOB_ID", "_JOB_NAME")

_KEY_REFERENCE = re.compile(r"\$\{\.*[A-Za-z_][\w.\[\]-]*\}")
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([A-Za-z_]\w*)\s*(?:,[^${}]*)?\}")


def is_interpolation(value: Any) -> bool:
    """Whether a value is text that OmegaConf replaces when it resolves."""
    return isinstance(value, str) and "${" in value


def is_public_variable(variable: str) -> bool:
    """Whether an environment variable holds a folder or a name, and no credential."""
    folder = variable in PUBLIC_VARIABLES or variable.endswith(PUBLIC_VARIABLE_SUFFIXES)
    return folder and not is_credential_name(variable)


def find_unsafe_values(key: str, value: Any) -> Iterator[Problem]:
    """Problems of a key and everything below it, before anything is resolved."""
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
    """Code that Hydra's own section would run beyond Hydra and its installed plugins (callbacks, ...)."""
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
                "*_PATH, *_HOME); credentials are read from the environment by whoever needs them.",
            )
    if "${" in _VARIABLE.sub("\0", _KEY_REFERENCE.sub("\0", text)):
        yield Problem(key, text, "plain, ${another.key} or ${oc.env:NAME}", "Other resolvers can run code.")


# -- Types


S = TypeVar("S", bound=Section)

TYPE_NAMES = {bool: "true or false", int: "an integer", float: "a finite number", str: "text", type(None): "null"}


class InvalidValue(Exception):
    """A value that is not of its key's type."""

    def __init__(self, allowed: str, advice: str = ""):
        super().__init__(allowed, advice)
        self.allowed = allowed
        self.advice = advice


def describe_type(hint: Any) -> str:
    """A type in words."""
    if hint in TYPE_NAMES:
        return TYPE_NAMES[hint]
    if len(union_members(hint)) > 1:
        return " or ".join(describe_type(arm) for arm in union_members(hint))
    if typing.get_origin(hint) is list:
        return f"a list ({describe_type(typing.get_args(hint)[0])} each)"
    return "a mapping" if typing.get_origin(hint) is dict else "any value"


def convert_value(value: Any, hint: Any) -> Any:
    """The value as the hint's type. Raises Unfit.

    What is converted: integers to floats, numbers to text, a single text to a list of one.
    """
    for arm in union_members(hint):
        if _fits(value, arm):
            if arm is float:
                return float(value)
            if typing.get_origin(arm) is list:
                return [convert_value(item, typing.get_args(arm)[0]) for item in value]
            return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and str in union_members(hint):
        return str(value)
    if isinstance(value, str) and list[str] in union_members(hint):
        if value.startswith("["):
            raise InvalidValue(
                describe_type(hint), "It is quoted text now: write \"key=['a','b']\" with the quotes around it all."
            )
        return [value]
    raise InvalidValue(describe_type(hint), _advice(value, hint))


def parse_value(value: Any, hint: Any) -> Any:
    """As `convert`, for what a person wrote: null or an empty text can stand for an empty list, null for an empty
    mapping, and an empty text for null."""
    if value == "" and typing.get_origin(hint) is list:
        return []
    if value is None and typing.get_origin(hint) in (list, dict):
        return typing.get_origin(hint)()
    if isinstance(value, str) and not value and {str, type(None)} <= set(union_members(hint)):
        return None
    return convert_value(value, hint)


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
        convert_value(item, hint)
    except InvalidValue:
        return True
    return False


def _advice(value: Any, hint: Any) -> str:
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


def build_section(section: type[S], leaf: Callable[[str, Any, Any], Any], prefix: str = "") -> S:
    """A section whose values are `leaf(key, type, default)`, all the way down."""
    made = {}
    defaults = section()
    for name, hint in field_types(section).items():
        default = getattr(defaults, name)
        if isinstance(default, Section):
            made[name] = build_section(type(default), leaf, f"{prefix}{name}.")
        else:
            made[name] = leaf(prefix + name, hint, default)
    return section(**made)
