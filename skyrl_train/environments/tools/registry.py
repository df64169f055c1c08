"""Tools by name.

    @register_tool("dice")                         then environment.skyrl_gym.tool_use.tools=[dice]
    class DiceTool(Tool): ...

Call it at import of a module named in `trainer.plugins`: plugins are imported in every environment process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from skyrl_train.config.choices import TOOLS
from skyrl_train.environments.tools.base import Tool
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry

ToolFactory = Callable[..., Tool]
F = TypeVar("F", bound=ToolFactory)
tools: Registry[ToolFactory] = Registry("tool", TOOLS)


def register_tool(name: str) -> Callable[[F], F]:
    """Decorator: a class or factory, called with a tool's settings as keywords, under `name`."""

    def add(factory: F) -> F:
        tools.register(name)(factory)
        return factory

    return add


def make_tool(name: str, settings: Mapping[str, Any] | None = None) -> Tool:
    """A new tool for one episode. Raises ConfigError for an unknown name, and for settings that it does not take."""
    try:
        factory = tools.get(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tool {name!r} ({tools.table.get(name)}) does not load: {error}") from error
    try:
        return factory(**(settings or {}))
    except TypeError as error:
        raise ConfigError(f"tool {name!r} does not take the settings {dict(settings or {})!r}: {error}") from error


def check_tool(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """What must hold before a run starts: the name, the settings, and what the tool needs of this machine.

    Raises ConfigError.
    """
    made = make_tool(name, settings)
    type(made).check(**(settings or {}))
