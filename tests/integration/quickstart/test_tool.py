"""The example in which a model learns to use a tool, as its page says to run it."""

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


@pytest.mark.slow
@pytest.mark.timeout(960)
def test_a_model_learns_to_call_python_and_to_read_its_answer_off(tmp_path: Path):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")
    command = [sys.executable, str(SCRIPT), "--output", str(tmp_path / "run")]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert found, done.stdout[-500:]
    before, after = float(found[1]), float(found[2])
    assert after - before >= 0.3
    steps = [line for line in read_jsonl(Path(found[3]) / "grpo" / "metrics.jsonl") if "environment/tool_calls" in line]
    calls = [float(line["environment/tool_calls"]) for line in steps]
    assert calls[-1] > calls[0]
    assert calls[-1] > 0.5
