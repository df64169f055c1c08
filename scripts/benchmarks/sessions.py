"""CPU time of the session server per call, against the same turn of a conversation with an environment.

The server and a scripted engine run in this process, and the clients in another one. The messages are those of a
program without tools: a prompt of 2,000 characters, answers of 200 and replies of 800.

    python scripts/benchmarks/sessions.py
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

from skyrl_train.agents.server import SessionServer
from skyrl_train.agents.session import SessionSettings
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.base import StepOutput
from skyrl_train.rollouts.conversation import ConversationGenerator, RolloutSettings
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

TURNS = 8
PROMPT: list[Message] = [{"role": "user", "content": "Fix the function in this file. " * 65}]
REPLY: Message = {"role": "user", "content": "The test failed at line 12. " * 29}
ANSWER = "Change the loop so that it ends. " * 6


class Environment:
    """Replies to each answer with the same message."""

    def __init__(self) -> None:
        self.messages = PROMPT
        self.turns = 0

    async def step(self, text: str) -> StepOutput:
        """Return the reply."""
        self.turns += 1
        return StepOutput([REPLY], 0.0, self.turns == TURNS)

    async def close(self) -> None:
        """Do nothing."""


class Environments:
    """Starts environments in this process."""

    async def start(self, env_class: str, prompt: Prompt) -> Environment:
        """Return an environment."""
        return Environment()


def scripted_client(tokenizer: Any) -> EngineClient:
    """Return a client of an engine that always samples the same answer, in 10 ms."""
    ids = [*tokenizer(ANSWER, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]

    def answer(request: SampleRequest) -> list[int]:
        return ids

    return EngineClient([ScriptedEngine(answer, delay_s=0.01)], deadline_s=600.0)


async def measure_conversations(episodes: int) -> float:
    """Return the CPU seconds of a turn of ConversationGenerator, with this many concurrent episodes."""
    tokenizer = byte_tokenizer()
    settings = RolloutSettings(
        sampling_params=SamplingParams(max_tokens=512),
        n_samples_per_prompt=1,
        seed=0,
        max_input_length=1 << 16,
        rollout_s=600.0,
        max_turns=TURNS,
    )
    environments: Any = Environments()
    generator = ConversationGenerator(scripted_client(tokenizer), environments, tokenizer, settings)
    prompts = [Prompt(str(number), PROMPT, "toy") for number in range(episodes)]
    start = time.process_time()
    groups = await asyncio.gather(*(generator.rollout(prompt, 0) for prompt in prompts))
    seconds = time.process_time() - start
    assert all(len(group.trajectories[0].turns) == TURNS for group in groups)
    return seconds / (episodes * TURNS)


async def measure_sessions(sessions: int) -> float:
    """Return the CPU seconds of the server for a call, with this many concurrent sessions."""
    tokenizer = byte_tokenizer()
    settings = SessionSettings(
        sampling_params=SamplingParams(max_tokens=512), seed=0, max_input_length=1 << 16, rollout_s=600.0
    )
    async with SessionServer(scripted_client(tokenizer), tokenizer, model_name="m") as server:
        opened = [
            server.open(Prompt(str(number), PROMPT, "agent"), sample=0, position=0, settings=settings)
            for number in range(sessions)
        ]
        start = time.process_time()
        urls = json.dumps([session.base_url for session in opened]).encode()
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--client", stdin=asyncio.subprocess.PIPE
        )
        await process.communicate(urls)
        assert process.returncode == 0
        trajectories = [session.trajectory(Prompt("", PROMPT, "agent"), 0, 1.0) for session in opened]
        seconds = time.process_time() - start
        assert all(len(item.turns) == TURNS and not item.restarts for item in trajectories)
    return seconds / (sessions * TURNS)


async def run_client(urls: list[str]) -> None:
    """Play one conversation at each URL."""

    async def play(session: aiohttp.ClientSession, url: str) -> None:
        messages = list(PROMPT)
        for _ in range(TURNS):
            body = {"model": "m", "messages": messages, "max_tokens": 512}
            async with session.post(f"{url}/chat/completions", json=body) as response:
                answer = (await response.json())["choices"][0]["message"]
            messages += [{"role": "assistant", "content": answer["content"]}, REPLY]

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(play(session, url) for url in urls))


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--client", action="store_true", help="play the conversations at the URLs of stdin")
    parser.add_argument("--sizes", type=int, nargs="*", default=[16, 64, 256], help="numbers of sessions")
    args = parser.parse_args()
    if args.client:
        asyncio.run(run_client(json.load(sys.stdin)))
        return
    asyncio.run(measure_conversations(4))  # warms up caches
    asyncio.run(measure_sessions(4))
    for size in args.sizes:
        conversation, session = asyncio.run(measure_conversations(size)), asyncio.run(measure_sessions(size))
        print(
            f"{size} sessions: {1000 * session:.2f} ms per call, {1000 * conversation:.2f} ms per turn of a "
            f"conversation: {session / conversation:.2f} times"
        )


if __name__ == "__main__":
    main()
