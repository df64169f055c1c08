"""Names for what is yours, in one style: `@skyrl_train.register.KIND("name")`.

A name can then be chosen in the configuration, beside those that this package brings. Register in the program that
calls `skyrl_train.train`, or in a module that `trainer.plugins` names, for the command line. A name that is taken is a
ConfigError. Nothing heavy is imported before the kind's decorator is used.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def environment(name: str) -> Callable[[T], T]:
    """A `TextEnv`, or any class or factory with its constructor: environment.env_class=NAME, or a row's env_class."""
    from skyrl_train.environments.registry import environments

    return environments.register(name)  # type: ignore[return-value]


def reward(name: str) -> Callable[[T], T]:
    """A function as the reward of an environment of one turn: environment.env_class=NAME.

    It is called with the response, a string with the model's reasoning (`final_answer` removes it), and with those of
    these keywords that it names: `prompt` (the row's messages), `extras` (the row's other columns), `ground_truth` (of
    extras["reward_spec"]). It returns one finite number.
    """
    from skyrl_train.environments.function_env import RewardFunction
    from skyrl_train.environments.registry import environments

    def add(function: T) -> T:
        environments.register(name)(RewardFunction(function))  # type: ignore[arg-type]
        return function

    return add


def tool(name: str) -> Callable[[T], T]:
    """A `Tool`, called with its settings as keywords: environment.skyrl_gym.tool_use.tools=[NAME]."""
    from skyrl_train.environments.tools.registry import tools

    return tools.register(name)  # type: ignore[return-value]


def tracker(name: str) -> Callable[[T], T]:
    """A `Tracker`, made from a `TrackerSetup`: trainer.logger=[NAME]."""
    from skyrl_train.report.trackers import trackers

    return trackers.register(name)  # type: ignore[return-value]


def advantage(name: str) -> Callable[[T], T]:
    """An advantage estimator: trainer.algorithm.advantage_estimator=NAME.

    Its signature is that of `algorithms.registry.AdvantageEstimator`, or of SkyRL's estimators.
    """
    from skyrl_train.algorithms.registry import advantage_estimators

    return advantage_estimators.register(name)  # type: ignore[return-value]


def policy_loss(name: str) -> Callable[[T], T]:
    """A policy loss: trainer.algorithm.policy_loss_type=NAME.

    Its signature is that of `algorithms.registry.PolicyLoss`, or of SkyRL's losses.
    """
    from skyrl_train.algorithms.registry import policy_losses

    return policy_losses.register(name)  # type: ignore[return-value]


def sft_loss(name: str) -> Callable[[T], T]:
    """A loss of supervised fine-tuning (`algorithms.registry.SFTLoss`): trainer.algorithm.sft.loss_type=NAME."""
    from skyrl_train.algorithms.registry import sft_losses

    return sft_losses.register(name)  # type: ignore[return-value]


def kl_estimator(name: str) -> Callable[[T], T]:
    """A KL estimator (`algorithms.registry.KLEstimator`): trainer.algorithm.kl_estimator_type=NAME."""
    from skyrl_train.algorithms.registry import kl_estimators

    return kl_estimators.register(name)  # type: ignore[return-value]


def reduction(name: str) -> Callable[[T], T]:
    """A loss reduction (`algorithms.registry.Reduction`): trainer.algorithm.loss_reduction=NAME."""
    from skyrl_train.algorithms.registry import reductions

    return reductions.register(name)  # type: ignore[return-value]
