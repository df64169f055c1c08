"""SkyRL's entry point for recipes that use an environment of the verifiers library.

environment.env_class=ID   becomes   environment.env_class=verifiers environment.skyrl_gym.verifiers.env_id=ID
"""

from __future__ import annotations

import sys

from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status

_NAMED = "environment.env_class="


def of_verifiers(arguments: list[str]) -> list[str]:
    """Return the arguments with `env_class=ID` replaced by the environment `verifiers` and its setting `env_id=ID`."""
    replaced = [
        f"environment.skyrl_gym.verifiers.env_id={argument.removeprefix(_NAMED)}"
        if argument.startswith(_NAMED) and argument != f"{_NAMED}verifiers"
        else argument
        for argument in arguments
    ]
    return [f"{_NAMED}verifiers", *replaced]


@exit_with_signal_status()
def main() -> None:
    launch_experiment(Experiment, of_verifiers(sys.argv[1:]))


if __name__ == "__main__":
    main()
