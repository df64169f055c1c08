"""SkyRL's entry point of the verifiers library, for its recipes, which name an environment of that library's.

environment.env_class=ID   becomes   environment.env_class=verifiers environment.skyrl_gym.verifiers.env_id=ID
"""

from __future__ import annotations

import sys

from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status

_NAMED = "environment.env_class="


def of_verifiers(arguments: list[str]) -> list[str]:
    """The arguments with the library's environment as a setting of the one that runs it."""
    moved = [
        f"environment.skyrl_gym.verifiers.env_id={argument.removeprefix(_NAMED)}"
        if argument.startswith(_NAMED) and argument != f"{_NAMED}verifiers"
        else argument
        for argument in arguments
    ]
    return [f"{_NAMED}verifiers", *moved]


@exit_with_signal_status()
def main() -> None:
    launch_experiment(Experiment, of_verifiers(sys.argv[1:]))


if __name__ == "__main__":
    main()
