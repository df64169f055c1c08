"""From a command line to a configuration that can be run: composed, checked, fitted to the device, frozen."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from omegaconf import DictConfig

from skyrl_train.config.command_line import read_command_line
from skyrl_train.config.device import accelerator_present, device_problems, resolve_device
from skyrl_train.config.hydra import compose, finish, resolve, show_information, written_keys
from skyrl_train.config.inert import without_effect
from skyrl_train.config.megatron import resolve_megatron
from skyrl_train.config.problems import Problem, one_line, raise_all
from skyrl_train.config.schema import Config
from skyrl_train.config.section import freeze
from skyrl_train.config.validate import validate
from skyrl_train.errors import ConfigError


@dataclass(frozen=True)
class PreparedConfig:
    """What a run starts from."""

    config: Config
    """Frozen; `device` is cpu or cuda."""
    warnings: list[str]
    """Keys that were set and have no effect, a line each."""
    notes: list[str]
    """Defaults that were fitted to this machine, a line each."""


@dataclass(frozen=True)
class Uncomposable(Problem):
    """A preset that is missing or that Hydra cannot put together."""

    def __str__(self) -> str:
        return one_line(self.allowed)


def prepare(argv: Sequence[str], has_accelerator: bool | None = None) -> PreparedConfig:
    """The configuration of `key=value` arguments and Hydra's `--config-name` and `--config-dir`.

    Raises ConfigError that lists every problem at once. Imports neither torch nor ray.
    """
    line = read_command_line(argv)
    try:
        raw = compose(line.overrides, line.flags["config_name"], line.flags["config_dir"])
    except ConfigError as error:
        raise_all([*line.problems, Uncomposable("--config-name", line.flags["config_name"], str(error))])
        raise
    given = written_keys(line.overrides, line.flags["config_name"], line.flags["config_dir"])
    return _check(raw, line.problems, given, has_accelerator)


def _check(
    raw: DictConfig, problems: list[Problem], given: frozenset[str], has_accelerator: bool | None
) -> PreparedConfig:
    present = accelerator_present() if has_accelerator is None else has_accelerator
    config, more = finish(raw)
    problems = [*problems, *more]
    suspects = {problem.key for problem in problems}
    config, notes = resolve_device(config, present, given)
    config, moved = resolve_megatron(config)
    for problem in (*device_problems(config, present), *validate(config)):
        if not any(key in str(problem) for key in suspects):  # it may only follow from a default that stands in
            problems.append(problem)
    raise_all(problems)
    defaults, _ = resolve_device(resolve({})[0], present)
    return PreparedConfig(freeze(config), list(without_effect(config, freeze(defaults))), [*notes, *moved])


def launch(task: Callable[[PreparedConfig], None], argv: Sequence[str] | None = None) -> None:
    """Run an entrypoint: `task` with the prepared configuration, or what Hydra's flags print (`--cfg job`, `--help`).

    A ConfigError, of the configuration or of the task, is printed without traceback and exits with 2.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        line = read_command_line(arguments)
        if line.asks_for_information:
            if not line.flags["help"]:
                prepare(arguments)
            show_information(arguments, line.overrides)
            return
        prepared = prepare(arguments)
        for text in prepared.notes:
            print(f"note: {text}", file=sys.stderr)
        for text in prepared.warnings:
            print(f"warning: {text}", file=sys.stderr)
        task(prepared)
    except ConfigError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
