"""SkyRL's one-step-off entry point, for its recipes. It equals main_base with asynchronous training and staleness 1."""

from __future__ import annotations

import sys

from skyrl_train.experiment.base import Experiment, launch_experiment

ASYNC = ("trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=1")


def main() -> None:
    launch_experiment(Experiment, [*ASYNC, *sys.argv[1:]])


if __name__ == "__main__":
    main()
