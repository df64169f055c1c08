"""The command that the README begins with, as it is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

SCRIPT = Path(__file__).parents[3] / "examples" / "quickstart" / "quickstart.py"
LAST_LINE = re.compile(r"quickstart: eval accuracy ([\d.]+) -> ([\d.]+) in (\d+) s, run at (.+)")


class Outcome(NamedTuple):
    before: float
    after: float
    seconds: int
    run: Path


def quickstart(folder: Path, seed: int, *overrides: str) -> Outcome:
    command = [sys.executable, str(SCRIPT), "--output", str(folder / "run"), "--seed", str(seed), *overrides]
    # The threads that a person's machine gives it, not the tests' single one.
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    found = LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert found, done.stdout[-500:]
    return Outcome(float(found[1]), float(found[2]), int(found[3]), Path(found[4]))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grpo_raises_accuracy_on_held_out_problems(tmp_path: Path, seed: int):
    outcome = quickstart(tmp_path, seed)
    assert outcome.before <= 0.55
    assert outcome.after >= 0.80
    assert outcome.after - outcome.before >= 0.3
    assert outcome.seconds <= 420
    assert (outcome.run / "reward.png").stat().st_size > 1000


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_without_a_learning_rate_nothing_is_learnt(tmp_path: Path):
    outcome = quickstart(tmp_path, 0, "trainer.policy.optimizer_config.lr=0", "trainer.max_steps=6")
    assert abs(outcome.after - outcome.before) <= 0.05


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_adapters_alone_raise_it_as_well(tmp_path: Path):
    adapters = [f"trainer.policy.model.lora.{key}" for key in ("rank=32", "alpha=64")]
    outcome = quickstart(tmp_path, 0, *adapters, "trainer.policy.optimizer_config.lr=1e-3")
    assert outcome.before <= 0.55
    assert outcome.after >= 0.80
