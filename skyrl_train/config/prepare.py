"""From a command line to a configuration that can be run: read, composed, checked, fitted to the device, frozen."""

from __future__ import annotations

import copy
import functools
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from skyrl_train.config.convert import inspect, unknown_key_advice, unsafe
from skyrl_train.config.documentation import help_text
from skyrl_train.config.hydra import (
    Override,
    changed_keys,
    composed_values,
    finish,
    keys_of_preset,
    parse_flags,
    parse_override,
    preset_file,
    presets_dir,
    resolve,
    show_information,
    unresolved,
)
from skyrl_train.config.keys import canonical, find, misspelt_sibling, other_sections
from skyrl_train.config.machine import accelerator_present, crowding, device_problems, missing, resolve_device
from skyrl_train.config.needs import evaluation_warnings, stop_warnings, warnings
from skyrl_train.config.predicates import Uses
from skyrl_train.config.problems import Problem, UnknownKey, one_line, raise_all, show
from skyrl_train.config.run_folder import with_own_folders
from skyrl_train.config.safety import code_of_run, hydra_of_run, run_of_preset
from skyrl_train.config.schema import Config
from skyrl_train.config.secrets import redact
from skyrl_train.config.section import freeze
from skyrl_train.config.skyrl_keys import resolve_engine_copies, resolve_megatron, skyrl_key
from skyrl_train.config.validate import validate
from skyrl_train.errors import ConfigError
from skyrl_train.messages import show_warnings_visibly, to_stderr

HELP = frozenset({"--help", "-h"})
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
    keys: set[str] = field(default_factory=set)
    """The keys that these set, by their own names."""
    problems: list[Problem] = field(default_factory=list)
    own: list[UnknownKey] = field(default_factory=list)
    """Added with `+` below `generator` or `environment`. They are problems if the user has no code that reads them."""

    @property
    def asks_for_information(self) -> bool:
        """Whether Hydra should print something instead of running."""
        return any(self.flags[name] for name in INFORMATION_FLAGS)


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read `key=value` arguments and Hydra's flags, and find what is wrong with them without composing.

    Unknown keys (with `+`, `++` and `~` as well) with the nearest match, wrong types, NaN and infinity, code to run,
    secrets. Exits with 2 on an unknown flag, as argparse does.
    """
    flags, texts = parse_flags(argv)
    line = CommandLine(flags, problems=list(_refused_flags(flags)))
    folders = [presets_dir(), *([Path(flags["config_dir"])] if flags["config_dir"] else [])]
    given: dict[str, Override] = {}
    for text in texts:
        override = parse_override(text)
        if _is_group(override, folders):
            line.overrides.append(text)
        elif own := own_key(override):
            line.own.append(UnknownKey(override.key, override.value, "a known key", unknown_key_advice(override.key)))
            line.problems += unsafe(override.key, override.value)
            line.overrides.append(f"++{own}={override.text.partition('=')[2]}")
            line.keys.add(own)
        else:
            problems = list(_override_problems(override, given))
            line.problems += problems
            given[override.key] = override
            if not problems:
                line.overrides.append(override.for_hydra)
                line.keys.add(canonical(override.key))
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


# -- the configuration of a run


@dataclass(frozen=True)
class PreparedConfig:
    """What a run starts from."""

    config: Config
    """Frozen; `device` is cpu or cuda."""
    warnings: list[str]
    """Keys that were set and have no effect, and settings that are probably mistakes, a line each."""
    notes: list[str]
    """What was fitted to this machine or to this package, and keys of the user's own: a line each."""


@dataclass(frozen=True)
class Uncomposable(Problem):
    """A preset that is missing or that Hydra cannot put together."""

    def __str__(self) -> str:
        return one_line(self.allowed)


def prepare(
    arguments: Sequence[str] | CommandLine,
    has_accelerator: bool | None = None,
    *,
    own_code: bool = False,
    uses: Uses | None = None,
    trusts_runs: bool = True,
) -> PreparedConfig:
    """The configuration of `key=value` arguments and Hydra's `--config-name` and `--config-dir`.

    Args:
        arguments: As they are typed, or as `read_command_line` has read them.
        has_accelerator: Whether there is one; None looks for one on this machine.
        own_code: Whether a program of the user's own is the caller. Names that it may have registered and keys that it
            may read are then no mistakes, as with `trainer.plugins`.
        uses: Which parts of the configuration must exist on this machine; None looks for nothing.
        trusts_runs: False for commands that look at runs of others: if `--config-dir` names a run's folder, code and
            receivers of credentials that the command line does not name as well are problems.

    Raises ConfigError that lists every problem at once. Imports neither torch nor ray.
    """
    line = arguments if isinstance(arguments, CommandLine) else read_command_line(arguments)
    name, folder = line.flags["config_name"], line.flags["config_dir"]
    run = None if trusts_runs else run_of_preset(folder, name)
    if run is not None:
        raise_all(hydra_of_run(run, preset_file(folder, name)))
    try:
        raw = composed_values(line.overrides, name, folder)
    except ConfigError as error:
        raise_all([*line.problems, Uncomposable("--config-name", name, str(error))])
        raise
    given = line.keys | keys_of_preset(name, folder)
    prepared = _check(raw, line, given, has_accelerator, own_code, uses)
    if run is not None:
        raise_all(code_of_run(prepared.config, run, line.keys))
    return prepared


