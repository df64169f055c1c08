from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.environments.function_env import RewardFunction
from skyrl_train.errors import ConfigError

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
