"""The command line of mini-swe-agent on the repositories of examples/mini_swe_agent, with a scripted model.

Needs uv and access to a package index (or uv's cache) for mini-swe-agent, git, and bubblewrap with /usr/bin/python3
(3.10 or newer), because the sandbox shows only /usr and the agent's virtual environment.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.mini_swe_agent.mini_swe_dataset import agent_row
from examples.mini_swe_agent.tasks import TASKS, Task
from skyrl_train.config.hydra import to_dict
from skyrl_train.config.prepare import prepare_config
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.data.trajectory import OK, Trajectory
from skyrl_train.engines.base import SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.base import StepOutput
from skyrl_train.rollouts.conversation import ConversationGenerator, RolloutSettings
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.agents import agent_generator
from tests.support.interpreters import installed, needs_uv
from tests.support.sessions import END, TOKENIZER, ScriptedModel, call_text, sequences

PRESETS = Path(__file__).parents[3] / "examples" / "mini_swe_agent"
GRADER = """
import json, subprocess
run = json.load(open(".config/mini-swe-agent/last_mini_run.traj.json"))["info"]
graded = subprocess.run(["python3", "-I", "hidden_tests.py"], capture_output=True, text=True)
patch = run["submission"].count("diff --git")
submitted = run["exit_status"] == "Submitted"
print(json.dumps({"reward": int(graded.stdout), "submitted": int(submitted), "patched_files": patch}))
"""
"""The preset's grader, with what the agent submitted as metrics."""
SAMPLING = SamplingParams(max_tokens=4096)
LIMITS: dict[str, Any] = {"max_input_length": 65_536, "rollout_s": 300.0, "seed": 3}

pytestmark = [
    pytest.mark.on_demand,
    needs_uv,
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap"),
]


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with installed("mini-swe-agent", "mini-swe-agent==2.4.6", python="/usr/bin/python3") as folder:
        yield folder


