"""A function as the reward of an environment of one turn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_train.data.trajectory import Message
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.errors import ConfigError

KEYWORDS = ("prompt", "extras", "ground_truth")


class RewardFunction:
    """The environment factory of a function (response, *, those of KEYWORDS that it names) -> reward.

    Raises ConfigError, when it is made, for a required keyword that is none of KEYWORDS.
    """

    def __init__(self, function: Callable[..., float]):
        _, *others = inspect.signature(function).parameters.values()
        named = [p for p in others if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
        unknown = [p.name for p in named if p.name not in KEYWORDS and p.default is p.empty]
        if unknown:
            raise ConfigError(
                f"the reward function {getattr(function, '__name__', function)!r} asks for {', '.join(unknown)}; "
                f"beside the response it may name {', '.join(KEYWORDS)}."
            )
        self.function = function
        self.asked_for = [p.name for p in named if p.name in KEYWORDS]
        self.__module__ = function.__module__
        self.__name__ = getattr(function, "__name__", type(self).__name__)

    def __call__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None) -> TextEnv:
        return _OneTurn(self, env_config, extras)


class _OneTurn(TextEnv):
    def __init__(self, reward: RewardFunction, env_config: Any, extras: Any):
        super().__init__(env_config, extras)
        self.reward = reward
        self.prompt: list[Message] = []

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        self.prompt = prompt
        return prompt, {}

    def step(self, action: str) -> StepOutput:
        known = {
            "prompt": self.prompt,
            "extras": self.extras,
            "ground_truth": (self.extras.get("reward_spec") or {}).get("ground_truth"),
        }
        reward = self.reward.function(action, **{name: known[name] for name in self.reward.asked_for})
        return StepOutput(observations=[], reward=reward, done=True)
