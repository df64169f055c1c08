"""Tasks of verifiers 0.4 run as agents, through examples/verifiers/run_task.py, with a scripted model.

Needs uv on PATH and access to a package index (or uv's cache): for verifiers, and for the programs of its harnesses,
which are scripts with dependencies of their own.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import OK, Trajectory
from tests.support.agents import agent_generator
from tests.support.interpreters import UV, installed, needs_uv
from tests.support.sessions import END, call_text, sequences

PROGRAM = str(Path(__file__).parents[3] / "examples" / "verifiers" / "run_task.py")
TASKSET = """
import verifiers.v1 as vf

class SumData(vf.TaskData):
    answer: int

class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(str(self.data.answer) in (trace.assistant_messages[-1].content or ""))

class SumTaskset(vf.Taskset[SumTask]):
    def load(self):
        for a in range(4):
            yield SumTask(SumData(prompt=f"What is {a} + {a}?", answer=2 * a))

__all__ = ["SumTaskset"]
"""
CALL = call_text("bash", '{"command"  :"echo $((3+3))"}')

pytestmark = [pytest.mark.on_demand, needs_uv]


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with installed("verifiers", "verifiers==0.4.0") as folder:
        (folder / "sums.py").write_text(TASKSET)
        yield folder


@pytest.fixture
def python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the interpreter with verifiers, which finds the taskset."""
    assert UV is not None
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(UV).parent), os.environ["PATH"]]))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return str(folder / "verifiers" / "bin" / "python")


def read_rows(python: str, folder: Path) -> list[dict[str, Any]]:
    path = folder / "rows.jsonl"
    subprocess.run([python, PROGRAM, "rows", "sums", str(path)], check=True)
    return [json.loads(line) for line in path.read_text().splitlines()]


def run_task(python: str, row: dict[str, Any], harness: str, texts: Any) -> Trajectory:
    command = [python, PROGRAM, "run", "sums", "{row.index}", "--model", "{model}", "--harness", harness]
    settings = {"command": command, "sandbox": {"kind": "none"}, "timeout_s": 200.0}
    extras = {key: value for key, value in row.items() if key not in ("prompt", "env_class")}
    prompt = Prompt("7", row["prompt"], row["env_class"], extras)

    async def run() -> Trajectory:
        async with agent_generator(settings, texts, max_input_length=16_384) as generator:
            return (await generator.rollout(prompt, 5)).trajectories[0]

    return asyncio.run(run())


def statistics(item: Trajectory) -> tuple[int, ...]:
    assert item.session is not None
    return tuple(item.session["statistics"][name] for name in ("calls", "branches", "retokenized_messages"))


def test_rows_name_the_tasks(python: str, tmp_path: Path):
    rows = read_rows(python, tmp_path)
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    assert rows[3]["prompt"] == [{"role": "user", "content": "What is 3 + 3?"}]


@pytest.mark.parametrize(("text", "reward"), [("It is 6.", 1.0), ("It is 7.", 0.0)])
def test_taskset_rewards_the_answer(text: str, reward: float, python: str, tmp_path: Path):
    item = run_task(python, read_rows(python, tmp_path)[3], "null", [text])
    assert (item.status, item.reward) == (OK, reward), item.detail
    assert statistics(item) == (1, 0, 0)
    ((prompt, texts),) = sequences(item)
    assert "What is 3 + 3?" in prompt and texts == [text + END]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_harness_reuses_sampled_tokens(python: str, tmp_path: Path):
    item = run_task(python, read_rows(python, tmp_path)[3], "bash", [CALL, "It is 6."])
    assert (item.status, item.reward) == (OK, 1.0), item.detail
    assert statistics(item) == (2, 0, 0)
    ((_, texts),) = sequences(item)
    assert texts == [CALL + END, "It is 6." + END]
    (result,) = [message for message in item.messages if message["role"] == "tool"]
    assert "6" in str(result["content"])
