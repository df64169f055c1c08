"""Single-turn environments that are made from reward functions."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from skyrl_train.data.messages import Message
from skyrl_train.environments.base import StepOutput, TextEnv, validate_reward
from skyrl_train.errors import ConfigError

REWARD_KEYWORDS = ("prompt", "extras", "ground_truth")
_POSITIONAL = inspect.Parameter.POSITIONAL_ONLY
_KEYWORD_ONLY, _VAR_KEYWORD = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD


class RewardFunction:
    """An environment factory that makes single-turn environments from a reward function.

    The function takes the response as its first argument and returns the reward. It also receives each keyword of
    REWARD_KEYWORDS that its signature names.

    Raises:
        ConfigError: The function is a class or a coroutine function, or its signature does not fit.
    """

    def __init__(self, function: Callable[..., float]):
        if inspect.isclass(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"{describe_function(function)}: must be an ordinary function that returns a number.")
        self.function = function
        self.keywords = accepted_keywords(function, REWARD_KEYWORDS)
        self.__module__ = function.__module__
        self.__name__ = getattr(function, "__name__", type(self).__name__)

    def __call__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> TextEnv:
        return _SingleTurnEnv(self.evaluate, env_config, extras)

    def evaluate(self, response: str, known: Mapping[str, Any]) -> StepOutput:
        """Return the output of an episode's only step.

        Args:
            response: The model's text.
            known: A value for each of REWARD_KEYWORDS.
        """
        reward = self.function(response, **{name: known[name] for name in self.keywords})
        return StepOutput(observations=[], reward=reward, done=True)


class WeightedRewards:
    """An environment factory that makes single-turn environments whose reward is a weighted sum.

    The value of each function, before its weight is applied, becomes the metric environment/{name of the function}.

    Args:
        name: Name under which the environment is registered.
        functions: Reward functions, as for `RewardFunction`, with different names.
        weights: One weight per function. None means 1 for each. A function of weight 0 is only a metric.

    Raises:
        ConfigError: A function does not fit, two functions have the same name, or the weights are not one finite
            number per function.
    """

    def __init__(self, name: str, functions: Sequence[Callable[..., float]], weights: Sequence[float] | None = None):
        self.rewards = [RewardFunction(function) for function in functions]
        self.weights = [1.0] * len(self.rewards) if weights is None else [float(weight) for weight in weights]
        if not self.rewards:
            raise ConfigError(f"rewards {name!r}: functions is empty. Pass at least one reward function.")
        if len(self.weights) != len(self.rewards) or not all(map(math.isfinite, self.weights)):
            raise ConfigError(
                f"rewards {name!r}: weights={self.weights} must be one finite number for each of the "
                f"{len(self.rewards)} functions."
            )
        names = [reward.__name__ for reward in self.rewards]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"rewards {name!r}: two functions have the name {repeated[0]!r}. Rename one of them, because the name "
                "is also that of its metric."
            )
        self.__module__ = self.rewards[0].__module__
        self.__name__ = name

    def __call__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> TextEnv:
        return _SingleTurnEnv(self.evaluate, env_config, extras)

    def evaluate(self, response: str, known: Mapping[str, Any]) -> StepOutput:
        """Return the output of an episode's only step, with the value of each function in its metadata.

        Args:
            response: The model's text.
            known: A value for each of REWARD_KEYWORDS.

        Raises:
            EnvironmentFailure: A function did not return a number (kind "bad_reward").
        """
        values = {
            reward.__name__: validate_reward(
                reward.evaluate(response, known).reward, f"the result of {describe_function(reward)}"
            )
            for reward in self.rewards
        }
        total = sum(weight * value for weight, value in zip(self.weights, values.values(), strict=True))
        return StepOutput(observations=[], reward=total, done=True, metadata=dict(values))


def accepted_keywords(function: Callable[..., Any], known: Sequence[str]) -> list[str]:
    """Return the keyword arguments that a reward function accepts.

    Args:
        function: Reward function. Its first parameter takes the response.
        known: Keywords that the caller can pass.

    Returns:
        The keywords of `known` that appear in the signature after the first parameter.

    Raises:
        ConfigError: The function has no readable signature, has no parameter for the response, or requires another
            argument.
    """
    description = describe_function(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{description}: {error}; wrap it in a function with a parameter for the response."
        ) from error
    if not parameters or parameters[0].kind in (_KEYWORD_ONLY, _VAR_KEYWORD):
        raise ConfigError(f"{description}: its first parameter must take the response.")
    after = [p for p in parameters[1:] if p.kind not in (inspect.Parameter.VAR_POSITIONAL, _VAR_KEYWORD)]
    unknown = [p.name for p in after if p.default is p.empty and (p.name not in known or p.kind is _POSITIONAL)]
    if unknown:
        raise ConfigError(
            f"{description} requires {', '.join(unknown)}; after the response it may take only {', '.join(known)}."
        )
    return [p.name for p in after if p.name in known and p.kind is not _POSITIONAL]


def describe_function(function: Callable[..., Any]) -> str:
    """Return the description of a reward function for use in messages."""
    return f"the reward function {getattr(function, '__name__', function)!r}"


class _SingleTurnEnv(TextEnv):
    def __init__(self, evaluate: Callable[[str, Mapping[str, Any]], StepOutput], env_config: Any, extras: Any):
        super().__init__(env_config, extras)
        self.evaluate = evaluate
        self.prompt: list[Message] = []

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        self.prompt = prompt
        return prompt, {}

    def step(self, action: str) -> StepOutput:
        spec = self.extras.get("reward_spec")
        known = {
            "prompt": self.prompt,
            "extras": self.extras,
            "ground_truth": spec.get("ground_truth") if isinstance(spec, Mapping) else None,
        }
        return self.evaluate(action, known)
