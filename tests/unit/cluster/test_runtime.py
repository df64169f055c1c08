"""A Ray of our own on a machine that is too busy for the 15 s that Ray gives itself."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import psutil
import pytest
import ray

from skyrl_train.cluster import runtime

SLOW = "The current node timed out during startup. This could happen because ..."


def starting(monkeypatch: pytest.MonkeyPatch, errors: list[Exception | None]) -> list[subprocess.Popen[bytes]]:
    """Replaces `ray.init` by one that starts a process and fails as told; returns what it has started."""
    started: list[subprocess.Popen[bytes]] = []

    def init(**_: Any) -> None:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        error = errors[len(started) - 1]
        if error is not None:
            raise error

    monkeypatch.setattr(ray, "init", init)
    return started


def test_a_start_that_was_too_slow_is_tried_again_without_what_it_left(monkeypatch: pytest.MonkeyPatch):
    started = starting(monkeypatch, [Exception(SLOW), Exception(SLOW), None])
    runtime._start_own({})
    assert [psutil.pid_exists(process.pid) for process in started] == [False, False, True]
    started[-1].kill()
    for process in started:
        process.wait(10)


def test_the_last_failure_is_raised(monkeypatch: pytest.MonkeyPatch):
    started = starting(monkeypatch, [Exception(f"{SLOW} {number}") for number in range(runtime.STARTS)])
    with pytest.raises(Exception, match=rf"timed out during startup.* {runtime.STARTS - 1}$"):
        runtime._start_own({})
    assert not any(psutil.pid_exists(process.pid) for process in started)
    for process in started:
        process.wait(10)


def test_another_failure_is_not_tried_again(monkeypatch: pytest.MonkeyPatch):
    started = starting(monkeypatch, [ValueError("no such address"), None])
    with pytest.raises(ValueError, match="no such address"):
        runtime._start_own({})
    (process,) = started
    process.wait(10)


def test_starts_take_turns():
    code = (
        "import sys\nfrom skyrl_train.cluster.runtime import _one_at_a_time\n"
        "with _one_at_a_time():\n    print('in', flush=True)\n"
    )
    with runtime._one_at_a_time():
        other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=8)
    assert other.communicate(timeout=300)[0] == "in\n"
