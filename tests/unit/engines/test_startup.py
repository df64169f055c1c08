"""The phases of an engine's start add up to its time, and are spans of the trace."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

from skyrl_train import trace
from skyrl_train.engines.startup import StartupTimer, describe_startup
from skyrl_train.engines.transformers.engine import TransformersEngine


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trace, "_record", None)
    trace.start_buffering()
    yield
    trace.drain_spans()


@pytest.mark.usefixtures("traced")
def test_phases_are_spans_and_add_up():
    begin = time.time()
    timer = StartupTimer()
    with timer.phase("weights"):
        time.sleep(0.05)
    timer.record("KV cache", begin, begin + 0.01)
    phases = timer.finish()
    assert list(phases) == ["weights", "KV cache", "other"]
    assert phases["weights"] >= 0.05
    assert sum(phases.values()) <= time.time() - begin + 0.01
    spans = {span.name: span.end - span.begin for span in trace.drain_spans()}
    assert spans == pytest.approx({"weights": phases["weights"], "KV cache": 0.01}, abs=1e-3)


def test_parts_of_a_phase_are_not_counted_twice():
    timer = StartupTimer()
    timer.record("processes", 0.0, 10.0)
    timer.split("processes", {"weights": 4.0, "CUDA graphs": 5.0})
    assert timer.phases == {"processes": 1.0, "weights": 4.0, "CUDA graphs": 5.0}
    line = describe_startup(12.0, timer.phases)
    assert line == "ready after 12.0 s: process and imports 2.0, processes 1.0, weights 4.0, CUDA graphs 5.0"


def test_transformers_engine_reports_its_start(tiny_model_path: str):
    engine = TransformersEngine(tiny_model_path)
    assert re.fullmatch(
        r"ready after 9\.0 s: process and imports \d\.\d, weights \d\.\d, other \d\.\d",
        describe_startup(9.0, engine.startup_phases),
    )
