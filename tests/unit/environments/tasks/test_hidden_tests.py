"""The grader of examples/mini_swe_agent/mini_swe_dataset.py's rows for the environment `agent`."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from examples.mini_swe_agent.mini_swe_dataset import agent_row
from examples.mini_swe_agent.tasks import TASKS
from skyrl_train.environments.tasks.agent import AgentEnv

TASK = next(task for task in TASKS if task.name == "matrix")


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ({}, "0"),
        ({TASK.module: TASK.fixed}, "1"),
        ({TASK.module: TASK.fixed, TASK.test_file: "broken ("}, "1"),
        ({TASK.test_file: "raise SystemExit(0)"}, "0"),
        ({TASK.module: f"{TASK.fixed}print('OK')\n"}, "0"),
        ({TASK.module: TASK.fixed, "json.py": "broken (", "subprocess.py": "broken ("}, "1"),
    ],
    ids=["untouched", "fixed", "fixed, tests broken", "tests spoiled", "prints more", "shadows modules"],
)
def test_reward_is_that_of_the_hidden_tests(written: dict[str, str], reward: str, tmp_path: Path):
    files = AgentEnv.parse_row(agent_row(TASK))
    for name, text in {**files["files"], **written, **files["grader_files"]}.items():
        (tmp_path / name).write_text(text)
    command = ["python3", "-I", "hidden_tests.py"]
    output = subprocess.check_output(command, cwd=tmp_path, text=True, stderr=subprocess.STDOUT)
    assert output.strip() == reward
    assert not (tmp_path / "hidden_tests.json").exists()
