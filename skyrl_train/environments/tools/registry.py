"""The registry of tools that models can call, and functions that create and check a tool.

    @sk.register.tool("dice")                      then environment.skyrl_gym.tool_use.tools=[dice]
    class DiceTool(Tool): ...

Register a tool in a module that `trainer.plugins` lists: every environment process imports these modules.
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
    """Create a tool for one episode, usually for a `ToolBox`.

    Args:
        name: A built-in tool ("python", "sql", "search", "fetch", "mcp" or "browser"), or the name of a tool that
            `register.tool` registered.
        settings: Keyword arguments of the tool's constructor; None to pass none.

    Raises:
        ConfigError: The name is unknown, the tool's module cannot be imported, or the constructor rejects the settings.

    Example:
        sk.make_tool("python", {"wall_s": 5})
    """
    try:
        factory = tools.get(name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"The tool {name!r} ({tools.table.get(name)}) cannot be imported: {error}") from error
    try:
        return factory(**(settings or {}))
    except TypeError as error:
        raise ConfigError(
            f"The tool {name!r} does not accept the settings {dict(settings or {})!r}: {error}"
        ) from error


def check_tool(name: str, settings: Mapping[str, Any] | None = None) -> None:
    """Check a tool before a run starts: its name, its settings, its JSON schema, and what it needs on this machine.

    Args:
        name: Registered name of the tool.
        settings: Keyword arguments of the tool's constructor; None to pass none.

    Raises:
        ConfigError: One of these checks fails.
    """
    tool = make_tool(name, settings)
    argument_validator(tool)
    type(tool).check(**(settings or {}))
