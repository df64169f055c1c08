"""The example examples/agents trains with a coroutine, and with an unmodified agent of openai-agents."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.report.jsonl import read_jsonl

REPOSITORY = Path(__file__).parents[3]
LAST_LINE = re.compile(r"agent: eval accuracy ([\d.]+) -> ([\d.]+), run at (.+)")


def train(output: Path, *arguments: str) -> tuple[float, float, list[dict[str, float]]]:
    """Return the accuracies on held-out questions before and after, and the metrics of all steps."""
    command = [sys.executable, "-m", "examples.agents.train", "--output", str(output), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert found, done.stdout[-500:]
    steps = [line for line in read_jsonl(Path(found[3]) / "grpo" / "metrics.jsonl") if "agent/calls" in line]
    return float(found[1]), float(found[2]), steps


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(1900)
@pytest.mark.parametrize(
    "overrides",
    [[], ["trainer.fully_async.enabled=true", "trainer.placement.colocate_all=false"]],
    ids=["synchronous", "asynchronous"],
)
def test_coroutine_raises_the_reward(overrides: list[str], tmp_path: Path):
    before, after, steps = train(tmp_path / "run", *overrides)
    assert before <= 0.3
    assert after >= 0.8
    assert sum(line["agent/retokenized_messages"] for line in steps) == 0
    assert steps[-1]["agent/calls"] > steps[0]["agent/calls"]


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_unmodified_openai_agents_raise_the_reward(tmp_path: Path):
    """The agent runs in an interpreter of its own, which needs the package index."""
    venv = tmp_path / "venv"
    subprocess.run(["uv", "venv", str(venv)], check=True, capture_output=True)
    python = venv / "bin" / "python"
    subprocess.run(["uv", "pip", "install", "--python", str(python), "openai-agents"], check=True, capture_output=True)
    before, after, steps = train(tmp_path / "run", "--python", str(python))
    assert before <= 0.3
    assert after >= 0.8
    assert sum(line["agent/retokenized_messages"] for line in steps) == 0
    # an agent that has used up its turns raises, so its episode is masked
    assert sum(line.get("rollouts/failed", 0) for line in steps) <= 0.05 * 128 * len(steps)


@pytest.mark.on_demand
@pytest.mark.slow
def test_example_runs_to_its_last_line(tmp_path: Path):
    """The run is too short to improve."""
    shorter = ["--warm-up-steps", "10", "trainer.max_steps=2", "trainer.eval_interval=2"]
    _, _, steps = train(tmp_path / "run", *shorter)
    assert len(steps) == 2
    rows = [json.loads(line) for line in (tmp_path / "run" / "data" / "validation.jsonl").read_text().splitlines()]
    assert len(rows) == 128
