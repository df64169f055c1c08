"""The environment `openenv` with the server of OpenEnv 0.4, compared with OpenEnv's own client.

Needs uv and access to a package index (or uv's cache) for openenv.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.base import StepOutput
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.errors import EnvironmentFailure
from tests.support.interpreters import installed, needs_uv

SERVER = """
import socket, sys
import uvicorn
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

class Guess(Action):
    message: str

class Hint(Observation):
    text: str

class Guesses(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self.number, self.count = 0, 0

    def reset(self, seed=None, episode_id=None, **options):
        self.number, self.count = seed, 0
        return Hint(text="Guess a number.")

    def step(self, action, **options):
        self.count += 1
        right = int(action.message) == self.number
        text = "Right." if right else "Too low." if int(action.message) < self.number else "Too high."
        return Hint(text=text, done=right, reward=right if right else None, metadata={"guesses": self.count})

    @property
    def state(self):
        return State(step_count=self.count)

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
config = uvicorn.Config(
    create_app(Guesses, Guess, Hint, max_concurrent_envs=2),
    log_level="warning", ws_ping_interval=float(sys.argv[1]), ws_ping_timeout=float(sys.argv[1]),
)
uvicorn.Server(config).run(sockets=[listener])
"""
CLIENT = """
import json, sys
from openenv.core.generic_client import GenericEnvClient
with GenericEnvClient(base_url=sys.argv[1]).sync() as client:
    results = [client.reset(seed=7), *(client.step({"message": text}) for text in sys.argv[2:])]
print(json.dumps([[result.observation["text"], result.reward, result.done] for result in results]))
"""
TEXTS = ["9", "3", "7"]
PING_S = 1.0

pytestmark = [pytest.mark.on_demand, needs_uv]


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    with installed("openenv", "openenv==0.4.1") as folder:
        yield folder / "openenv" / "bin" / "python"


@pytest.fixture(scope="module")
def port(python: Path) -> Iterator[str]:
    """Port of a server with two environments, which pings every second and ends sessions that do not respond."""
    command: list[str | Path] = [python, "-c", SERVER, str(PING_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = process.stdout.readline().strip()
            wait_for(port)
            yield port
        finally:
            process.terminate()


def play(port: str, texts: list[str], *, episodes: int = 1, pause_s: float = 0.0) -> list[Any]:
    """Return the opening message of the last episode, and then what its steps return or the kind of a failure."""
    config = {"base_url": f"ws://127.0.0.1:{port}/ws", "observation_key": "text"}

    async def main() -> list[Any]:
        outputs: list[Any] = []
        async with WorkerPool({"openenv": config}, 3, 60.0) as pool:
            try:
                for uid in range(episodes):
                    episode = await pool.start("openenv", Prompt(str(uid), [], "openenv", {"reset": {"seed": 7}}))
                outputs.append(episode.messages[-1]["content"])
                for text in texts:
                    await asyncio.sleep(pause_s)
                    outputs.append(await episode.step(text))
            except EnvironmentFailure as failure:
                outputs.append(f"{failure.kind}: {failure.detail}")
        return outputs

    return asyncio.run(asyncio.wait_for(main(), 120))


def wait_for(port: str) -> None:
    deadline = time.monotonic() + 60
    while str(play(port, [])[0]).startswith("server: ClientConnect"):
        assert time.monotonic() < deadline
        time.sleep(0.5)


def test_episode_equals_that_of_openenv_client(python: Path, port: str):
    opening, *steps = play(port, TEXTS)
    command: list[str | Path] = [python, "-c", CLIENT, f"http://127.0.0.1:{port}", *TEXTS]
    (first, *expected) = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    assert [opening, None, False] == first
    assert all(isinstance(step, StepOutput) for step in steps)
    assert [[step.reward, step.done] for step in steps] == [[reward or 0.0, done] for _, reward, done in expected]
    assert [step.observations[0]["content"] for step in steps[:-1]] == [text for text, _, _ in expected[:-1]]
    assert [step.metadata["guesses"] for step in steps] == [1, 2, 3]


def test_session_survives_a_long_turn(port: str):
    opening, *steps = play(port, ["9", "7"], pause_s=4 * PING_S)
    assert opening == "Guess a number."
    assert [getattr(step, "reward", step) for step in steps] == [0.0, 1.0]


def test_episode_beyond_the_capacity_fails(port: str):
    (failure,) = play(port, TEXTS, episodes=3)
    assert "CAPACITY_REACHED" in failure


def test_invalid_action_is_the_servers_error(port: str):
    assert "EXECUTION_ERROR" in play(port, ["many"])[-1]
