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

from omegaconf import DictConfig, OmegaConf

from skyrl_train.config.hydra import (
    Override,
    compose,
    non_default_keys,
    parse_flags,
    parse_override,
    preset_file,
    preset_keys,
    presets_folder,
    print_hydra_info,
    resolve_interpolations,
    to_config,
    to_unresolved_dict,
)
from skyrl_train.config.key_help import format_help
from skyrl_train.config.keys import alias_sections, canonical_key, find_key, suggest_sibling_key
from skyrl_train.config.local_checks import (
    find_cpu_oversubscription,
    find_device_problems,
    find_missing_resources,
    is_accelerator_available,
    resolve_device,
)
from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.problems import Problem, UnknownKey, format_value, one_line, raise_problems
from skyrl_train.config.redaction import redact
from skyrl_train.config.run_folder import set_default_run_folders
from skyrl_train.config.sanity_warnings import find_evaluation_warnings, find_sanity_warnings, find_stop_string_warnings
from skyrl_train.config.schema import Config
from skyrl_train.config.section import freeze
from skyrl_train.config.skyrl_keys import find_skyrl_key, resolve_engine_data_parallel, resolve_megatron
from skyrl_train.config.untrusted_run import find_hydra_section, find_run_folder, find_untrusted_code
from skyrl_train.config.validate import validate
from skyrl_train.config.value_parsing import find_unsafe_values, find_value_problems, unknown_key_advice
from skyrl_train.errors import ConfigError
from skyrl_train.terminal import escape_last_resort_warnings, print_stderr

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
    explicit_keys: set[str] = field(default_factory=set)
    """The keys that these set, by their own names."""
    problems: list[Problem] = field(default_factory=list)
    custom_keys: list[UnknownKey] = field(default_factory=list)
    """Added with `+` below `generator` or `environment`. They are problems if the user has no code that reads them."""

    @property
    def is_info_request(self) -> bool:
        """Whether Hydra should print something instead of running."""
        return any(self.flags[name] for name in INFORMATION_FLAGS)


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read `key=value` arguments and Hydra's flags, and find what is wrong with them without composing.

    Unknown keys (with `+`, `++` and `~` as well) with the nearest match, wrong types, NaN and infinity, code to run,
    secrets. Exits with 2 on an unknown flag, as argparse does.
    """
    flags, texts = parse_flags(argv)
    line = CommandLine(flags, problems=list(_refused_flags(flags)))
    folders = [presets_folder(), *([Path(flags["config_dir"])] if flags["config_dir"] else [])]
    given: dict[str, Override] = {}
    for text in texts:
        override = parse_override(text)
        if _is_group(override, folders):
            line.overrides.append(text)
        elif own := custom_key_path(override):
            line.custom_keys.append(
                UnknownKey(override.key, override.value, "a known key", unknown_key_advice(override.key))
            )
            line.problems += find_unsafe_values(override.key, override.value)
            line.overrides.append(f"++{own}={override.text.partition('=')[2]}")
            line.explicit_keys.add(own)
        else:
            problems = list(_override_problems(override, given))
            line.problems += problems
            given[override.key] = override
            if not problems:
                line.overrides.append(override.for_hydra)
                line.explicit_keys.add(canonical_key(override.key))
    return line


def custom_key_path(override: Override) -> str | None:
    """Where a user's own key below `generator` or `environment` is stored; None for every other key.

    Settings below environment.skyrl_gym are those of an environment of the user's that they name.
    """
    if (
        find_key(override.key) is not None
        or find_skyrl_key(override.key)
        or not override.text.startswith("+")
        or override.error
        or override.is_sweep
    ):
        return None
    for section, least in (("environment.skyrl_gym", 2), ("environment", 1), ("generator", 1)):
        name = override.key.removeprefix(f"{section}.")
        if name != override.key:
            parts = name.split(".")
            inside_ours = find_key(f"{section}.{parts[0]}") is not None or f"{section}.{parts[0]}" in alias_sections()
            return None if len(parts) < least or inside_ours else f"{section}.own.{name}"
    return None


def move_custom_keys(content: dict[str, Any]) -> tuple[dict[str, Any], list[UnknownKey]]:
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
            if find_key(key) is None and custom_key_path(Override(f"+{inside}=", inside, None)) is not None:
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
    return find_key(name) is None and "." not in name and any((folder / name).is_dir() for folder in folders)


def _override_problems(override: Override, given: dict[str, Override]) -> Iterator[Problem]:
    key, value = override.key, override.value
    known = find_key(key)
    if override.error:
        if "=" not in override.text:
            advice = f"Write {key}=VALUE." if known is not None else unknown_key_advice(key) if key else ""
            yield FlagProblem(override.text, None, "is no key=value", advice)
        else:
            yield FlagProblem(override.text, None, "cannot be read", f"{override.error}. Quote special characters.")
    elif key.startswith("hydra."):
        yield from find_unsafe_values(key, value)
    elif override.is_delete:
        if known is None:
            yield UnknownKey(key, value, "a known key", unknown_key_advice(key))
        elif not known.is_free_form or canonical_key(key) == known.name:
            yield Problem(key, value, "set, not deleted", f"Write {key}=VALUE.")
    elif override.is_sweep:
        if known is None:
            yield UnknownKey(key, value, "a known key", unknown_key_advice(key))
        else:
            yield Problem(key, value, "one value", f"Write a list as \"{key}=['a','b']\" and quote commas in text.")
    else:
        yield from find_value_problems(key, value)
        yield from _contradiction(override, given)


def _contradiction(override: Override, given: dict[str, Override]) -> Iterator[Problem]:
    """Two names of one setting with different values."""
    name = canonical_key(override.key)
    for key, other in given.items():
        same_setting = key != override.key and canonical_key(key) == name
        if same_setting and other.value != override.value:
            advice = "They are one setting: give one."
            yield Problem(override.key, override.value, f"the same as {key}={format_value(other.value)}", advice)


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
class ComposeProblem(Problem):
    """A preset that is missing or that Hydra cannot put together."""

    def __str__(self) -> str:
        return one_line(self.allowed)


def prepare_config(
    arguments: Sequence[str] | CommandLine,
    has_accelerator: bool | None = None,
    *,
    has_user_code: bool = False,
    components: RunComponents | None = None,
    trust_run_folder: bool = True,
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
    run = None if trust_run_folder else find_run_folder(folder, name)
    if run is not None:
        raise_problems(find_hydra_section(run, preset_file(folder, name)))
    try:
        raw = compose(line.overrides, name, folder)
    except ConfigError as error:
        raise_problems([*line.problems, ComposeProblem("--config-name", name, str(error))])
        raise
    explicit_keys = line.explicit_keys | preset_keys(name, folder)
    prepared = _check(raw, line, explicit_keys, has_accelerator, has_user_code, components)
    if run is not None:
        raise_problems(find_untrusted_code(prepared.config, run, line.explicit_keys))
    return prepared


def prepare_composed(
    cfg: DictConfig, components: RunComponents | None = None, *, has_accelerator: bool | None = None
) -> PreparedConfig:
    """The same for a configuration that a program has composed with Hydra by itself, and may have changed since.

    Keys below `generator` and `environment` that nobody knows are the program's own. `uses` and
    `has_accelerator` are those of `prepare`.
    """
    content, custom_keys = move_custom_keys(to_unresolved_dict(cfg))
    explicit_keys = set(non_default_keys(content))
    return _check(
        OmegaConf.create(content),
        CommandLine({}, custom_keys=custom_keys),
        explicit_keys,
        has_accelerator,
        True,
        components,
    )


def _check(
    raw: DictConfig,
    line: CommandLine,
    explicit_keys: Collection[str],
    has_accelerator: bool | None,
    has_user_code: bool,
    components: RunComponents | None,
) -> PreparedConfig:
    present = is_accelerator_available() if has_accelerator is None else has_accelerator
    config, more, notes = to_config(raw)
    allow_unregistered_names = has_user_code or bool(config.trainer.plugins)
    problems = [*line.problems, *more, *(() if allow_unregistered_names else map(_as_unknown_key, line.custom_keys))]
    problem_keys = {problem.key for problem in problems}
    config, fitted = resolve_device(config, present, explicit_keys)
    notes += fitted
    for respread in (resolve_megatron, resolve_engine_data_parallel):
        config, moved = respread(config)
        notes += moved
    absent = [] if components is None else find_missing_resources(config, components)
    for problem in (*find_device_problems(config, present), *validate(config, allow_unregistered_names), *absent):
        if not any(
            key in str(problem) for key in problem_keys
        ):  # else it may only follow from a default that stands in
            problems.append(problem)
    raise_problems(problems)
    notes += [
        one_line(f"{own.key}={format_value(own.value)} is a key of your own. {_suggest_for_custom_key(own)}")
        for own in line.custom_keys
    ]
    defaults, _ = resolve_device(_resolved_defaults(os.environ.get("HOME")), present)
    frozen = freeze(set_default_run_folders(config, explicit_keys))
    found = [
        *find_sanity_warnings(frozen, freeze(defaults)),
        *find_evaluation_warnings(frozen),
        *find_stop_string_warnings(frozen),
    ]
    if components is not None:
        found += find_cpu_oversubscription(frozen, components)
    return PreparedConfig(frozen, found, notes)


@functools.cache
def _resolved_defaults(home: str | None) -> Config:
    """What every key is when nobody sets any. `home`: the one variable that defaults refer to."""
    return resolve_interpolations({})[0]


def _suggest_for_custom_key(own: UnknownKey) -> str:
    """What a user's own key may have been meant to be, if it is almost one of ours."""
    close = suggest_sibling_key(own.key)
    return f"Did you mean {close}?" if close else "Only your code reads it."


