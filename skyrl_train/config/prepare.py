"""The steps from a command line to the frozen configuration of a run: parse, compose, check, adapt to the device."""

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
    SAME_SETTING_ADVICE,
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
    """A flag of Hydra that is not supported, or an argument that is not a valid `key=value`."""

    def __str__(self) -> str:
        return one_line(f"{self.key}: {self.allowed}. {self.advice}")


@dataclass
class CommandLine:
    """A parsed and checked command line."""

    flags: dict[str, Any]
    """Values of Hydra's flags, by name."""
    overrides: list[str] = field(default_factory=list)
    """The valid overrides, in the form that Hydra composes."""
    explicit_keys: set[str] = field(default_factory=set)
    """The keys that the overrides set, with aliases resolved."""
    problems: list[Problem] = field(default_factory=list)
    """Problems of flags and of the other overrides."""
    custom_keys: list[UnknownKey] = field(default_factory=list)
    """Keys added with `+` below `generator` or `environment`. Without user code that reads them they are problems."""

    @property
    def is_info_request(self) -> bool:
        """True if a flag asks Hydra to print information instead of starting a run."""
        return any(self.flags[name] for name in INFORMATION_FLAGS)


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Parse `key=value` arguments and Hydra's flags, and check them without composing the configuration.

    The checks find unknown keys (also with `+`, `++` and `~`), wrong types, NaN and infinity, keys such as `_target_`
    that would run code, and interpolations that would reveal secrets. Nothing is raised for them.

    Args:
        argv: Arguments without the name of the program.

    Returns:
        The parsed command line; `problems` holds what the checks found.

    Raises:
        SystemExit: A flag is unknown; argparse prints the usage and exits with code 2.
    """
    flags, texts = parse_flags(argv)
    line = CommandLine(flags, problems=list(_find_flag_problems(flags)))
    folders = [presets_folder(), *([Path(flags["config_dir"])] if flags["config_dir"] else [])]
    overrides: dict[str, Override] = {}
    for text in texts:
        override = parse_override(text)
        if _is_config_group(override, folders):
            line.overrides.append(text)
        elif path := custom_key_path(override):
            line.custom_keys.append(
                UnknownKey(override.key, override.value, "a known key", unknown_key_advice(override.key))
            )
            line.problems += find_unsafe_values(override.key, override.value)
            line.overrides.append(f"++{path}={override.text.partition('=')[2]}")
            line.explicit_keys.add(path)
        else:
            problems = list(_find_override_problems(override, overrides))
            line.problems += problems
            overrides[override.key] = override
            if not problems:
                line.overrides.append(override.for_hydra)
                line.explicit_keys.add(canonical_key(override.key))
    return line


def custom_key_path(override: Override) -> str | None:
    """Return the key under which a custom key is stored, or None if an override does not set a custom key.

    A custom key is unknown, is added with `+`, and lies below `generator`, `environment`, or a name below
    `environment.skyrl_gym`, which is the name of the user's environment. It is stored in the `own` of its section.
    """
    if (
        find_key(override.key) is not None
        or find_skyrl_key(override.key)
        or not override.text.startswith("+")
        or override.error
        or override.is_sweep
    ):
        return None
    for section, min_parts in (("environment.skyrl_gym", 2), ("environment", 1), ("generator", 1)):
        name = override.key.removeprefix(f"{section}.")
        if name != override.key:
            parts = name.split(".")
            first = f"{section}.{parts[0]}"
            is_ours = find_key(first) is not None or first in alias_sections()
            return None if len(parts) < min_parts or is_ours else f"{section}.own.{name}"
    return None


def move_custom_keys(content: dict[str, Any]) -> tuple[dict[str, Any], list[UnknownKey]]:
    """Move custom keys of nested plain values to the `own` of their sections, see `custom_key_path`.

    Args:
        content: Nested plain values of a configuration. They are not changed.

    Returns:
        The changed copy, and the custom keys.
    """
    custom_keys: list[UnknownKey] = []
    moved: dict[str, Any] = copy.deepcopy(content)
    for section in ("environment.skyrl_gym", "environment", "generator"):
        values: Any = moved
        for part in section.split("."):
            values = values.get(part) if isinstance(values, dict) else None
        for name in list(values) if isinstance(values, dict) else ():
            key = f"{section}.{name}"
            leaf = f"{key}.x" if section == "environment.skyrl_gym" and isinstance(values[name], dict) else key
            if find_key(key) is None and custom_key_path(Override(f"+{leaf}=", leaf, None)) is not None:
                custom_keys.append(UnknownKey(key, values[name], "a known key", unknown_key_advice(key)))
                values.setdefault("own", {})[name] = values.pop(name)
    return moved, custom_keys


def _find_flag_problems(flags: dict[str, Any]) -> Iterator[Problem]:
    if flags["multirun"]:
        advice = "Start one run per setting, from a shell loop or a scheduler."
        yield FlagProblem("--multirun", True, "is not supported", advice)
    if flags["config_path"]:
        advice = "Use --config-dir, which adds a folder of presets."
        yield FlagProblem("--config-path", flags["config_path"], "is not supported", advice)
    if flags["experimental_rerun"]:
        advice = "Use --config-dir and --config-name to start from a saved config.yaml."
        yield FlagProblem("--experimental-rerun", flags["experimental_rerun"], "is not supported", advice)


def _is_config_group(override: Override, folders: Sequence[Path]) -> bool:
    """True if an override selects a file of a config group (`optimizer=adam`) instead of setting a key."""
    name = override.key.partition("@")[0]
    if override.error or override.key.startswith("hydra/"):
        return not override.error
    return find_key(name) is None and "." not in name and any((folder / name).is_dir() for folder in folders)


def _find_override_problems(override: Override, earlier: dict[str, Override]) -> Iterator[Problem]:
    key, value = override.key, override.value
    known = find_key(key)
    if override.error:
        if "=" not in override.text:
            advice = f"Write {key}=VALUE." if known is not None else unknown_key_advice(key) if key else ""
            yield FlagProblem(override.text, None, "is not of the form key=value", advice)
        else:
            yield FlagProblem(override.text, None, "cannot be parsed", f"{override.error}. Quote special characters.")
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
        yield from _find_contradictions(override, earlier)


def _find_contradictions(override: Override, earlier: dict[str, Override]) -> Iterator[Problem]:
    """Yield earlier overrides that set the same key to another value under another name."""
    name = canonical_key(override.key)
    for key, other in earlier.items():
        same_setting = key != override.key and canonical_key(key) == name
        if same_setting and other.value != override.value:
            allowed = f"the same as {key}={format_value(other.value)}"
            yield Problem(override.key, override.value, allowed, SAME_SETTING_ADVICE)


# -- The configuration of a run


@dataclass(frozen=True)
class PreparedConfig:
    """The checked configuration of a run, with warnings and notes for the user."""

    config: Config
    """The configuration, frozen. `device` is cpu or cuda."""
    warnings: list[str]
    """One line for each key that is set without effect, and for each setting that is probably a mistake."""
    notes: list[str]
    """One line for each change that adapts the configuration to this machine or package, and for each custom key."""


@dataclass(frozen=True)
class ComposeProblem(Problem):
    """A preset that is missing or that Hydra cannot compose."""

    def __str__(self) -> str:
        return one_line(self.allowed)


def prepare_config(
    arguments: Sequence[str] | CommandLine,
    has_accelerator: bool | None = None,
    *,
    has_user_code: bool = False,
    components: RunComponents | None = None,
    trust_run_folder: bool = True,
    is_elsewhere: bool = False,
) -> PreparedConfig:
    """Return the checked configuration of `key=value` arguments and of Hydra's `--config-name` and `--config-dir`.

    This imports neither torch nor ray.

    Args:
        arguments: Arguments of a command line, or the result of `read_command_line`.
        has_accelerator: True if the run has an accelerator. None checks this machine.
        has_user_code: True if a user's program is the caller. As with `trainer.plugins`, unregistered names and custom
            keys are accepted then, because that program may register or read them.
        components: Parts of the run whose files, packages and resources must exist on this machine. None checks none.
        trust_run_folder: False for commands that inspect other users' runs. If `--config-dir` is a run's folder, code
            and receivers of credentials that the command line does not repeat are then problems.
        is_elsewhere: True if the run is for another machine. `device=cuda` then requires no accelerator here.

    Raises:
        ConfigError: The configuration has problems. The message lists all of them.
        SystemExit: A flag is unknown; argparse prints the usage and exits with code 2.
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
    prepared = _check(raw, line, explicit_keys, has_accelerator, has_user_code, components, is_elsewhere)
    if run is not None:
        raise_problems(find_untrusted_code(prepared.config, run, line.explicit_keys))
    return prepared


