"""An agent that calls Anthropic's API in a loop, until the model uses no more tools.

ANTHROPIC_BASE_URL=... ANTHROPIC_API_KEY=... python anthropic_calculator.py MODEL "How many are 12 boxes of 34 pens?"
"""

import sys
from typing import Any

from anthropic import Anthropic

MULTIPLY: Any = {
    "name": "multiply",
    "description": "Multiply two integers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
}


if __name__ == "__main__":
    model, question = sys.argv[1:]
    client = Anthropic()
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(3):
        answer: Any = client.messages.create(model=model, max_tokens=256, messages=messages, tools=[MULTIPLY])
        calls = [block for block in answer.content if block.type == "tool_use"]
        if not calls:
            break
        products = [(call.id, f"product: {call.input['a'] * call.input['b']}") for call in calls]
        results = [{"type": "tool_result", "tool_use_id": id, "content": product} for id, product in products]
        messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": results}]
    print(*(block.text for block in answer.content if block.type == "text"))
