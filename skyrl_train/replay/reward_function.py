"""A function of your own that scores kept episodes, in a process of environments: it may hang, crash or print there.

    def my_reward(response, *, ground_truth, messages):
        return float(response.strip().endswith(ground_truth))

`response` is the decoded response: the answer itself, or of several turns all that was said from the first answer on.
A function may also name any of KEYWORDS, and may be `async`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.reward_function import keywords_of
from skyrl_train.errors import ConfigError
from skyrl_train.registry import load_object

NAME = "replay.reward_function"
"""Under which processes know the environment below."""
KEYWORDS = (
    *("prompt", "extras", "ground_truth", "messages", "answers", "env_metrics", "data_source", "env_class"),
    *("stop_reason", "turn_rewards", "response_tokens"),
)
"""prompt: the messages that the episode began with; messages: all of them; answers: the model's texts, one a turn;
turn_rewards: the run's own, one a turn."""


def check(target: str) -> Callable[..., Any]:
    """The function "module:name". Raises ConfigError if it cannot be loaded, or not be called with KEYWORDS."""
    where = f"--reward {target}"
    module, colon, name = target.partition(":")
    if not colon or not module or not name:
        raise ConfigError(f"{where}: must be module:function.")
    try:
        function = load_object(target)
    except ImportError as error:
        raise ConfigError(
            f"{where}: {module!r} cannot be imported ({error}); start the command in its folder, or put that on "
            "PYTHONPATH."
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{where}: {module!r} has no {name!r}.") from error
    except Exception as error:  # raised by the module itself
        raise ConfigError(f"{where}: {module!r} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(function) or inspect.isclass(function):
        raise ConfigError(f"{where}: must be a function that returns a number, not {type(function).__name__}.")
    keywords_of(function, KEYWORDS)
    return function  # type: ignore[no-any-return]


_load = functools.cache(check)


class KeptEpisode(TextEnv):
    """The environment whose one step is a call of the function; `extras` has a value for each of KEYWORDS."""

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.function = _load(self.env_config["function"])

    def step(self, action: str) -> StepOutput:
        asked = {name: self.extras[name] for name in keywords_of(self.function, KEYWORDS)}
        reward = self.function(action, **asked)
        if inspect.isawaitable(reward):
            reward = asyncio.run(_awaited(reward))
        return StepOutput(observations=[], reward=reward, done=True)


async def _awaited(reward: Any) -> Any:
    return await reward
