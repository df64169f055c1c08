"""A little of `scripts/chaos`, which takes as long as one likes: random faults, after which everything holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.faults import FAULTS
from tests.chaos.runs import overrides_of, problems

FOR_S = 120.0
"""From here on nothing more is hit: the run under way is taken to its end."""


@pytest.mark.slow
def test_after_random_faults_a_run_goes_on_or_ends_as_it_should(tmp_path: Path, tiny_model_path: str):
    overrides = overrides_of("two_engines", problems(tmp_path), tiny_model_path)
    exact = [fault for fault in FAULTS if not fault.masks]  # every run is compared with the undisturbed one
    campaign = Campaign(tmp_path / "runs", overrides, exact, seed=18)
    campaign.go(FOR_S)
    assert campaign.struck
