"""SkyRL's entry point for on-policy distillation, for its recipes: their estimator `no_op` is `distillation` here."""

from __future__ import annotations

import skyrl_train as sk
from skyrl_train.algorithms.advantages import distillation
from skyrl_train.experiment.base import Experiment, run_experiment
from skyrl_train.experiment.driver import exit_with_signal_status

sk.register.advantage("no_op")(distillation)


@exit_with_signal_status()
def main() -> None:
    run_experiment(Experiment)


if __name__ == "__main__":
    main()
