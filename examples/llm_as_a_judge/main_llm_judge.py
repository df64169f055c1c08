"""SkyRL's entry point for rewards by a judge. It equals main_base, because the environment is part of the package."""

from __future__ import annotations

from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status


@exit_with_signal_status()
def main() -> None:
    launch_experiment(Experiment)


if __name__ == "__main__":
    main()
