"""Run `scripts/chaos` for two minutes: all invariants must hold after random faults."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import ENVIRONMENT_CODE, FAULTS, MISBEHAVIOR_FILE
from tests.chaos.runs import make_overrides, write_data
from tests.support.doc_pages import REPOSITORY, Command, find_commands

from .conftest import Run

TOTAL_S, MIN_FAULTS_S = 120.0, 20.0
"""Seconds for the whole test, and the minimum number of seconds with faults on a slow machine."""
LAST_RUN_FACTOR = 3
"""Duration of the last run relative to the undisturbed one, which starts neither a process nor Ray."""


@pytest.mark.on_demand
@pytest.mark.slow
def test_run_survives_random_faults(run: Run, plugins: Path, tmp_path: Path, tiny_model_path: str):
    (plugins / "chaos_plugin.py").write_text(ENVIRONMENT_CODE)
    overrides = make_overrides("two_engines", write_data(tmp_path), tiny_model_path)
    exact = [fault for fault in FAULTS if not fault.masks_episodes]  # every run is compared with the undisturbed one
    campaign = Campaign(tmp_path / "runs", overrides, exact, seed=18)
    start_s = time.monotonic()
    run("main_base", *overrides(campaign.undisturbed), SKYRL_CHAOS=str(campaign.undisturbed / MISBEHAVIOR_FILE))
    took_s = time.monotonic() - start_s
    campaign.run(max(MIN_FAULTS_S, TOTAL_S - took_s - LAST_RUN_FACTOR * took_s))
    assert campaign.strikes


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("command", find_commands("scripts/chaos "), ids=str)
def test_documented_chaos_commands_work(command: Command):
    """Run the script's program until the first fault has struck."""
    words = [sys.executable, "-m", "tests.chaos", *command.words[1:], "--faults", "1"]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "\n1 faults: " in done.stdout
    if "--seed" in command.words:
        assert "seed 7, runs of two_ranks" in done.stdout