def prepare_composed(
    cfg: DictConfig, components: RunComponents | None = None, *, has_accelerator: bool | None = None
) -> PreparedConfig:
    """Return the checked configuration of a program that composed it with Hydra itself and may have changed it.

    Unknown keys below `generator` and `environment` are custom keys of the program.

    Args:
        cfg: The composed configuration. It is not changed.
        components: Parts of the run whose files, packages and resources must exist on this machine. None checks none.
        has_accelerator: True if the run has an accelerator. None checks this machine.

    Raises:
        ConfigError: The configuration has problems. The message lists all of them.
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
    is_elsewhere: bool = False,
) -> PreparedConfig:
    has_device = is_accelerator_available() if has_accelerator is None else has_accelerator
    config, config_problems, notes = to_config(raw)
    allow_unregistered_names = has_user_code or bool(config.trainer.plugins)
    rejected_keys = () if allow_unregistered_names else map(_reject_custom_key, line.custom_keys)
    problems = [*line.problems, *config_problems, *rejected_keys]
    problem_keys = {problem.key for problem in problems}
    is_device_open = config.device == "auto"
    config, device_notes = resolve_device(config, has_device, explicit_keys)
    notes += device_notes
    if is_elsewhere and is_device_open and config.device == "cpu":
        notes.append("the configuration is checked for CPUs, like this machine. Add device=cuda if the run uses GPUs.")
    for resolve in (resolve_megatron, resolve_engine_data_parallel):
        config, parallelism_notes = resolve(config)
        notes += parallelism_notes
    missing = [] if components is None else find_missing_resources(config, components)
    device_problems = () if is_elsewhere else find_device_problems(config, has_device)
    for problem in (*device_problems, *validate(config, allow_unregistered_names), *missing):
        # A key with a problem has its default here, so a problem that mentions it may be spurious.
        if not any(key in str(problem) for key in problem_keys):
            problems.append(problem)
    raise_problems(problems)
    notes += [
        one_line(f"{custom.key}={format_value(custom.value)} is a custom key. {_custom_key_advice(custom)}")
        for custom in line.custom_keys
    ]
    defaults, _ = resolve_device(_resolved_defaults(os.environ.get("HOME")), config.device == "cuda")
    frozen = freeze(set_default_run_folders(config, explicit_keys))
    warnings = [
        *find_sanity_warnings(frozen, freeze(defaults)),
        *find_evaluation_warnings(frozen),
        *find_stop_string_warnings(frozen),
    ]
    if components is not None:
        warnings += find_cpu_oversubscription(frozen, components)
    return PreparedConfig(frozen, warnings, notes)


@functools.cache
def _resolved_defaults(home: str | None) -> Config:
    """Return the default configuration, cached by HOME, the only environment variable that defaults refer to."""
    return resolve_interpolations({})[0]


def _custom_key_advice(custom: UnknownKey) -> str:
    close = suggest_sibling_key(custom.key)
    return f"Did you mean {close}?" if close else "Only your code reads it."


def _reject_custom_key(custom: UnknownKey) -> UnknownKey:
    advice = f"{custom.advice} Custom keys require trainer.plugins or a program of your own that starts the run."
    return replace(custom, advice=advice)


def run_entrypoint(
    task: Callable[[PreparedConfig], None],
    argv: Sequence[str] | None = None,
    *,
    has_user_code: bool = False,
    components: RunComponents | None = None,
    trust_run_folder: bool = True,
    is_elsewhere: bool = False,
    has_accelerator: Callable[[], bool | None] = lambda: None,
) -> None:
    """Run the task of an entrypoint with the configuration of its command line.

    Notes and warnings are printed to stderr first. With `--help` or an information flag of Hydra (`--cfg job`), print
    that information instead and do not run the task.

    Args:
        task: Function of the entrypoint.
        argv: Arguments of the command line; None uses `sys.argv`.
        has_user_code: See `prepare_config`.
        components: Parts of the run whose files, packages and resources must exist on this machine; None checks none.
        trust_run_folder: See `prepare_config`.
        is_elsewhere: See `prepare_config`.
        has_accelerator: Function that returns the argument `has_accelerator` of `prepare_config`. It is not called for
            `--help`.

    Raises:
        SystemExit: The configuration or the task raised ConfigError, which is printed to stderr without a traceback, or
            a flag is unknown. The exit code is 2.
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
            is_elsewhere=is_elsewhere,
        )
        for text in prepared.notes:
            print_stderr(f"note: {text}")
        for text in prepared.warnings:
            print_stderr(f"warning: {redact(text)}")
        task(prepared)
    except ConfigError as error:
        print_stderr(redact(str(error)))
        sys.exit(2)
