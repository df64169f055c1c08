"""From a command line to a configuration that can be run: composed, checked, fitted to the device, frozen."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf

from skyrl_train.config.command_line import CommandLine, read_command_line, with_own_keys
from skyrl_train.config.device import accelerator_present, device_problems, resolve_device
from skyrl_train.config.documentation import help_text
from skyrl_train.config.hydra import (
    changed_keys,
    compose,
    finish,
    parse_override,
    preset_file,
    resolve,
    show_information,
    unresolved,
    written_keys,
)
from skyrl_train.config.inert import evaluation_warnings, stop_warnings, warnings
from skyrl_train.config.keys import canonical, misspelt_sibling
from skyrl_train.config.parallelism import resolve_engine_copies, resolve_megatron
from skyrl_train.config.presence import Uses, crowding, missing
from skyrl_train.config.problems import Problem, UnknownKey, one_line, raise_all, show
from skyrl_train.config.run_folder import with_own_folders
from skyrl_train.config.safety import code_of_run, hydra_of_run, run_of_preset
from skyrl_train.config.schema import Config
from skyrl_train.config.secrets import redact
from skyrl_train.config.section import freeze
from skyrl_train.config.validate import validate
from skyrl_train.errors import ConfigError
from skyrl_train.messages import show_warnings_visibly, to_stderr

HELP = frozenset({"--help", "-h"})


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
    argv: Sequence[str],
    has_accelerator: bool | None = None,
    *,
    own_code: bool = False,
    uses: Uses | None = None,
    trusts_runs: bool = True,
) -> PreparedConfig:
    """The configuration of `key=value` arguments and Hydra's `--config-name` and `--config-dir`.

    Args:
        has_accelerator: Whether there is one; None looks for one on this machine.
        own_code: Whether a program of the user's own is the caller. Names that it may have registered and keys that it
            may read are then no mistakes, as with `trainer.plugins`.
        uses: Which parts of the configuration must exist on this machine; None looks for nothing.
        trusts_runs: False for commands that look at runs of others: if `--config-dir` names a run's folder, code and
            receivers of credentials that the command line does not name as well are problems.

    Raises ConfigError that lists every problem at once. Imports neither torch nor ray.
    """
    line = read_command_line(argv)
    name, folder = line.flags["config_name"], line.flags["config_dir"]
    run = None if trusts_runs else run_of_preset(folder, name)
    if run is not None:
        raise_all(hydra_of_run(run, preset_file(folder, name)))
    try:
        raw = compose(line.overrides, name, folder)
    except ConfigError as error:
        raise_all([*line.problems, Uncomposable("--config-name", name, str(error))])
        raise
    given = written_keys(line.overrides, name, folder)
    present = accelerator_present() if has_accelerator is None else has_accelerator
    prepared = _check(raw, line, given, present, own_code, uses)
    if run is not None:
        overridden = {canonical(parse_override(text).key) for text in line.overrides}
        raise_all(code_of_run(prepared.config, run, overridden))
    return prepared


def prepare_composed(
    cfg: DictConfig, uses: Uses | None = None, *, has_accelerator: bool | None = None
) -> PreparedConfig:
    """The same for a configuration that a program has composed with Hydra by itself, and may have changed since.

    Keys below `generator` and `environment` that nobody knows are the program's own. `uses` and
    `has_accelerator` are those of `prepare`.
    """
    content, own = with_own_keys(unresolved(cfg))
    line = CommandLine({}, own=own)
    given = frozenset(changed_keys(content))
    present = accelerator_present() if has_accelerator is None else has_accelerator
    return _check(OmegaConf.create(content), line, given, present, True, uses)


def _check(
    raw: DictConfig, line: CommandLine, given: frozenset[str], present: bool, own_code: bool, uses: Uses | None
) -> PreparedConfig:
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
            prepare(arguments, has_accelerator(), own_code=own_code, trusts_runs=trusts_runs)
            show_information(arguments, line.overrides)
            return
        present = has_accelerator()
        prepared = prepare(arguments, present, own_code=own_code, uses=uses, trusts_runs=trusts_runs)
        for text in prepared.notes:
            to_stderr(f"note: {text}")
        for text in prepared.warnings:
            to_stderr(f"warning: {redact(text)}")
        task(prepared)
    except ConfigError as error:
        to_stderr(redact(str(error)))
        sys.exit(2)
