"""Settings of environments and of their processes, from the configuration. Imports no torch."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.config.choices import ENVIRONMENTS
from skyrl_train.config.hydra import to_dict
from skyrl_train.config.problems import Problem, raise_problems
from skyrl_train.config.schema import Config
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.environments import registry
from skyrl_train.environments.tasks.agent import LISTENER, NAME as AGENT, check_columns
from skyrl_train.environments.user_registrations import serialization_problem
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.experiment.plugins import check_environments_picklable
from skyrl_train.terminal import print_stderr


def environment_settings(cfg: Config) -> dict[str, dict[str, Any]]:
    """Return the `env_config` of every environment by name.

    It is the environment's section of environment.skyrl_gym, updated with its section of environment.skyrl_gym.own,
    plus the section `sandbox` for the tools that the environment may use.

    Raises:
        ConfigError: A section of environment.skyrl_gym.own is not a mapping.
    """
    gym = to_dict(cfg.environment.skyrl_gym)
    own, sandbox = gym.pop("own"), gym.pop("sandbox")
    sections = {name: settings for name, settings in gym.items() if isinstance(settings, dict)}
    for name, settings in own.items():
        if not isinstance(settings, dict):
            raise ConfigError(
                f"environment.skyrl_gym.own.{name}={settings!r}: the settings of an environment must be a mapping. "
                f"Write environment.skyrl_gym.own.{name}.KEY=VALUE."
            )
        sections[name] = sections.get(name, {}) | settings
    return {name: {"sandbox": sandbox, **sections.get(name, {})} for name in {*ENVIRONMENTS, *sections}}


def check_environments(cfg: Config, *datasets: PromptDataset | None) -> None:
    """Check that the environments of these rows can run here and accept the rows.

    Calls `TextEnv.check` and `TextEnv.check_rows`. With environment.hosts, requirements of this machine are not
    checked: each environment process checks them on its node. Prints a note with the number of rows whose env_class
    takes precedence over environment.env_class.

    Raises:
        ConfigError: An environment cannot run here or cannot be sent to its processes.
        DataError: An environment cannot use a row.
    """
    prompts = [prompt for dataset in datasets if dataset is not None for prompt in dataset.prompts]
    counts = Counter(prompt.env_class for prompt in prompts)
    others = {name: count for name, count in counts.items() if name != cfg.environment.env_class}
    if others:
        named = ", ".join(f"{name} {count}" for name, count in sorted(others.items()))
        print_stderr(
            f"note: {sum(others.values())} of {counts.total()} rows name their own env_class ({named}), which takes "
            f"precedence. environment.env_class ({cfg.environment.env_class}) applies to rows that name none. "
            "To use it for all rows, remove the column env_class from the data."
        )
    check_environments_picklable(cfg, counts)
    if not cfg.environment.hosts:  # on hosts each process checks: they may have what this machine lacks
        registry.check_environments(counts, environment_settings(cfg))
    for name in counts:
        rows = [
            (prompt.where or f"row {prompt.uid}", prompt.env_extras) for prompt in prompts if prompt.env_class == name
        ]
        if name == AGENT:
            check_agent(cfg, rows)
        try:
            registry.check_rows(name, rows)
        except DataError:
            raise
        except ConfigError:
            if not cfg.environment.hosts:
                raise


def check_agent(cfg: Config, rows: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Check what the agent environment needs in addition to the checks of every environment.

    Args:
        cfg: The configuration.
        rows: Pairs of a row's location and its extras.

    Raises:
        ConfigError: Lists every problem at once. A single problem of a row is a DataError.
    """
    settings = environment_settings(cfg)[AGENT]
    problems: list[Problem | ConfigError] = []
    if cfg.environment.hosts:
        advice = (
            "Rows of the environment agent run on the driver's node. Set it to 0, or let the agents run elsewhere in a "
            "sandbox of your own class (environment.skyrl_gym.agent.sandbox.kind=module:Class)."
        )
        problems.append(Problem("environment.hosts", cfg.environment.hosts, "0 with rows of env_class agent", advice))
    if (
        settings["run"]
        and not settings["python"]
        and not cfg.trainer.plugins
        and (reason := serialization_problem(AGENT, settings["run"]))
    ):
        advice = f"It runs in separate processes and cannot be sent to them ({reason})."
        allowed = "registered by a module of trainer.plugins"
        problems.append(Problem("environment.skyrl_gym.agent.run", settings["run"], allowed, advice))
    try:
        check_columns(settings, rows)
        LISTENER.check_address(settings["host"], settings["port"])
    except ConfigError as error:
        problems.append(error)
    if (reward := settings["reward"]) and reward != AGENT:
        try:
            registry.check_environments([reward], environment_settings(cfg))
        except ConfigError as error:
            problems.append(ConfigError(f"environment.skyrl_gym.agent.reward={reward}: {error}"))
    if len(problems) == 1 and isinstance(problems[0], ConfigError):
        raise problems[0]
    raise_problems(problems)


def coroutine_workers(cfg: Config) -> int:
    """Return the maximum number of processes for agents that are coroutines: one per core, as each runs many."""
    return max(1, min(cfg.environment.skyrl_gym.max_env_workers, os.cpu_count() or 1))


def pool_settings(cfg: Config, log: Path | None = None) -> dict[str, Any]:
    """Return the arguments of a WorkerPool.

    Args:
        cfg: The configuration.
        log: The file that workers print to; None for stderr.
    """
    return {
        "env_configs": environment_settings(cfg),
        "max_env_workers": max(cfg.environment.skyrl_gym.max_env_workers, 1),
        "environment_step_s": cfg.trainer.timeouts.environment_step_s,
        "plugins": tuple(cfg.trainer.plugins),
        "log_file": log,
    }
