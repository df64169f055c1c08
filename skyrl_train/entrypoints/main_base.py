"""Training with rewards: `python -m skyrl_train.entrypoints.main_base key=value ...`

Scripts written for SkyRL import BasePPOExp, config_dir and validate_cfg from here. Programs written for this package
subclass `skyrl_train.Experiment` instead.
"""

from __future__ import annotations

from skyrl_train.config.hydra import presets_folder
from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.experiment.driver import exit_with_signal_status
from skyrl_train.skyrl.experiment import BasePPOExp
from skyrl_train.skyrl.script_entry import validate_cfg

__all__ = ["BasePPOExp", "config_dir", "validate_cfg"]

config_dir = str(presets_folder())
"""For `@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)`."""


@exit_with_signal_status()
def main() -> None:
    """Train with the arguments of the process. Exits as `launch_experiment` does."""
    launch_experiment(Experiment)


if __name__ == "__main__":
    main()
