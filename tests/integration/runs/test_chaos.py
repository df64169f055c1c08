"""Two minutes of `scripts/chaos`, which takes as long as one likes: random faults, after which everything holds."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import ENVIRONMENT_CODE, FAULTS, MISCHIEF
from tests.chaos.runs import overrides_of, problems
from tests.support.doc_pages import REPOSITORY, Command, find_commands

from .conftest import Run

IN_ALL_S, LEAST_S = 120.0, 20.0
"""Of the undisturbed run, of hits, and of the run under way when they end; and of hits on a machine that is slow."""
END_TAKES = 3
"""Times as long as the undisturbed run, which needs neither a process nor a Ray of its own."""


@pytest.mark.on_demand
@pytest.mark.slow
def test_run_survives_random_faults(
    run: Run, plugins: Path, tmp_path: Path, tiny_model_path: str
):
    (plugins / "chaos_plugin.py").write_text(ENVIRONMENT_CODE)
    overrides = overrides_of("two_engines", problems(tmp_path), tiny_model_path)
    exact = [fault for fault in FAULTS if not fault.masks]  # every run is compared with the undisturbed one
    campaign = Campaign(tmp_path / "runs", overrides, exact, seed=18)
    begun = time.monotonic()
    run("main_base", *overrides(campaign.straight), SKYRL_CHAOS=str(campaign.straight / MISCHIEF))
    took_s = time.monotonic() - begun
    campaign.go(max(LEAST_S, IN_ALL_S - took_s - END_TAKES * took_s))
    assert campaign.struck


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("command", find_commands("scripts/chaos "), ids=str)
def test_documented_chaos_commands_work(command: Command):
    """What the script starts, until the first fault has struck."""
    words = [sys.executable, "-m", "tests.chaos", *command.words[1:], "--faults", "1"]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "\n1 faults: " in done.stdout
    if "--seed" in command.words:
        assert "seed 7, runs of two_ranks" in done.stdout
