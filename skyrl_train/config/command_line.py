"""The command line, checked before anything is composed: grammar, keys, types, sweeps, flags that are off."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_train.config.hydra import Override, parse_flags, parse_override, presets_dir
from skyrl_train.config.inspection import inspect, unknown_key_advice
from skyrl_train.config.keys import canonical, find, other_sections
from skyrl_train.config.problems import Problem, UnknownKey, one_line, show
from skyrl_train.config.safety import unsafe
from skyrl_train.config.skyrl_keys import skyrl_key

INFORMATION_FLAGS = ("help", "hydra_help", "cfg", "info", "shell_completion")


@dataclass(frozen=True)
class FlagProblem(Problem):
    """A flag of Hydra that is off here, or a text that is no `key=value`."""

    def __str__(self) -> str:
        return one_line(f"{self.key}: {self.allowed}. {self.advice}")


@dataclass
class CommandLine:
    """A command line that was read: what to compose, and what is wrong with the rest."""

    flags: dict[str, Any]
    overrides: list[str] = field(default_factory=list)
    """The good ones, as Hydra should see them."""
    problems: list[Problem] = field(default_factory=list)
    own: list[UnknownKey] = field(default_factory=list)
    """Added with `+` below `generator` or `environment`. They are problems if the user has no code that reads them."""

    @property
    def asks_for_information(self) -> bool:
        """Whether Hydra should print something instead of running."""
        return any(self.flags[name] for name in INFORMATION_FLAGS)


def check_command_line(argv: Sequence[str]) -> list[Problem]:
    """Everything wrong with `key=value` arguments that can be known without composing; raises nothing.

    Unknown keys (with `+`, `++` and `~` as well) with the nearest match, wrong types, NaN and infinity, code to run,
    secrets. Exits with 2 on an unknown flag, as argparse does.
    """
    return read_command_line(argv).problems


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """As `check_command_line`, with the good overrides as well."""
    flags, texts = parse_flags(argv)
    line = CommandLine(flags, problems=list(_refused_flags(flags)))
    folders = [presets_dir(), *([Path(flags["config_dir"])] if flags["config_dir"] else [])]
    given: dict[str, Override] = {}
    for text in texts:
        override = parse_override(text)
        if _is_group(override, folders):
            line.overrides.append(text)
            continue
        if own := own_key(override):
            line.own.append(UnknownKey(override.key, override.value, "a known key", unknown_key_advice(override.key)))
            line.problems += unsafe(override.key, override.value)
            line.overrides.append(f"++{own}={override.text.partition('=')[2]}")
            continue
        problems = list(_override_problems(override, given))
        line.problems += problems
        given[override.key] = override
        if not problems:
            line.overrides.append(override.for_hydra)
    return line


def own_key(override: Override) -> str | None:
    """Where a user's own key below `generator` or `environment` is stored; None for every other key.

    Settings below environment.skyrl_gym are those of an environment of the user's that they name.
    """
    if (
        find(override.key) is not None
        or skyrl_key(override.key)
        or not override.text.startswith("+")
        or override.error
        or override.sweeps
    ):
        return None
    for section, least in (("environment.skyrl_gym", 2), ("environment", 1), ("generator", 1)):
        name = override.key.removeprefix(f"{section}.")
        if name != override.key:
            parts = name.split(".")
            inside_ours = find(f"{section}.{parts[0]}") is not None or f"{section}.{parts[0]}" in other_sections()
            return None if len(parts) < least or inside_ours else f"{section}.own.{name}"
    return None


def with_own_keys(content: dict[str, Any]) -> tuple[dict[str, Any], list[UnknownKey]]:
    """Nested plain values with a program's own keys moved to where they are stored, and these keys."""
    found: list[UnknownKey] = []
    moved: dict[str, Any] = copy.deepcopy(content)
    for section in ("environment.skyrl_gym", "environment", "generator"):
        values: Any = moved
        for part in section.split("."):
            values = values.get(part) if isinstance(values, dict) else None
        for name in list(values) if isinstance(values, dict) else ():
            key = f"{section}.{name}"
            inside = f"{key}.x" if section == "environment.skyrl_gym" and isinstance(values[name], dict) else key
            if find(key) is None and own_key(Override(f"+{inside}=", inside, None)) is not None:
                found.append(UnknownKey(key, values[name], "a known key", unknown_key_advice(key)))
                values.setdefault("own", {})[name] = values.pop(name)
    return moved, found


def _refused_flags(flags: dict[str, Any]) -> Iterator[Problem]:
    if flags["multirun"]:
        yield FlagProblem("--multirun", True, "is off", "Start one run per setting, from a shell loop or a scheduler.")
    if flags["config_path"]:
        yield FlagProblem("--config-path", flags["config_path"], "is off", "Use --config-dir, which adds a folder.")
    if flags["experimental_rerun"]:
        value = flags["experimental_rerun"]
        yield FlagProblem("--experimental-rerun", value, "is off", "A saved config.yaml is started with --config-name.")


def _is_group(override: Override, folders: Sequence[Path]) -> bool:
    """Whether the text chooses a file (`optimizer=adam` with a folder of that name) and not a value."""
    name = override.key.partition("@")[0]
    if override.error or override.key.startswith("hydra/"):
        return not override.error
    return find(name) is None and "." not in name and any((folder / name).is_dir() for folder in folders)


def _override_problems(override: Override, given: dict[str, Override]) -> Iterator[Problem]:
    key, value = override.key, override.value
    known = find(key)
    if override.error:
        if "=" not in override.text:
            advice = f"Write {key}=VALUE." if known is not None else unknown_key_advice(key) if key else ""
            yield FlagProblem(override.text, None, "is no key=value", advice)
        else:
            yield FlagProblem(override.text, None, "cannot be read", f"{override.error}. Quote special characters.")
    elif key.startswith("hydra."):
        yield from unsafe(key, value)
    elif override.deletes:
        if known is None:
            yield UnknownKey(key, value, "a known key", unknown_key_advice(key))
        elif not known.is_free or canonical(key) == known.name:
            yield Problem(key, value, "set, not deleted", f"Write {key}=VALUE.")
    elif override.sweeps:
        if known is None:
            yield UnknownKey(key, value, "a known key", unknown_key_advice(key))
        else:
            yield Problem(key, value, "one value", f"Write a list as \"{key}=['a','b']\" and quote commas in text.")
    else:
        yield from inspect(key, value)
        yield from _contradiction(override, given)


def _contradiction(override: Override, given: dict[str, Override]) -> Iterator[Problem]:
    """Two names of one setting with different values."""
    name = canonical(override.key)
    for key, other in given.items():
        same_setting = key != override.key and canonical(key) == name
        if same_setting and other.value != override.value:
            advice = "They are one setting: give one."
            yield Problem(override.key, override.value, f"the same as {key}={show(other.value)}", advice)