def prepare_composed(
    cfg: DictConfig, uses: Uses | None = None, *, has_accelerator: bool | None = None
) -> PreparedConfig:
    """The same for a configuration that a program has composed with Hydra by itself, and may have changed since.

    Keys below `generator` and `environment` that nobody knows are the program's own. `uses` and
    `has_accelerator` are those of `prepare`.
    """
    content, own = with_own_keys(unresolved(cfg))
    given = set(changed_keys(content))
    return _check(content, CommandLine({}, own=own), given, has_accelerator, True, uses)


def _check(
    raw: dict[str, Any],
    line: CommandLine,
    given: Collection[str],
    has_accelerator: bool | None,
    own_code: bool,
    uses: Uses | None,
) -> PreparedConfig:
    present = accelerator_present() if has_accelerator is None else has_accelerator
    config, more, notes = finish(raw)
    open_to_names = own_code or bool(config.trainer.plugins)
    problems = [*line.problems, *more, *(() if open_to_names else map(_nobodys, line.own))]
    suspects = {problem.key for problem in problems}
    config, fitted = resolve_device(config, present, given)
    notes += fitted
    for respread in (resolve_megatron, resolve_engine_copies):
        config, moved = respread(config)
        notes += moved
    absent = [] if uses is None else missing(config, uses)
    for problem in (*device_problems(config, present), *validate(config, open_to_names), *absent):
        if not any(key in str(problem) for key in suspects):  # else it may only follow from a default that stands in
            problems.append(problem)
    raise_all(problems)
    notes += [one_line(f"{own.key}={show(own.value)} is a key of your own. {_hint(own)}") for own in line.own]
    defaults, _ = resolve_device(_resolved_defaults(os.environ.get("HOME")), present)
    frozen = freeze(with_own_folders(config, given))
    found = [*warnings(frozen, freeze(defaults)), *evaluation_warnings(frozen), *stop_warnings(frozen)]
    if uses is not None:
        found += crowding(frozen, uses)
    return PreparedConfig(frozen, found, notes)


@functools.cache
def _resolved_defaults(home: str | None) -> Config:
    """What every key is when nobody sets any. `home`: the one variable that defaults refer to."""
    return resolve({})[0]


def _hint(own: UnknownKey) -> str:
    """What a user's own key may have been meant to be, if it is almost one of ours."""
    close = misspelt_sibling(own.key)
    return f"Did you mean {close}?" if close else "Only your code reads it."


def _nobodys(own: UnknownKey) -> UnknownKey:
    advice = f"{own.advice} With trainer.plugins, or started from a program of your own, it would be a key of yours."
    return replace(own, advice=advice)


def launch(
    task: Callable[[PreparedConfig], None],
    argv: Sequence[str] | None = None,
    *,
    own_code: bool = False,
    uses: Uses | None = None,
    trusts_runs: bool = True,
    has_accelerator: Callable[[], bool | None] = lambda: None,
) -> None:
    """Run an entrypoint: `task` with the prepared configuration, or what `--help` or Hydra's `--cfg job` prints.

    `own_code`, `uses` and `trusts_runs` are those of `prepare`, and so is what `has_accelerator` returns. A
    ConfigError, of the configuration or of the task, is printed without traceback and exits with 2.
    """
    show_warnings_visibly()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if HELP & set(arguments):
            topics = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
            print(help_text(topics, shutil.get_terminal_size((120, 50)).columns))
            return
        line = read_command_line(arguments)
        if line.asks_for_information:
            prepare(line, has_accelerator(), own_code=own_code, trusts_runs=trusts_runs)
            show_information(arguments, line.overrides)
            return
        prepared = prepare(line, has_accelerator(), own_code=own_code, uses=uses, trusts_runs=trusts_runs)
        for text in prepared.notes:
            to_stderr(f"note: {text}")
        for text in prepared.warnings:
            to_stderr(f"warning: {redact(text)}")
        task(prepared)
    except ConfigError as error:
        to_stderr(redact(str(error)))
        sys.exit(2)
