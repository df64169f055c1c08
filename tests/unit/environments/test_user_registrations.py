"""What a program registers, in this process and in an environment process."""

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
    """What a test registers is its own, and what others of this process registered is not there."""
    with pytest.MonkeyPatch.context() as patch:
        for registry in (environments, tools):
            patch.setattr(registry, "loaded", dict(registry.loaded))
            patch.setattr(registry, "table", dict(registry.table))
            for name in list(registry.user_items()):
                registry.unregister(name)
        yield


def as_main(item: Any) -> Any:
    """As if the program's main file had defined it: nobody can import it."""
    item.__module__ = "__main__"
    return item


def own_environment() -> Any:
    bonus = BONUS

    class Mine(sk.TextEnv):
        def step(self, action: str) -> sk.StepOutput:
            return sk.StepOutput([], bonus, True)

    return as_main(Mine)


async def reward_of(name: str) -> float:
    async with WorkerPool({}, max_env_workers=1) as pool:
        episode = await pool.start(name, Prompt("0", [{"role": "user", "content": "x"}], name, {}, "source"))
        return (await episode.step("7")).reward


def test_an_environment_of_the_main_file_runs_in_its_process():
    sk.register.environment("mine")(own_environment())
    assert asyncio.run(reward_of("mine")) == BONUS


def test_one_in_the_place_of_a_built_in_is_the_one_that_runs():
    environments.unregister("multiply")
    environments.register("multiply")(own_environment())
    assert [entry["name"] for entry in serialize_user_registrations()] == ["multiply"]
    assert asyncio.run(reward_of("multiply")) == BONUS


def test_built_ins_are_not_sent_whether_loaded_or_not():
    environments.get("arithmetic")
    assert serialize_user_registrations() == []


def test_what_plugins_brought_stays():
    sk.register.environment("mine")(own_environment())
    packed = serialize_user_registrations()
    theirs = own_environment()
    environments.unregister("mine")
    environments.register("mine")(theirs)
    load_user_registrations(packed)
    assert environments.get("mine") is theirs


def test_a_tool_arrives_and_one_of_the_same_name_as_a_bad_environment_is_not_blamed():
    class Clock(sk.Tool):
        name, description, parameters = "clock", "The time.", {}

        async def call(self, arguments: dict[str, Any]) -> str:
            return "noon"

    sk.register.tool("clock")(as_main(Clock))
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


def test_globals_that_are_too_large_are_a_reason():
    table = bytes(MAX_PICKLE_BYTES)
    environments.register("large")(lambda env_config, extras: table)
    assert f"at most {MAX_PICKLE_BYTES} are sent" in str(serialization_problem("environment", "large"))


def test_an_entry_point_is_sent_as_its_name():
    environments.table["elsewhere"] = "my_module:Env"
    assert serialize_user_registrations() == [{"kind": "environment", "name": "elsewhere", "target": "my_module:Env"}]
