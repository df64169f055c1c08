"""SkyRL's fully asynchronous entry point, for its recipes. It equals main_base with asynchronous training."""

from __future__ import annotations

import sys

from skyrl_train.experiment.base import Experiment, launch_experiment

ASYNC = ("trainer.fully_async.enabled=true",)


def main() -> None:
    launch_experiment(Experiment, [*ASYNC, *sys.argv[1:]])


if __name__ == "__main__":
    main()
