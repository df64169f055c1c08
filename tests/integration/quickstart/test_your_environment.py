"""The steps of docs/guides/your_environment.md work. The model is tiny; the quickstart has its own test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import REPOSITORY, fenced_blocks, snippets

PAGE = "docs/guides/your_environment.md"
ENVIRONMENT, ROWS = snippets(PAGE)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Return the folder of the task after its third step."""
    (tmp_path / "my_envs.py").write_text(ENVIRONMENT)
    (tmp_path / "make_rows.py").write_text(ROWS)
    output_of("python make_rows.py", tmp_path)
    return tmp_path


def output_of(command: str, folder: Path) -> str:
    """Return the output of a command of the page, run in the task's folder and the environment of the tests."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"PATH": programs, "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])}
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return done.stdout


def test_its_environment_is_tried_on_its_rows(task: Path):
    (tried,) = (text for page, text in fenced_blocks("bash") if page == PAGE and "env try" in text)
    assert re.findall(r"turn 1: reward ([\d.]+), done", output_of(tried, task)) == ["0", "1"]


@pytest.mark.on_demand
@pytest.mark.slow
def test_it_trains(task: Path):
    save_tiny_model(task / "model")
    (train,) = (text.rstrip() for page, text in fenced_blocks("bash") if page == PAGE and "skyrl-train train" in text)
    small = ["trainer.max_steps=2", "trainer.eval_interval=2", "trainer.train_batch_size=4"]
    output_of(" ".join([train, *small, "trainer.policy_mini_batch_size=4"]), task)
    rows = read_jsonl(task / "run" / METRICS_FILE)
    assert rows[-1]["step"] == 2 and rows[-1]["rollouts/failed"] == 0 and "environment/shown" in rows[-1]
