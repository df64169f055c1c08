from __future__ import annotations

import math
import time

import pytest

from skyrl_train.engines.lifecycle import RequestDeadlines


@pytest.mark.defect("queued-requests-time-out")
def test_deadline_starts_when_request_can_run():
    deadlines = RequestDeadlines(max_num_seqs=2)
    deadlines.add([("a", 0.05), ("b", None), ("c", 0.05)])
    time.sleep(0.06)
    assert deadlines.expired() == ["a"]
    assert 0.06 <= deadlines.remove("a") < 5
    assert deadlines.expired() == []
    assert 0 < deadlines.next_deadline() - time.monotonic() <= 0.05
    time.sleep(0.06)
    assert deadlines.expired() == ["c"]


def test_request_removed_while_waiting_has_zero_time():
    deadlines = RequestDeadlines(max_num_seqs=1)
    deadlines.add([("a", 1.0), ("b", 1.0)])
    assert deadlines.remove("b") == 0.0
    deadlines.remove("a")
    assert deadlines.next_deadline() == math.inf
    assert deadlines.remove("unknown") == 0.0