@pytest.fixture
def settings(home: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The section of the agent in the preset."""
    monkeypatch.setenv("HOME", str(home))
    arguments = ["--config-dir", str(PRESETS), "--config-name", "mini_swe_agent"]
    config = prepare_config([*arguments, "trainer.policy.model.path=model"], has_accelerator=True).config
    agent = to_dict(config.environment.skyrl_gym.agent)
    return {**agent, "grader": ["python3", "-I", "-c", GRADER], "max_concurrent_commands": 2}


def call(command: str) -> str:
    return f"I run a command.\n{call_text('bash', json.dumps({'command': command}))}"


def commands_of(task: Task, *, fixes: bool) -> list[str]:
    """Return what the model runs: it looks, writes the fix, or spoils the tests, and submits a patch."""
    git = "git -c user.name=agent -c user.email=agent@example.com"
    fix = f"cat > {task.module} <<'END_OF_FILE'\n{task.fixed}END_OF_FILE"
    return [
        f"{git} init -q && git add {task.module} {task.test_file} && {git} commit -qm start && cat {task.module}",
        fix if fixes else f"echo 'raise SystemExit(0)' > {task.test_file}",
        "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && git diff",
    ]


def scripted_model(*, fixes: bool) -> ScriptedModel:
    def answer(prompt: str) -> str:
        (task,) = (task for task in TASKS if task.problem in prompt)
        return call(commands_of(task, fixes=fixes)[prompt.count("<tool_response>")])

    return ScriptedModel(answer)


def prompt_of(task: Task) -> Prompt:
    row = agent_row(task)
    return Prompt(task.name, row.pop("prompt"), row.pop("env_class"), row)


def run_agents(settings: dict[str, Any], tasks: tuple[Task, ...], *, fixes: bool) -> list[Trajectory]:
    async def run() -> list[Trajectory]:
        engine = ScriptedEngine(scripted_model(fixes=fixes))
        async with agent_generator(settings, engine=engine, sampling_params=SAMPLING, **LIMITS) as generator:
            groups = await asyncio.gather(*(generator.rollout(prompt_of(task), 5) for task in tasks))
        return [group.trajectories[0] for group in groups]

    return asyncio.run(run())


def statistics(item: Trajectory) -> tuple[int, ...]:
    assert item.session is not None
    return tuple(item.session["statistics"][name] for name in ("calls", "branches", "retokenized_messages"))


class _Replay:
    """An episode whose user and tools say what they said in a recorded conversation."""

    def __init__(self, messages: list[Message]):
        self.messages = messages[:2]
        self._rest = iter([message for message in messages[2:] if message["role"] != "assistant"])

    async def step(self, text: str) -> StepOutput:
        message = next(self._rest, None)
        return StepOutput([message] if message else [], 0.0, message is None)

    async def close(self) -> None:
        pass


class _ReplayEnvironments:
    def __init__(self, messages: list[Message]):
        self._messages = messages

    async def start(self, env_class: str, prompt: Prompt) -> _Replay:
        return _Replay(self._messages)


def converse_directly(item: Trajectory, tool: dict[str, Any]) -> Trajectory:
    """Return the trajectory of the same conversation with an environment, without a server and an agent."""
    settings = RolloutSettings(
        sampling_params=SAMPLING, n_samples_per_prompt=1, max_turns=9, chat_template_kwargs={"tools": [tool]}, **LIMITS
    )
    client = EngineClient([ScriptedEngine(scripted_model(fixes=True))], deadline_s=60.0)
    environments: Any = _ReplayEnvironments(item.messages)
    generator = ConversationGenerator(client, environments, TOKENIZER, settings)
    return asyncio.run(generator.rollout(item.prompt, 5)).trajectories[0]


def test_fixed_repositories_have_reward_one(settings: dict[str, Any]):
    items = run_agents(settings, TASKS, fixes=True)
    assert [item.detail for item in items if item.status != OK] == []
    assert [item.reward for item in items] == [1.0] * len(TASKS)
    for item in items:
        assert item.env_metrics["submitted"] == item.env_metrics["patched_files"] == 1
        assert statistics(item) == (3, 0, 0)


def test_tokens_equal_a_direct_conversation(settings: dict[str, Any], home: Path):
    (item,) = run_agents(settings, TASKS[:1], fixes=True)
    program = (
        "import json; from minisweagent.models.utils.actions_toolcall import BASH_TOOL; print(json.dumps(BASH_TOOL))"
    )
    answer = subprocess.check_output([home / "mini-swe-agent/bin/python", "-c", program], text=True)
    direct = converse_directly(item, json.loads(answer.splitlines()[-1]))
    assert len(item.turns) == 3
    for name in ("prompt_ids", "response_ids", "logprobs"):
        np.testing.assert_array_equal(getattr(item, name), getattr(direct, name))
    assert item.loss_spans == direct.loss_spans
    assert not item.restarts
    ((_, texts),) = sequences(item)
    assert texts == [call(command) + END for command in commands_of(TASKS[0], fixes=True)]


def test_spoiled_tests_have_reward_zero(settings: dict[str, Any]):
    for item in run_agents(settings, TASKS[:2], fixes=False):
        assert item.status == OK, item.detail
        assert (item.reward, item.env_metrics["submitted"], item.env_metrics["patched_files"]) == (0.0, 1, 1)


def test_step_limit_ends_the_agent_without_a_failure(settings: dict[str, Any]):
    command = [word.replace("step_limit=20", "step_limit=2") for word in settings["command"]]
    (item,) = run_agents({**settings, "command": command}, TASKS[:1], fixes=True)
    assert (item.status, item.reward, item.env_metrics["submitted"]) == (OK, 1.0, 0), item.detail
    assert statistics(item) == (2, 0, 0)


def test_refused_call_ends_the_agent_at_once(settings: dict[str, Any]):
    (item,) = run_agents({**settings, "max_calls": 1}, TASKS[:1], fixes=True)
    assert item.error == "agent_too_many_tokens"
    assert "exit code 1" in item.detail
