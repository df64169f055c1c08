"""SkyRL's entry point of mini-swe-agent, for its recipes: their own keys become settings of the mini_swe environment.

generator.miniswe_config_path   a YAML file: agent.*_template, environment.timeout
generator.miniswe_traj_dir      where the commands of every episode are kept
"""

from __future__ import annotations

import sys
from typing import Any

import yaml

from skyrl_train.config.keys import with_value_at
from skyrl_train.config.problems import raise_all
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.environments.tasks.mini_swe import TEMPLATES
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.base import Experiment, run_experiment
from skyrl_train.experiment.driver import exits_as_told

SECTION = "environment.skyrl_gym.mini_swe"
OWN = ("generator.miniswe_config_path", "generator.miniswe_traj_dir")


class MiniSWEExp(Experiment):
    """An experiment with the settings of a file of mini-swe-agent's."""

    def __init__(self, config: Config):
        super().__init__(with_settings(config))


def with_settings(config: Config) -> Config:
    """The configuration with what the recipe's own keys say. Raises ConfigError for a file that is none or is wrong."""
    own = config.generator.own
    if own.get("miniswe_traj_dir") is not None:
        config = with_value_at(config, f"{SECTION}.traj_dir", str(own["miniswe_traj_dir"]))
    for name, value in _settings(own.get("miniswe_config_path")).items():
        config = with_value_at(config, f"{SECTION}.{name}", value)
    config = with_value_at(config, "environment.env_class", "mini_swe")
    raise_all(validate(config, open_to_names=True))  # what a file says is checked like what a command line says
    return config


def _settings(path: Any) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        with open(path, encoding="utf-8") as file:
            content = yaml.safe_load(file)
        agent, environment = content.get("agent") or {}, content.get("environment") or {}
        found = {name: str(agent[name]) for name in TEMPLATES if name in agent}
        return found | ({"command_timeout_s": float(environment["timeout"])} if "timeout" in environment else {})
    except (OSError, yaml.YAMLError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"generator.miniswe_config_path={path!r}: is no file of mini-swe-agent's: {error}."
        ) from error


def with_plus(arguments: list[str]) -> list[str]:
    """The command line with what a recipe leaves out: the environment, and the plus that says that a key is our own."""
    environment = "environment.env_class=mini_swe"  # else its settings would be warned of as without effect
    return [environment, *(f"+{one}" if one.partition("=")[0] in OWN else one for one in arguments)]


@exits_as_told()
def main() -> None:
    run_experiment(MiniSWEExp, with_plus(sys.argv[1:]))


if __name__ == "__main__":
    main()
