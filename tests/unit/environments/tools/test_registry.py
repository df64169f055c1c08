from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.environments import registry as environments
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tools import registry
from skyrl_train.environments.tools.base import Tool
from skyrl_train.errors import ConfigError


@pytest.fixture(autouse=True)
def restore_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    for entry in (registry.tools, environments.environments):
        monkeypatch.setattr(entry, "table", dict(entry.table))
        monkeypatch.setattr(entry, "loaded", dict(entry.loaded))


def test_tool_is_created_by_name_with_settings():
    @registry.tools.register("dice")
    class Dice(Tool):
        name = "dice"
        description = "Throws a die."
        parameters: dict[str, Any] = {"type": "object", "properties": {}}  # noqa: RUF012

        def __init__(self, sides: int = 6):
            self.sides = sides

        async def call(self, arguments: dict[str, Any]) -> str:
            return str(self.sides)

    tool = registry.make_tool("dice", {"sides": 20})
    assert isinstance(tool, Dice) and tool.sides == 20
    assert tool.schema()["function"]["description"] == "Throws a die."
    with pytest.raises(ConfigError, match=r"tool 'dice' does not accept the settings \{'edges': 3\}.*edges"):
        registry.make_tool("dice", {"edges": 3})
    with pytest.raises(ConfigError, match=r"Unknown tool 'dise'.*Did you mean 'dice'"):
        registry.make_tool("dise")


def test_import_error_names_the_tool():
    registry.tools.table["broken"] = "no_such_module_at_all:Tool"
    with pytest.raises(ConfigError, match=r"tool 'broken'.*cannot be imported"):
        registry.make_tool("broken")


def test_environments_check_their_settings():
    seen = []

    class Needy(TextEnv):
        @classmethod
        def check(cls, env_config: Any) -> None:
            seen.append(env_config)
            if env_config.get("server") is None:
                raise ConfigError("environment.skyrl_gym.needy.server is not set.")

        def step(self, action: str) -> StepOutput:
            return StepOutput([], 0.0, True)

    environments.register("needy", Needy)
    environments.register("factory", lambda env_config, extras: Needy(env_config, extras))
    environments.check_environments(["needy", "factory", "needy", "gsm8k"], {"needy": {"server": "a"}})
    assert seen == [{"server": "a"}]
    with pytest.raises(ConfigError, match=r"needy\.server is not set"):
        environments.check_environments(["needy"], {})
    with pytest.raises(ConfigError, match="Unknown environment 'neddy'"):
        environments.check_environments(["neddy"], {})
