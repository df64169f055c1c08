"""An agent of the openai-agents package, as its documentation writes one. It does not know that it is trained.

As a coroutine, it is imported once and runs many times in a process:

    environment.skyrl_gym.agent.run=examples.agents.openai_agents_calculator:run

As a command, each run is a process, which takes 1.4 s of processor time to import the package:

    OPENAI_BASE_URL=... OPENAI_API_KEY=... python openai_agents_calculator.py MODEL "How many are 12 boxes of 34 pens?"
"""

import sys

from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool


@function_tool
def multiply(a: int, b: int) -> str:
    """Multiply two integers."""
    return f"product: {a * b}"


AGENT = Agent(name="Calculator", tools=[multiply])


async def run(session, row):
    """Run the agent on the row's question. `environment.skyrl_gym.agent.reward` scores its final message."""
    provider = OpenAIProvider(base_url=session.base_url, api_key=session.api_key)
    config = RunConfig(model=session.model, model_provider=provider, tracing_disabled=True)
    await Runner.run(AGENT, row["prompt"][-1]["content"], run_config=config, max_turns=3)


if __name__ == "__main__":
    _, model, question = sys.argv
    print(Runner.run_sync(AGENT, question, run_config=RunConfig(model=model), max_turns=3).final_output)
