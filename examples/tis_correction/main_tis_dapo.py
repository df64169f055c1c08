"""SkyRL's entry point of DAPO with truncated importance sampling: main_base, as both are keys here."""

from __future__ import annotations

from skyrl_train.experiment.base import Experiment, start
from skyrl_train.experiment.driver import exits_as_told


@exits_as_told()
def main() -> None:
    start(Experiment)


if __name__ == "__main__":
    main()
