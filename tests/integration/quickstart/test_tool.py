"""The example in which a model learns to use a tool works with the command on its page."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.report.jsonl import read_jsonl

SCRIPT = Path(__file__).parents[3] / "examples" / "quickstart" / "tool.py"
LAST_LINE = re.compile(r"tool: eval accuracy ([\d.]+) -> ([\d.]+), run at (.+)")


def accuracies(folder: Path, *arguments: str) -> tuple[float, float, list[float]]:
    """Return accuracies on held-out problems before and after, and tool calls per sample for every step."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed; scripts/sandbox_tools installs it")
    command = [sys.executable, str(SCRIPT), "--output", str(folder / "run"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert found, done.stdout[-500:]
    steps = [line for line in read_jsonl(Path(found[3]) / "grpo" / "metrics.jsonl") if "environment/tool_calls" in line]
    return float(found[1]), float(found[2]), [float(line["environment/tool_calls"]) for line in steps]


@pytest.mark.on_demand
@pytest.mark.slow
def test_script_runs_to_last_line(tmp_path: Path):
    """The run is too short to improve."""
    shorter = ["--warm-up-steps", "10", "trainer.max_steps=2", "trainer.eval_interval=2"]
    _, _, calls = accuracies(tmp_path, *shorter)
    assert len(calls) == 2


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(960)
def test_model_learns_to_call_python(tmp_path: Path):
    """The run has half of the steps and starts from a weaker model, so it does not reach the same accuracy."""
    shorter = ["--warm-up-steps", "150", "trainer.max_steps=12", "trainer.eval_interval=12"]
    before, after, calls = accuracies(tmp_path, *shorter)
    assert after - before >= 0.3
    assert sum(calls[-3:]) > 1.1 * sum(calls[:3])


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(960)
def test_it_ends_up_calling_it_almost_always(tmp_path: Path):
    before, after, calls = accuracies(tmp_path)
    assert after - before >= 0.3
    assert calls[-1] > max(calls[0], 0.5)
