"""Who reads the log-probs of a reference model; if nobody does, none is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skyrl_train.config.algorithm import AlgorithmConfig

ESTIMATORS = frozenset({"distillation"})
SFT_LOSSES = frozenset({"minor_sft"})
"""Of the names in choices.py, those whose functions ask for `ref_logprobs`."""


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """Whether rewards pay for the distance to the reference: with a coefficient of 0 they do not."""
    return algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0


def kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    """Whether the loss has a KL term: with a coefficient of 0 it has none."""
    return algorithm.use_kl_loss and algorithm.kl_loss_coef != 0


def measures_kl(algorithm: AlgorithmConfig) -> bool:
    """Whether anything measures the distance to the reference."""
    return kl_in_loss(algorithm) or kl_in_reward(algorithm)
