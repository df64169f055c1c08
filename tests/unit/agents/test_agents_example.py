"""The agent of examples/agents holds its conversation with a scripted model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.data.messages import Prompt
from tests.support.agents import agent_generator
from tests.support.async_tests import async_test
from tests.support.sessions import call_text, sequences

REPOSITORY = Path(__file__).parents[3]
PROMPT = Prompt(
    "0",
    [{"role": "user", "content": "There are 12 boxes with 34 pens each. How many pens are there?"}],
    "agent",
    {"reward_spec": {"method": "rule", "ground_truth": "408"}},
)


def calls_the_tool(prompt: str) -> str:
    return "#### 408" if "408" in prompt else call_text("multiply", '{"a" :12, "b":34}')


def makes_a_mistake(prompt: str) -> str:
    return "#### 408" if "error: KeyError" in prompt else call_text("multiply", '{"a": 12}')


@pytest.mark.parametrize(
    ("answers", "reward", "calls"),
    [
        (calls_the_tool, 1.0, 2),
        (makes_a_mistake, 1.0, 2),
        (lambda prompt: "#### 400", 0.0, 1),
        (lambda prompt: call_text("multiply", '{"a": 12, "b": 34}'), 0.0, 3),
    ],
    ids=["tool", "mistake", "guess", "endless"],
)
@async_test
async def test_example_agent_is_rewarded_for_right_answers(answers: Callable[[str], str], reward: float, calls: int):
    async with agent_generator({"run": "examples.agents.calculator:run"}, texts=answers) as generator:
        group = await generator.rollout(PROMPT, 0)
    (item,) = group.trajectories
    assert (item.reward, item.detail, len(item.turns)) == (reward, "", calls)
    assert len(sequences(item)) == 1
    assert item.session is not None
    assert item.session["statistics"]["retokenized_messages"] == 0
