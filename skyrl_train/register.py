"""Decorators that register users' implementations by name: `@skyrl_train.register.KIND("name")`.

`rewards` is a plain function, because it registers several functions together. The configuration can then choose the
name like a built-in one. Register in the program that calls `skyrl_train.train`, or, for the command line, in a module
that `trainer.plugins` names. A name that is taken raises ConfigError. Nothing heavy is imported before a decorator is
used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def environment(name: str) -> Callable[[T], T]:
    """Register a `TextEnv`, or another class or factory with its constructor, as environment.env_class=NAME.

    Rows of the data choose it in their column env_class. Raises ConfigError if the name is taken.
    """
    from skyrl_train.environments.registry import environments

    return environments.register(name)  # type: ignore[return-value]


def reward(name: str) -> Callable[[T], T]:
    """Register a reward function as a single-turn environment, environment.env_class=NAME.

    It is called with the response, a string with the model's reasoning (`final_answer` removes it), and with those of
    these keywords that its signature names: `prompt` (the row's messages), `extras` (the row's other columns),
    `ground_truth` (from extras["reward_spec"]). It returns one finite number. Raises ConfigError if the name is taken.
    """
    from skyrl_train.environments.function_env import RewardFunction
    from skyrl_train.environments.registry import environments

    def add(function: T) -> T:
        environments.register(name)(RewardFunction(function))  # type: ignore[arg-type]
        return function

    return add


def rewards(name: str, functions: Sequence[Callable[..., float]], weights: Sequence[float] | None = None) -> None:
    """Register several reward functions as one single-turn environment, environment.env_class=NAME.

    The reward is the weighted sum of the functions' values. Each value, before its weight is applied, becomes the
    metric environment/{name of the function}.

    Args:
        name: Name of the environment.
        functions: Functions with the signature that `reward` describes.
        weights: One number per function. None means 1 for each. A function of weight 0 is only a metric.

    Raises:
        ConfigError: The name is taken, a function does not fit, two functions have the same name, or the weights are
            not one finite number per function.

    Example:
        sk.register.rewards("graded", [is_correct, is_short], weights=[1.0, 0.2])
    """
    from skyrl_train.environments.function_env import WeightedRewards
    from skyrl_train.environments.registry import environments

    environments.register(name)(WeightedRewards(name, functions, weights))


def agent(name: str) -> Callable[[T], T]:
    """Register a coroutine `async def run(session, row)` as environment.skyrl_gym.agent.run=NAME.

    It calls the model at `session.base_url` with any client, for one row of the data: a mapping of the row's columns
    with `prompt` (messages) and `uid`. It returns the reward, {"reward": ..., "METRIC": ...}, or None if
    environment.skyrl_gym.agent.reward or a call of `POST /sessions/ID/reward` gives the reward. Raises ConfigError if
    the name is taken or the function cannot be called in this way.
    """
    from skyrl_train.environments.agent_registry import agents, check_agent_function

    def add(function: T) -> T:
        check_agent_function(name, function)
        return agents.register(name)(function)  # type: ignore[arg-type,return-value]

    return add


def tool(name: str) -> Callable[[T], T]:
    """Register a `Tool` as environment.skyrl_gym.tool_use.tools=[NAME]. It is called with its settings as keywords.

    Raises ConfigError if the name is taken.
    """
    from skyrl_train.environments.tools.registry import tools

    return tools.register(name)  # type: ignore[return-value]


def tracker(name: str) -> Callable[[T], T]:
    """Register a `Tracker` as trainer.logger=[NAME]. It is called with a `TrackerSetup`.

    Raises ConfigError if the name is taken.
    """
    from skyrl_train.report.trackers import trackers

    return trackers.register(name)  # type: ignore[return-value]


def advantage(name: str) -> Callable[[T], T]:
    """Register an advantage estimator as trainer.algorithm.advantage_estimator=NAME.

    Its signature is that of `algorithms.registry.AdvantageEstimator`, or of SkyRL's estimators. Raises ConfigError if
    the name is taken.
    """
    from skyrl_train.algorithms.registry import advantage_estimators

    return advantage_estimators.register(name)  # type: ignore[return-value]


def policy_loss(name: str) -> Callable[[T], T]:
    """Return a decorator that registers a policy loss as trainer.algorithm.policy_loss_type=NAME.

    The function has the signature of `algorithms.registry.PolicyLoss`, or of SkyRL's losses. Raises ConfigError if the
    name is taken.
    """
    from skyrl_train.algorithms.registry import policy_losses

    return policy_losses.register(name)  # type: ignore[return-value]


def sft_loss(name: str) -> Callable[[T], T]:
    """Register a loss of supervised fine-tuning (`algorithms.registry.SFTLoss`) as
    trainer.algorithm.sft.loss_type=NAME.

    Raises ConfigError if the name is taken.
    """
    from skyrl_train.algorithms.registry import sft_losses

    return sft_losses.register(name)  # type: ignore[return-value]


def kl_estimator(name: str) -> Callable[[T], T]:
    """Register a KL estimator (`algorithms.registry.KLEstimator`) as trainer.algorithm.kl_estimator_type=NAME.

    Raises ConfigError if the name is taken.
    """
    from skyrl_train.algorithms.registry import kl_estimators

    return kl_estimators.register(name)  # type: ignore[return-value]


def reduction(name: str) -> Callable[[T], T]:
    """Register a loss reduction (`algorithms.registry.Reduction`) as trainer.algorithm.loss_reduction=NAME.

    Raises ConfigError if the name is taken.
    """
    from skyrl_train.algorithms.registry import reductions

    return reductions.register(name)  # type: ignore[return-value]
