"""Environments and tools that a program registers, in this process and in environment processes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import skyrl_train as sk
from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.environments.registry import environments
from skyrl_train.environments.tools.registry import make_tool, tools
from skyrl_train.environments.user_registrations import (
    MAX_PICKLE_BYTES,
    load_user_registrations,
    serialization_problem,
    serialize_user_registrations,
)
from skyrl_train.errors import ConfigError

BONUS = 0.125
LOCK = threading.Lock()


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Isolate the registrations of each test, and hide those of other tests."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in (environments, tools):
            patch.setattr(registry, "loaded", dict(registry.loaded))
            patch.setattr(registry, "table", dict(registry.table))
            for name in list(registry.user_items()):
                registry.unregister(name)
        yield


def in_main_module(item: Any) -> Any:
    """Make an item look as if the main file had defined it, so that it cannot be imported."""
    item.__module__ = "__main__"
    return item


def make_user_environment() -> Any:
    bonus = BONUS

    class Mine(sk.TextEnv):
        def step(self, action: str) -> sk.StepOutput:
            return sk.StepOutput([], bonus, True)

    return in_main_module(Mine)


async def reward_of(name: str) -> float:
    async with WorkerPool({}, max_env_workers=1) as pool:
        episode = await pool.start(name, Prompt("0", [{"role": "user", "content": "x"}], name, {}, "source"))
        return (await episode.step("7")).reward


def test_environment_of_main_file_runs_in_worker():
    sk.register.environment("mine")(make_user_environment())
    assert asyncio.run(reward_of("mine")) == BONUS


def test_user_environment_replaces_built_in():
    environments.unregister("multiply")
    environments.register("multiply")(make_user_environment())
    assert [entry["name"] for entry in serialize_user_registrations()] == ["multiply"]
    assert asyncio.run(reward_of("multiply")) == BONUS


def test_built_ins_are_not_serialized():
    environments.get("arithmetic")
    assert serialize_user_registrations() == []


def test_registrations_of_plugins_are_kept():
    sk.register.environment("mine")(make_user_environment())
    packed = serialize_user_registrations()
    from_plugin = make_user_environment()
    environments.unregister("mine")
    environments.register("mine")(from_plugin)
    load_user_registrations(packed)
    assert environments.get("mine") is from_plugin


def test_tool_is_sent_despite_environment_with_same_name():
    class Clock(sk.Tool):
        name, description, parameters = "clock", "The time.", {}

        async def call(self, arguments: dict[str, Any]) -> str:
            return "noon"

    sk.register.tool("clock")(in_main_module(Clock))
    environments.register("clock")(lambda env_config, extras: LOCK)
    assert serialization_problem("tool", "clock") is None
    assert "cannot pickle" in str(serialization_problem("environment", "clock"))
    packed = serialize_user_registrations()
    for registry in (tools, environments):
        registry.unregister("clock")
    load_user_registrations(packed)
    assert make_tool("clock").name == "clock"
    with pytest.raises(ConfigError, match=r"'clock' cannot be sent to environment processes .*cannot pickle"):
        environments.get("clock")(env_config={}, extras={})


def test_oversized_globals_are_reported():
    table = bytes(MAX_PICKLE_BYTES)
    environments.register("large")(lambda env_config, extras: table)
    assert f"at most {MAX_PICKLE_BYTES} can be sent" in str(serialization_problem("environment", "large"))


def test_entry_point_is_sent_by_name():
    environments.table["elsewhere"] = "my_module:Env"
    assert serialize_user_registrations() == [{"kind": "environment", "name": "elsewhere", "target": "my_module:Env"}]
