"""The names of the `skyrl_gym` package: an environment written for that package only needs another import line.

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
    """A base class of environments with SkyRL-Gym's interface; `get_metrics` provides the metrics of an episode."""

    def get_metrics(self) -> dict[str, Any]:
        """Return the metrics of the episode; called once, when it ends. Subclasses override this."""
        return {}

    @staticmethod
    def aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        """Return `default_aggregate_metrics(metrics)`.

        Overriding this method has no effect on a run, which averages every metric over episodes.
        """
        return default_aggregate_metrics(metrics)


def register(
    id: str, entry_point: str | Callable[..., Any] | None = None, kwargs: Mapping[str, Any] | None = None
) -> None:
    """Register an environment. If `id` is the name of a built-in environment (multiply), replace it with a warning.

    Args:
        id: Name of the environment.
        entry_point: Class, factory, or "package.module:Class".
        kwargs: Further keyword arguments of the constructor; the arguments that a run passes take precedence. None: no
            further ones.

    Raises:
        ConfigError: `entry_point` is None, or `id` is already registered for something else.
    """
    if entry_point is None:
        raise ConfigError(
            f"environment {id!r}: entry_point=None is not allowed; pass a class or 'package.module:Class'."
        )
    if id in ENVIRONMENTS and registry.environments.table.get(id) == ENVIRONMENTS[id]:
        log.warning("environment %r is now %s; it replaces the built-in environment of that name", id, entry_point)
        registry.environments.unregister(id)
    if kwargs:
        registry.register(id, _with_arguments(id, entry_point, dict(kwargs)))
    else:
        registry.register(id, entry_point)


def _with_arguments(id: str, entry_point: str | Callable[..., Any], kwargs: dict[str, Any]) -> Callable[..., Any]:
    def make(**arguments: Any) -> Any:
        factory = load_object(entry_point) if isinstance(entry_point, str) else entry_point
        return factory(**kwargs | arguments)

    # The registry compares names, so that registering twice is allowed only with equal arguments.
    make.__name__ = f"{entry_point} with {kwargs}"
    return make


def deregister(id: str) -> None:
    """Remove environment `id` from the registry."""
    registry.environments.unregister(id)


def make(id: str, **kwargs: Any) -> Any:
    """Create environment `id` in this process, with `kwargs` for its constructor.

    Raises:
        ConfigError: The id is unknown, or its class cannot be imported.
    """
    return registry.find(id)(**kwargs)


def default_aggregate_metrics(metrics: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the mean of every numeric metric over the episodes that have it; ignore other values."""
    values: dict[str, list[float]] = {}
    for episode in metrics:
        for name, value in episode.items():
            if isinstance(value, int | float):
                values.setdefault(name, []).append(float(value))
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}


def aggregate_for_environment(env_name: str, metrics: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Aggregate metrics with the environment's own `aggregate_metrics`, or with the default if it has none.

    Args:
        env_name: Id of a registered environment.
        metrics: The metrics of each episode.

    Raises:
        ConfigError: The id is unknown, or its class cannot be imported.
    """
    aggregate = getattr(registry.find(env_name), "aggregate_metrics", default_aggregate_metrics)
    return aggregate(metrics)


class tool:
    """A decorator that marks a method of a ToolGroup as a tool."""

    def __init__(self, func: Callable[..., Any]):
        self.func = func
        self.name = func.__name__

    def __get__(self, instance: Any, owner: type) -> Any:
        return self if instance is None else self.func.__get__(instance, owner)


class ToolGroup:
    """A group of tools that share resources. Subclasses create the resources, then call `super().__init__(name)`."""

    def __init__(self, name: str):
        self.name = name
        self._tool_registry = {
            member.name: getattr(self, attribute)
            for attribute in dir(type(self))
            if isinstance(member := getattr(type(self), attribute, None), tool)
        }

    def get_name(self) -> str:
        """Return the name of the group."""
        return self.name

    def get_tool(self, name: str) -> Callable[..., Any] | None:
        """Return the method that is the tool `name`, or None."""
        return self._tool_registry.get(name)

    def get_tool_names(self) -> list[str]:
        """Return the names of the group's tools."""
        return list(self._tool_registry)

    def execute_tool(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the tool `name` with the further arguments and return its result.

        Raises:
            ValueError: The group has no such tool.
        """
        method = self.get_tool(name)
        if method is None:
            raise ValueError(f"tool {name!r} is not in group {self.name!r}; choose one of {self.get_tool_names()}.")
        return method(*args, **kwargs)

    def get_tool_to_group_mapping(self) -> dict[str, str]:
        """Return a mapping from the name of each tool to the name of the group."""
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
"""Namespaces that make `skyrl_gym.envs.register(...)` and similar names work."""
