"""The programs of examples/agents that do not know that they are trained, with a scripted model.

Needs uv and access to a package index (or uv's cache) for anthropic, langgraph, langchain-openai and openai-agents.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import OK, Trajectory
from tests.support.agents import agent_generator
from tests.support.interpreters import installed, needs_uv
from tests.support.sessions import END, call_text, sequences

EXAMPLES = Path(__file__).parents[3] / "examples" / "agents"
PACKAGES = ("anthropic==2.14.0", "langgraph==1.2.24", "langchain-openai==1.7.4", "openai-agents==0.24.0")
ROW = {"reward_spec": {"method": "rule", "ground_truth": "408"}}
PROMPT = Prompt("7", [{"role": "user", "content": "How many are 12 boxes of 34 pens?"}], "agent", ROW)
CALL = call_text("multiply", '{"a"  :12 ,"b":  34}')
ANSWER = "They are 12 times 34.\n#### 408"

pytestmark = [pytest.mark.on_demand, needs_uv]


@pytest.fixture(scope="module")
def python() -> Iterator[str]:
    with installed("agents", *PACKAGES) as folder:
        yield str(folder / "agents" / "bin" / "python")


def answer(prompt: str) -> str:
    """Call the tool, and answer when its result is there."""
    if "<tool_response>" not in prompt:
        return CALL
    assert "\nproduct: 408\n</tool_response>" in prompt
    return ANSWER


@pytest.mark.parametrize("program", ["anthropic", "anthropic_tool_runner", "langgraph", "openai_agents"])
def test_sampled_tokens_are_reused(program: str, python: str):
    settings: dict[str, Any] = {
        "command": [python, str(EXAMPLES / f"{program}_calculator.py"), "{model}", "{prompt}"],
        "env": {"OPENAI_AGENTS_DISABLE_TRACING": "1"},
        "reward": "gsm8k",
        "sandbox": {"kind": "none"},
        "timeout_s": 60.0,
    }

    async def run() -> Trajectory:
        async with agent_generator(settings, answer) as generator:
            return (await generator.rollout(PROMPT, 5)).trajectories[0]

    item = asyncio.run(run())
    assert item.status == OK, item.detail
    assert item.reward == 1.0
    assert item.session is not None
    statistics = item.session["statistics"]
    assert (statistics["calls"], statistics["branches"], statistics["retokenized_messages"]) == (2, 0, 0)
    ((_, texts),) = sequences(item)
    assert texts == [CALL + END, ANSWER + END]
