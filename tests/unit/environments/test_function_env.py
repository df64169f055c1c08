from __future__ import annotations

from typing import Any

import pytest

import skyrl_train as sk
from skyrl_train.environments import registry
from skyrl_train.environments.function_env import RewardFunction, WeightedRewards
from skyrl_train.errors import ConfigError, EnvironmentFailure

PROMPT = [{"role": "user", "content": "1 + 1"}]


def rewarded(function: Any, extras: dict[str, Any] | None = None) -> float:
    environment = RewardFunction(function)(extras=extras or {"reward_spec": {"ground_truth": "2"}})
    assert environment.init(PROMPT) == (PROMPT, {})
    output = environment.step("2!")
    assert not isinstance(output, dict) and output.done and output.observations == []
    return output.reward


def test_function_receives_arguments_that_it_names():
    assert rewarded(len) == 2
    assert rewarded(lambda response: 0.5) == 0.5
    assert rewarded(lambda response, *, ground_truth: float(ground_truth in response)) == 1.0
    assert rewarded(lambda response, prompt, extras: len(prompt) + len(extras)) == 2
    assert rewarded(lambda response, bonus=3.0: bonus) == 3.0
    assert rewarded(lambda *all: len(all)) == 1
    assert rewarded(lambda response, *, ground_truth: float(ground_truth is None), {"reward_spec": "odd"}) == 1.0


async def later(response: str) -> float:
    return 1.0


def positional(response: str, ground_truth: str, /) -> float:
    return 1.0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 1.0, "its first parameter must take the response"),
        (lambda *, response: 1.0, "its first parameter must take the response"),
        (lambda **every: 1.0, "its first parameter must take the response"),
        (lambda response, tokens: 1.0, "requires tokens; .* it may take only prompt, extras, ground_truth"),
        (positional, "requires ground_truth"),
        (later, "must be an ordinary function"),
        (float, "must be an ordinary function"),
        (max, "wrap it in a function"),
    ],
)
def test_unsuitable_function_is_rejected(function: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        RewardFunction(function)


def length(response: str) -> int:
    return len(response)


def is_right(response: str, ground_truth: str) -> bool:
    return ground_truth in response


def nothing(response: str) -> None:
    return None


@pytest.mark.parametrize(("weights", "reward"), [(None, 3.0), ([0.5, 2.0], 3.0), ([0.0, 1.0], 1.0)])
def test_reward_is_weighted_sum_of_functions(weights: Any, reward: float):
    environment = WeightedRewards("graded", [length, is_right], weights)(extras={"reward_spec": {"ground_truth": "2"}})
    environment.init(PROMPT)
    output = environment.step("2!")
    assert not isinstance(output, dict) and output.done
    assert (output.reward, output.metadata) == (reward, {"length": 2.0, "is_right": 1.0})


def test_reward_without_number_names_its_function():
    with pytest.raises(
        EnvironmentFailure, match="the result of the reward function 'nothing' is NoneType None, not a single"
    ):
        WeightedRewards("graded", [length, nothing])().step("2!")  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("functions", "weights", "message"),
    [
        ([], None, "functions is empty"),
        ([length, is_right], [1.0], "must be one finite number for each of the 2 functions"),
        ([length], [float("nan")], "must be one finite number for each of the 1 functions"),
        ([length, length], None, "two functions have the name 'length'"),
        ([length, float], None, "must be an ordinary function"),
    ],
)
def test_unsuitable_rewards_are_rejected(functions: Any, weights: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        WeightedRewards("graded", functions, weights)


def test_rewards_may_be_registered_again(monkeypatch: pytest.MonkeyPatch):
    """A notebook's cell may run again with other functions."""
    monkeypatch.setattr(registry.environments, "loaded", dict(registry.environments.loaded))
    sk.register.rewards("graded", [length])
    sk.register.rewards("graded", [length, is_right], weights=[1.0, 0.5])
    environment = registry.make("graded", extras={"reward_spec": {"ground_truth": "2"}})
    assert environment.step("2!").reward == 2.5
    with pytest.raises(ConfigError, match="'gsm8k' is already registered"):
        sk.register.rewards("gsm8k", [length])
