"""Environments, from configuration: the settings of each, and the processes that they run in. Loads no torch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from skyrl_train.config.choices import ENVIRONMENTS
from skyrl_train.config.hydra import to_dict
from skyrl_train.config.schema import Config
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.environments import registry
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.experiment.plugins import check_environments_picklable
from skyrl_train.terminal import print_stderr


def environment_settings(cfg: Config) -> dict[str, dict[str, Any]]:
    """Name -> `env_config` of every environment: its section of environment.skyrl_gym, updated by its section of `own`.

    Every one contains `sandbox`, for the tools that the environment may use. Raises ConfigError for a section of `own`
    that is not a mapping.
    """
    gym = to_dict(cfg.environment.skyrl_gym)
    own, sandbox = gym.pop("own"), gym.pop("sandbox")
    sections = {name: settings for name, settings in gym.items() if isinstance(settings, dict)}
    for name, settings in own.items():
        if not isinstance(settings, dict):
            raise ConfigError(
                f"environment.skyrl_gym.own.{name}={settings!r}: the settings of one environment are a mapping; "
                f"write environment.skyrl_gym.own.{name}.KEY=VALUE."
            )
        sections[name] = sections.get(name, {}) | settings
    return {name: {"sandbox": sandbox, **sections.get(name, {})} for name in {*ENVIRONMENTS, *sections}}


def check_environments(cfg: Config, *datasets: PromptDataset | None) -> None:
    """Check early that the environments of these rows can run here and use the rows: see `TextEnv.check`, `check_rows`.

    The env_class of a row takes precedence over environment.env_class; a note with the number of such rows is printed.
    """
    prompts = [prompt for dataset in datasets if dataset is not None for prompt in dataset.prompts]
    counts = Counter(prompt.env_class for prompt in prompts)
    others = {name: count for name, count in counts.items() if name != cfg.environment.env_class}
    if others:
        named = ", ".join(f"{name} {count}" for name, count in sorted(others.items()))
        print_stderr(
            f"note: {sum(others.values())} of {counts.total()} rows name their env_class themselves ({named}), which "
            f"counts; environment.env_class ({cfg.environment.env_class}) is for rows that name none."
        )
    check_environments_picklable(cfg, counts)
    if not cfg.environment.hosts:  # else each of their processes checks: what is missing here may be there
        registry.check_environments(counts, environment_settings(cfg))
    for name in counts:
        rows = ((one.where or f"row {one.uid}", one.env_extras) for one in prompts if one.env_class == name)
        try:
            registry.check_rows(name, rows)
        except DataError:
            raise
        except ConfigError:
            if not cfg.environment.hosts:
                raise


def pool_settings(cfg: Config, log: Path | None = None) -> dict[str, Any]:
    """Return the arguments of a WorkerPool, whose workers print to `log`, or to stderr without one."""
    return {
        "env_configs": environment_settings(cfg),
        "max_env_workers": max(cfg.environment.skyrl_gym.max_env_workers, 1),
        "environment_step_s": cfg.trainer.timeouts.environment_step_s,
        "plugins": tuple(cfg.trainer.plugins),
        "log_file": log,
    }
