"""The names of the `skyrl_gym` package, so that an environment written for it only needs another import line.

    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
becomes
    from skyrl_train.environments.integrations.skyrl_gym import BaseTextEnv, BaseTextEnvStepOutput, ConversationType

and `import skyrl_gym` becomes `from skyrl_train.environments.integrations import skyrl_gym`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from skyrl_train.config.choices import ENVIRONMENTS
from skyrl_train.data.messages import Message
from skyrl_train.environments import base, registry
from skyrl_train.environments.base import BaseTextEnvStepOutput, TextEnv
from skyrl_train.errors import ConfigError
from skyrl_train.registry import load_object

log = logging.getLogger(__name__)

MessageType = Message
ConversationType = list[Message]
Env = TextEnv


class BaseTextEnv(base.BaseTextEnv):
    """SkyRL-Gym's base class. The result of `get_metrics` at the end of the episode becomes its metrics."""

    def get_metrics(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """SkyRL-Gym's default. Overriding it has no effect: runs average every number over episodes."""
        return default_aggregate_metrics(metrics)


def register(
    id: str, entry_point: str | Callable[..., Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> None:
    """Register a class, a factory or "module:Class" as environment `id`; `kwargs` are further constructor arguments.

    If this package has a built-in environment of that name (multiply), yours replaces it, with a warning. Raises
    ConfigError if `id` was registered before.
    """
    if entry_point is None:
        raise ConfigError(f"environment {id!r}: entry_point=None must be a class or 'package.module:Class'.")
    if id in ENVIRONMENTS and registry.environments.table.get(id) == ENVIRONMENTS[id]:
        log.warning("environment %r is %s now, no longer the one that comes along", id, entry_point)
        registry.environments.unregister(id)
    if kwargs:
        registry.register(id, _with_arguments(id, entry_point, dict(kwargs)))
    else:
        registry.register(id, entry_point)


def _with_arguments(id: str, entry_point: str | Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    def make(**arguments: Any) -> Any:
        factory = load_object(entry_point) if isinstance(entry_point, str) else entry_point
        return factory(**kwargs | arguments)

    make.__name__ = f"{entry_point} with {kwargs}"  # registering twice is allowed only if both make the same
    return make


def deregister(id: str) -> None:
    registry.environments.unregister(id)


def make(id: str, **kwargs: Any) -> Any:
    """Create environment `id` in this process. Raises ConfigError for an unknown id."""
    return registry.find(id)(**kwargs)


def default_aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of every number over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in metrics:
        for name, value in episode.items():
            if isinstance(value, int | float):
                values.setdefault(name, []).append(float(value))
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def aggregate_for_environment(env_name: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    aggregate = getattr(registry.find(env_name), "aggregate_metrics", default_aggregate_metrics)
    return aggregate(metrics)


class tool:
    """Decorator that marks a method of a ToolGroup as a tool."""

    def __init__(self, func: Callable[..., Any]):
        self.func = func
        self.name = func.__name__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.func.__get__(instance, owner)


class ToolGroup:
    """Tools that share resources. Subclasses set these up, then call `super().__init__(name)`."""

    def __init__(self, name: str):
        self.name = name
        self._tool_registry = {
            member.name: getattr(self, attribute)
            for attribute in dir(type(self))
            if isinstance(member := getattr(type(self), attribute, None), tool)
        }

    def get_name(self) -> str:
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        return self._tool_registry.get(name)

    def get_tool_names(self) -> list[str]:
        return list(self._tool_registry)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = self.get_tool(name)
        if found is None:
            raise ValueError(f"tool {name!r} is not one of group {self.name!r}: {self.get_tool_names()}")
        return found(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        return dict.fromkeys(self._tool_registry, self.name)


registration = SimpleNamespace(register=register, deregister=deregister, make=make)
base_text_env = SimpleNamespace(
    BaseTextEnv=BaseTextEnv, BaseTextEnvStepOutput=BaseTextEnvStepOutput, ConversationType=ConversationType
)
envs = SimpleNamespace(register=register, deregister=deregister, registration=registration, base_text_env=base_text_env)
tools = SimpleNamespace(tool=tool, ToolGroup=ToolGroup)
metrics = SimpleNamespace(
    default_aggregate_metrics=default_aggregate_metrics, aggregate_for_environment=aggregate_for_environment
)
"""For `skyrl_gym.envs.register(...)` and the like."""
