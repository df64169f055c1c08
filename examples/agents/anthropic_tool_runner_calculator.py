"""An agent whose loop is the tool runner of Anthropic's SDK.

ANTHROPIC_BASE_URL=... ANTHROPIC_API_KEY=... python anthropic_tool_runner_calculator.py MODEL "12 boxes of 34 pens?"
"""

import sys

from anthropic import Anthropic, beta_tool


@beta_tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return f"product: {a * b}"


if __name__ == "__main__":
    _, model, question = sys.argv
    messages = Anthropic().beta.messages
    runner = messages.tool_runner(
        model=model,
        max_tokens=256,
        messages=[{"role": "user", "content": question}],
        tools=[multiply],
        max_iterations=3,
    )
    print(*(block.text for block in runner.until_done().content if block.type == "text"))
