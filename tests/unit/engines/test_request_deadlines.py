from __future__ import annotations

import math
import time

import pytest

from skyrl_train.engines.lifecycle import RequestDeadlines


@pytest.mark.defect("long-answers-cut-for-having-waited")
def test_deadline_starts_when_request_can_run():
    clock = RequestDeadlines(max_num_seqs=2)
    clock.add([("a", 0.05), ("b", None), ("c", 0.05)])
    time.sleep(0.06)
    assert clock.expired() == ["a"]
    assert 0.06 <= clock.remove("a") < 5
    assert clock.expired() == []
    assert 0 < clock.next_deadline() - time.monotonic() <= 0.05
    time.sleep(0.06)
    assert clock.expired() == ["c"]


def test_request_removed_while_waiting_has_zero_time():
    clock = RequestDeadlines(max_num_seqs=1)
    clock.add([("a", 1.0), ("b", 1.0)])
    assert clock.remove("b") == 0.0
    clock.remove("a")
    assert clock.next_deadline() == math.inf
    assert clock.remove("unknown") == 0.0