def _as_unknown_key(own: UnknownKey) -> UnknownKey:
    advice = f"{own.advice} With trainer.plugins, or started from a program of your own, it would be a key of yours."
    return replace(own, advice=advice)


def run_entrypoint(
    task: Callable[[PreparedConfig], None],
    argv: Sequence[str] | None = None,
    *,
    has_user_code: bool = False,
    components: RunComponents | None = None,
    trust_run_folder: bool = True,
    has_accelerator: Callable[[], bool | None] = lambda: None,
) -> None:
    """Run an entrypoint: `task` with the prepared configuration, or what `--help` or Hydra's `--cfg job` prints.

    `own_code`, `uses` and `trusts_runs` are those of `prepare`, and so is what `has_accelerator` returns. A
    ConfigError, of the configuration or of the task, is printed without traceback and exits with 2.
    """
    escape_last_resort_warnings()
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if HELP & set(arguments):
            topics = [argument for argument in arguments if "=" not in argument and not argument.startswith("-")]
            print(format_help(topics, shutil.get_terminal_size((120, 50)).columns))
            return
        line = read_command_line(arguments)
        if line.is_info_request:
            prepare_config(line, has_accelerator(), has_user_code=has_user_code, trust_run_folder=trust_run_folder)
            print_hydra_info(arguments, line.overrides)
            return
        prepared = prepare_config(
            line,
            has_accelerator(),
            has_user_code=has_user_code,
            components=components,
            trust_run_folder=trust_run_folder,
        )
        for text in prepared.notes:
            print_stderr(f"note: {text}")
        for text in prepared.warnings:
            print_stderr(f"warning: {redact(text)}")
        task(prepared)
    except ConfigError as error:
        print_stderr(redact(str(error)))
        sys.exit(2)
