"""Two minutes of `scripts/chaos`, which takes as long as one likes: random faults, after which everything holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import ENVIRONMENT_CODE, FAULTS, MISCHIEF
from tests.chaos.runs import overrides_of, problems

from .conftest import Run

FOR_S = 60.0
"""How long runs are hit; the undisturbed one, and the one that is then taken to its end, make two minutes of it."""


@pytest.mark.slow
def test_after_random_faults_a_run_goes_on_or_ends_as_it_should(
    run: Run, plugins: Path, tmp_path: Path, tiny_model_path: str
):
    (plugins / "chaos_plugin.py").write_text(ENVIRONMENT_CODE)
    overrides = overrides_of("two_engines", problems(tmp_path), tiny_model_path)
    exact = [fault for fault in FAULTS if not fault.masks]  # every run is compared with the undisturbed one
    campaign = Campaign(tmp_path / "runs", overrides, exact, seed=18)
    run("main_base", *overrides(campaign.straight), SKYRL_CHAOS=str(campaign.straight / MISCHIEF))
    campaign.go(FOR_S)
    assert campaign.struck
