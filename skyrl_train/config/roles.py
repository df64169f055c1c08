"""Which models a run needs besides the policy. The checks of a configuration and the builders of a run both ask here.

A function of an algorithm asks for what a model computes by naming it as an argument: `ref_logprobs`, `values`. The
built-in functions are known by name, so that nothing has to be imported; those of plugins once they are registered.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from skyrl_train.config.problems import Problem
from skyrl_train.registry import registered

if TYPE_CHECKING:
    from skyrl_train.config.algorithm import AlgorithmConfig
    from skyrl_train.config.trainer import TrainerConfig

REFERENCE_ESTIMATORS = frozenset({"distillation"})
"""Built-in advantage estimators whose functions ask for `ref_logprobs`."""
REFERENCE_SFT_LOSSES = frozenset({"minor_sft"})
"""Built-in SFT losses whose functions ask for `ref_logprobs`."""
CRITIC_ESTIMATORS = frozenset({"gae"})
"""Built-in advantage estimators whose functions ask for `values`."""


def kl_in_reward(algorithm: AlgorithmConfig) -> bool:
    """True if rewards include a KL penalty. One with a coefficient of 0 does not count."""
    return algorithm.use_kl_in_reward and algorithm.kl_loss_coef != 0


def kl_in_loss(algorithm: AlgorithmConfig) -> bool:
    """True if the loss has a KL term. One with a coefficient of 0 does not count."""
    return algorithm.use_kl_loss and algorithm.kl_loss_coef != 0


def measures_kl(algorithm: AlgorithmConfig) -> bool:
    """True if anything measures the KL divergence from the reference."""
    return kl_in_loss(algorithm) or kl_in_reward(algorithm)


def needs_reference(algorithm: AlgorithmConfig) -> bool:
    """True if training with rewards reads the reference model's log-probs."""
    name = algorithm.advantage_estimator
    asks = _requires("advantage estimator", name, "ref_logprobs", name in REFERENCE_ESTIMATORS)
    return measures_kl(algorithm) or asks is not None


def sft_needs_reference(algorithm: AlgorithmConfig) -> bool:
    """True if supervised fine-tuning reads the reference model's log-probs."""
    name = algorithm.sft.loss_type
    return _requires("SFT loss", name, "ref_logprobs", name in REFERENCE_SFT_LOSSES) is not None


def needs_critic(trainer: TrainerConfig) -> bool:
    """True if the advantage estimator gets values: it requires them, or accepts them and a critic is configured."""
    requires = _values_required(trainer)
    return bool(requires) or (requires is not None and bool(trainer.critic.model.path))


def critic_problem(trainer: TrainerConfig) -> Problem | None:
    """Return the problem if the advantage estimator requires values and no critic is configured."""
    path, estimator = trainer.critic.model.path, trainer.algorithm.advantage_estimator
    if path or not _values_required(trainer):
        return None
    advice = f"advantage_estimator={estimator} needs a critic: it asks for values. Usual is the policy's path."
    return Problem("trainer.critic.model.path", path, "the path of a model", advice)


def _values_required(trainer: TrainerConfig) -> bool | None:
    name = trainer.algorithm.advantage_estimator
    return _requires("advantage estimator", name, "values", name in CRITIC_ESTIMATORS)


def _requires(kind: str, name: str, argument: str, built_in: bool) -> bool | None:
    """Return whether a function requires an argument; None if it has no such argument or is not registered yet."""
    function = registered(kind, name)
    if function is None:
        return True if built_in else None
    parameter = inspect.signature(function).parameters.get(argument)
    return None if parameter is None else parameter.default is parameter.empty
