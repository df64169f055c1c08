"""An agent that is a coroutine: a loop over the official OpenAI client, with one function tool.

environment.skyrl_gym.agent.run=examples.agents.calculator:run
"""

from __future__ import annotations

import json
from typing import Any

from openai import AsyncOpenAI

from skyrl_train import AgentSession

MULTIPLY: Any = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiply two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
MAX_TURNS = 3


async def run(session: AgentSession, row: dict[str, Any]) -> float:
    """Let the model answer the row's question with the tool, and return 1.0 if its last line has the right number."""
    messages = list(row["prompt"])
    async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
        for _ in range(MAX_TURNS):
            answer = await client.chat.completions.create(model=session.model, messages=messages, tools=[MULTIPLY])
            message = answer.choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                truth = row["reward_spec"]["ground_truth"]
                return float((message.content or "").rpartition("####")[2].strip() == truth)
            calls: list[Any] = message.tool_calls
            for call in calls:
                result = multiply(call.function.arguments)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0


def multiply(arguments: str) -> str:
    """Run the tool with the arguments that the model wrote. Mistakes are texts for the model."""
    try:
        values = json.loads(arguments)
        return f"product: {int(values['a']) * int(values['b'])}"
    except (ValueError, KeyError, TypeError) as error:
        return f"error: {type(error).__name__}: {error}"
