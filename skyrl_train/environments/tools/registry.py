"""The registry of tools.

    @sk.register.tool("dice")                      then environment.skyrl_gym.tool_use.tools=[dice]
    class DiceTool(Tool): ...

Register when a module listed in `trainer.plugins` is imported: plugins are imported in every environment process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skyrl_train.config.choices import TOOLS
from skyrl_train.environments.tools.base import Tool, argument_validator
from skyrl_train.errors import ConfigError
from skyrl_train.registry import Registry

ToolFactory = Callable[..., Tool]
tools: Registry[ToolFactory] = Registry("tool", TOOLS)


def make_tool(name: str, settings: Mapping[str, Any] | None = None) -> Tool:
    """Create a tool for one episode. Raises ConfigError for an unknown name or for settings that it does not accept."""
    try:
        factory = tools.get(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"tool {name!r} ({tools.table.get(name)}) does not load: {error}") from error
    try:
        return factory(**(settings or {}))
    except TypeError as error:
        raise ConfigError(f"tool {name!r} does not take the settings {dict(settings or {})!r}: {error}") from error


def check_tool(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """Check a tool before a run starts: its name, its settings, its parameters, and what it needs of this machine.

    Raises ConfigError.
    """
    made = make_tool(name, settings)
    argument_validator(made)
    type(made).check(**(settings or {}))
