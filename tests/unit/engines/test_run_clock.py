from __future__ import annotations

import math
import time

import pytest

from skyrl_train.engines.lifecycle import RunClock


@pytest.mark.defect("long-answers-cut-for-having-waited")
def test_the_clock_of_a_request_starts_when_there_is_room_for_it():
    clock = RunClock(slots=2)
    clock.add([("a", 0.05), ("b", None), ("c", 0.05)])
    time.sleep(0.06)
    assert clock.late() == ["a"]
    assert 0.06 <= clock.remove("a") < 5
    assert clock.late() == []
    assert 0 < clock.next_deadline() - time.monotonic() <= 0.05
    time.sleep(0.06)
    assert clock.late() == ["c"]


def test_a_request_that_ends_while_it_waits_has_not_run():
    clock = RunClock(slots=1)
    clock.add([("a", 1.0), ("b", 1.0)])
    assert clock.remove("b") == 0.0
    clock.remove("a")
    assert clock.next_deadline() == math.inf
    assert clock.remove("unknown") == 0.0
