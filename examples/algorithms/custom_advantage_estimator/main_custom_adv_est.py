"""A program that registers a custom advantage estimator: rewards minus their mean over the batch."""

from __future__ import annotations

import torch
from torch import Tensor

import skyrl_train as sk
from skyrl_train.experiment.base import Experiment, run_experiment
from skyrl_train.experiment.driver import exit_with_signal_status


@sk.register.advantage("simple_baseline")
def simple_baseline(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Return the rewards minus their mean, and 0 for failed samples, which have no reward. All tensors are [B]."""
    mean = rewards[valid].mean() if valid.any() else rewards.new_zeros(())
    return torch.where(valid, rewards - mean, 0.0)


@exit_with_signal_status()
def main() -> None:
    run_experiment(Experiment)


if __name__ == "__main__":
    main()
