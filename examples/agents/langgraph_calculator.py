"""An agent of LangGraph, as its documentation writes one.

OPENAI_BASE_URL=... OPENAI_API_KEY=... python langgraph_calculator.py MODEL "How many are 12 boxes of 34 pens?"
"""

import sys

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent


def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return f"product: {a * b}"


if __name__ == "__main__":
    _, model, question = sys.argv
    agent = create_react_agent(ChatOpenAI(model=model), [multiply])
    state = agent.invoke({"messages": [("user", question)]}, {"recursion_limit": 7})
    print(state["messages"][-1].content)
