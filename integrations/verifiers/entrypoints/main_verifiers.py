"""SkyRL's entry point for recipes that use an environment of the verifiers library.

The entry point replaces   environment.env_class=ID
by                         environment.env_class=verifiers environment.skyrl_gym.verifiers.env_id=ID
"""

from __future__ import annotations

import sys

from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status

_ENV_CLASS = "environment.env_class="


def use_verifiers_environment(arguments: list[str]) -> list[str]:
    """Return the arguments with `env_class=ID` replaced by the environment `verifiers` and its setting `env_id=ID`."""
    replaced = [
        f"environment.skyrl_gym.verifiers.env_id={argument.removeprefix(_ENV_CLASS)}"
        if argument.startswith(_ENV_CLASS) and argument != f"{_ENV_CLASS}verifiers"
        else argument
        for argument in arguments
    ]
    return [f"{_ENV_CLASS}verifiers", *replaced]


@exit_with_signal_status()
def main() -> None:
    launch_experiment(Experiment, use_verifiers_environment(sys.argv[1:]))


if __name__ == "__main__":
    main()
