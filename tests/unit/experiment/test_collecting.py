from __future__ import annotations

import gc
from contextlib import suppress

from skyrl_train.experiment.driver import THRESHOLDS, collecting_seldom


def test_the_collector_is_as_it_was_after_a_run_that_failed():
    before = gc.get_threshold(), gc.get_freeze_count()
    with suppress(RuntimeError), collecting_seldom():
        assert gc.get_threshold() == THRESHOLDS and gc.isenabled() and gc.get_freeze_count() > before[1]
        raise RuntimeError
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
