"""SkyRL's entry point of mini-swe-agent, for its recipes: their own keys become settings of the mini_swe environment.

generator.miniswe_config_path   a YAML file: agent.*_template, environment.timeout
generator.miniswe_traj_dir      the folder to which the commands of every episode are written
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from skyrl_train.config.keys import replace_value
from skyrl_train.config.problems import raise_problems
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.environments.tasks.mini_swe import TEMPLATES
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.base import Experiment, run_experiment
from skyrl_train.experiment.driver import exit_with_signal_status

SECTION = "environment.skyrl_gym.mini_swe"
RECIPE_KEYS = ("generator.miniswe_config_path", "generator.miniswe_traj_dir")


class MiniSWEExp(Experiment):
    """An experiment with the settings of a mini-swe-agent configuration file."""

    def __init__(self, config: Config):
        super().__init__(with_settings(config))


def with_settings(config: Config) -> Config:
    """Return the configuration with the settings of the recipe's own keys.

    Raises:
        ConfigError: The file of `generator.miniswe_config_path` cannot be read, or a setting is not valid.
    """
    own = config.generator.own
    if own.get("miniswe_traj_dir") is not None:
        config = replace_value(config, f"{SECTION}.traj_dir", str(own["miniswe_traj_dir"]))
    for name, value in _settings(own.get("miniswe_config_path")).items():
        config = replace_value(config, f"{SECTION}.{name}", value)
    config = replace_value(config, "environment.env_class", "mini_swe")
    # Settings of the file get the same checks as those of the command line.
    raise_problems(validate(config, allow_unregistered_names=True))
    return config


def _settings(path: Any) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
        agent, environment = content.get("agent") or {}, content.get("environment") or {}
        settings = {name: str(agent[name]) for name in TEMPLATES if name in agent}
        return settings | ({"command_timeout_s": float(environment["timeout"])} if "timeout" in environment else {})
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"generator.miniswe_config_path={path!r}: must be a YAML configuration file of mini-swe-agent: {error}."
        ) from error


def add_recipe_defaults(arguments: list[str]) -> list[str]:
    """Return the command line with the environment, and with the plus that Hydra requires for the recipe's own keys."""
    environment = "environment.env_class=mini_swe"  # otherwise a warning would say that its settings have no effect
    return [environment, *(f"+{key}" if key.partition("=")[0] in RECIPE_KEYS else key for key in arguments)]


@exit_with_signal_status()
def main() -> None:
    run_experiment(MiniSWEExp, add_recipe_defaults(sys.argv[1:]))


if __name__ == "__main__":
    main()
