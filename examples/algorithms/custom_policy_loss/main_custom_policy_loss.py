"""A program that registers a custom policy loss, REINFORCE, for trainer.algorithm.policy_loss_type."""

from __future__ import annotations

from examples.algorithms.custom_loss import reinforce as reinforce  # registers itself
from skyrl_train.experiment.base import Experiment, run_experiment
from skyrl_train.experiment.driver import exit_with_signal_status


@exit_with_signal_status()
def main() -> None:
    run_experiment(Experiment)


if __name__ == "__main__":
    main()
