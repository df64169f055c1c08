"""Two minutes of `scripts/chaos`, which takes as long as one likes: random faults, after which everything holds."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import ENVIRONMENT_CODE, FAULTS, MISCHIEF
from tests.chaos.runs import overrides_of, problems

from .conftest import Run

IN_ALL_S, LEAST_S = 120.0, 20.0
"""Of the undisturbed run, of hits, and of the run under way when they end; and of hits on a machine that is slow."""
END_TAKES = 3
"""Times as long as the undisturbed run, which needs neither a process nor a Ray of its own."""


@pytest.mark.slow
def test_after_random_faults_a_run_goes_on_or_ends_as_it_should(
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
