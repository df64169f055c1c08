from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from skyrl_train.environments import registry
from skyrl_train.environments.base import AttrDict, BaseTextEnv, StepOutput, TextEnv, validate_step_output
from skyrl_train.errors import ConfigError, EnvironmentFailure


@pytest.fixture(autouse=True)
def restore_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.environments, "table", dict(registry.environments.table))
    monkeypatch.setattr(registry.environments, "loaded", dict(registry.environments.loaded))


@pytest.mark.parametrize(
    ("reward", "value"), [(1, 1.0), (True, 1.0), (0.5, 0.5), (np.float32(0.25), 0.25), (np.array([2.0]), 2.0)]
)
def test_all_number_types_are_rewards(reward: Any, value: float):
    assert validate_step_output({"observations": [], "reward": reward, "done": True}).reward == value


@pytest.mark.fault("F11")
@pytest.mark.parametrize(
    "reward", [None, "1", float("nan"), float("-inf"), [1.0], (), {}, np.array([1.0, 2.0]), 10**400, 1j, object()]
)
def test_other_values_are_bad_rewards(reward: Any):
    with pytest.raises(EnvironmentFailure) as caught:
        validate_step_output(StepOutput([], reward, True))
    assert caught.value.kind == "bad_reward"


@pytest.mark.defect("overflowing-rewards-end-run")
@pytest.mark.parametrize("reward", [1.7e308, -1e300, 3e38, 10**16])
def test_reward_that_overflows_float32_is_rejected(reward: float):
    with pytest.raises(EnvironmentFailure, match=r"bad_reward: .*not a single number of at most"):
        validate_step_output(StepOutput([], reward, True))


@pytest.mark.parametrize(
    "change",
    [
        {"observations": None},
        {"observations": "text"},
        {"observations": ["text"]},
        {"observations": [{"role": "user"}]},
        {"observations": [{"role": "user", "content": 3}]},
        {"done": None},
        {"done": "yes"},
        {"metadata": ["a"]},
        {"postprocessed_action": 3},
    ],
)
def test_malformed_step_output_is_rejected(change: dict[str, Any]):
    good = {"observations": [{"role": "user", "content": "go on"}], "reward": 0.0, "done": False, "metadata": {}}
    assert validate_step_output(good).observations == good["observations"]
    with pytest.raises(EnvironmentFailure) as caught:
        validate_step_output(good | change)
    assert caught.value.kind == "bad_step_output"


@pytest.mark.parametrize(
    ("calls", "records"),
    [
        ("python", []),
        ([{"arguments": "1"}, {"name": 3}, None], []),
        ([{"name": "python", "arguments": {"code": "1"}}], [{"name": "python", "arguments": '{"code": "1"}'}]),
        (
            [{"id": "x", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
            [{"name": "add", "arguments": "{}"}],
        ),
        ([{"name": "a", "arguments": "b", "error": "c"}], [{"name": "a", "arguments": "b", "error": "c"}]),
    ],
)
def test_malformed_tool_calls_are_dropped(calls: Any, records: list[dict[str, str]]):
    good = {"observations": [], "reward": 0.0, "done": False, "metadata": {}}
    assert validate_step_output(good | {"tool_calls": calls}).tool_calls == records


def test_settings_allow_mapping_and_attribute_access():
    settings = AttrDict({"topk": 3, "search": {"url": "here"}})
    assert (settings.topk, settings["topk"], settings.get("none", 1), settings.search.url) == (3, 3, 1, "here")
    with pytest.raises(AttributeError, match=r"no 'timeout'; they have \['search', 'topk'\]"):
        _ = settings.timeout


def test_base_class_returns_prompt_unchanged():
    environment = TextEnv(extras={"a": 1})
    assert environment.init([{"role": "user", "content": "hi"}]) == ([{"role": "user", "content": "hi"}], {})
    assert environment.extras == {"a": 1}
    with pytest.raises(NotImplementedError, match="TextEnv does not define step"):
        environment.step("hello")


def test_tool_groups_are_found_by_name():
    class Group:
        name = "calculator"

        def get_tool_to_group_mapping(self) -> dict[str, str]:
            return {"add": self.name}

        def execute_tool(self, tool: str, *arguments: int) -> int:
            return sum(arguments)

    environment = BaseTextEnv()
    environment.init_tool_groups([Group()])
    assert environment.tool_to_toolgroup == {"add": "calculator"}
    assert environment._execute_tool("calculator", "add", [1, 2]) == 3
    with pytest.raises(ValueError, match="'search' is not one of"):
        environment._execute_tool("search", "search", ["x"])


class Mine(TextEnv):
    pass


def test_environment_is_registered_as_class_or_entry_point():
    registry.register("mine", Mine)
    environment = registry.make("mine", {"a": 1}, {"b": 2})
    assert isinstance(environment, Mine)
    assert (environment.env_config.a, environment.extras) == (1, {"b": 2})
    registry.register("theirs", "skyrl_train.environments.tasks.gsm8k:GSM8KEnv")
    registry.register("theirs", "skyrl_train.environments.tasks.gsm8k:GSM8KEnv")
    assert registry.find("theirs") is registry.find("gsm8k")


def test_registered_name_is_not_replaced():
    with pytest.raises(ConfigError, match="'gsm8k' is already registered"):
        registry.register("gsm8k", Mine)
    with pytest.raises(ConfigError, match="'gsm8k' is already registered"):
        registry.register("gsm8k", "elsewhere:Env")


def test_invalid_entry_points_raise_config_error():
    with pytest.raises(ConfigError, match=r"'no_colon' is not of the form 'package.module:Class'"):
        registry.register("a", "no_colon")
    registry.register("b", "no_such_module:Env")
    with pytest.raises(ConfigError, match=r"environment 'b' \(no_such_module:Env\) cannot be loaded"):
        registry.make("b")
    with pytest.raises(ConfigError, match=r"Unknown environment 'gsm9k'.*Did you mean 'gsm8k'"):
        registry.make("gsm9k")


def test_worker_imports_neither_torch_nor_ray():
    code = (
        "import sys, skyrl_train.environments.worker, skyrl_train.environments.tasks.arithmetic; "
        "print([name for name in ('torch', 'ray', 'numpy', 'transformers') if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"
