"""The registry of agents: coroutines `async def run(session, row)` that users register or name as "module:function"."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry, load_object, unknown_name_message

AgentFunction = Callable[..., Awaitable[Any]]
agents: Registry[AgentFunction] = Registry("agent")
RUN_KEY = "environment.skyrl_gym.agent.run"


def find_agent(name: str) -> AgentFunction:
    """Return the coroutine function of this name.

    Args:
        name: Name under which the function is registered, or "module:function".

    Raises:
        ConfigError: There is no such function, or it is not `async def run(session, row)`.
    """
    if name not in agents.names() and ":" in name:
        try:
            function = load_object(name)
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"{RUN_KEY}={name} cannot be imported: {error}. Write module:function.") from error
    elif name in agents.names():
        function = agents.get(name)
    else:
        message = unknown_name_message("agent", name, agents.names())
        raise ConfigError(f"{RUN_KEY}={name}: {message} Register it with @register.agent, or write module:function.")
    check_agent_function(name, function)
    return function


def check_agent_function(name: str, function: Any) -> None:
    """Raise ConfigError if an agent is not a coroutine function that can be called with a session and a row."""
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"agent {name!r} is not a coroutine function. Write `async def run(session, row)`.")
    try:
        inspect.signature(function).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"agent {name!r}: {error}. Write `async def run(session, row)`.") from error
