"""A run's trace file: its format, also after a kill, and its absence if nobody asks for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train import trace
from skyrl_train.engines.lifecycle import RequestDeadlines
from skyrl_train.metrics import Metrics
from skyrl_train.report.logs import run_logs

KILLED = """
import os, signal, sys
from pathlib import Path
from skyrl_train import trace

with trace.write_trace(Path(sys.argv[1])):
    for step in range(100):
        with trace.span(f"step {step}"):
            pass
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make this process record spans in a buffer, as actors do."""
    monkeypatch.setattr(trace, "_record", None)
    trace.start_buffering()
    yield
    trace.drain_spans()


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    return [event for event in events if event["ph"] != "M"]


def test_trace_file_has_processes_tracks_and_spans(tmp_path: Path):
    path, metrics, before = tmp_path / "trace.json", Metrics(), time.time()
    with trace.write_trace(path):
        with metrics.timed("update"), trace.span("inside"):
            time.sleep(0.01)
        trace.add_span("step", before, track="process 7", process="environments", overlaps=True, id="a")
    events = json.loads(path.read_text())
    named = {(e["name"], e["pid"], e["args"]["name"]) for e in events if e["ph"] == "M"}
    driver, other = ("process_name", 1, "driver"), ("process_name", 2, "environments")
    assert named == {driver, ("thread_name", 1, "trainer"), other, ("thread_name", 2, "process 7")}
    inside, update, begin, end = events_of(path)
    assert (inside["name"], update["name"]) == ("inside", "update")
    assert before * 1e6 - 1 <= update["ts"] <= inside["ts"]
    assert 10_000 <= inside["dur"] <= update["ts"] + update["dur"] - inside["ts"]
    assert (begin["ph"], end["ph"], begin["id"], begin["args"]) == ("b", "e", end["id"], {"id": "a"})
    assert metrics.flush()["timing/update_s"] >= 0.01


def test_killed_process_leaves_readable_trace(tmp_path: Path):
    path = tmp_path / "trace.json"
    process = subprocess.run([sys.executable, "-c", KILLED, str(path)], env=os.environ, check=False)
    assert process.returncode == -signal.SIGKILL
    events = json.loads(path.read_text() + "]")
    assert [event["name"] for event in events if event["ph"] == "X"] == [f"step {n}" for n in range(100)]


def test_trace_ends_at_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(trace, "MAX_TRACE_BYTES", 1000)
    path = tmp_path / "trace.json"
    with trace.write_trace(path):
        for number in range(100):
            trace.add_span(f"call {number}", time.time(), track="calls")
    names = [event["name"] for event in events_of(path)]
    assert names == [f"call {number}" for number in range(len(names))] and 5 < len(names) < 20
    assert path.stat().st_size <= 1003 and len(caplog.records) == 1


def test_partial_write_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "trace.json"
    file = trace.TraceFile(path)
    whole = trace.Span("whole", 0.0, 1.0, "calls", "driver", False, {})
    file.add([whole])

    class Full:
        """A file on a disk that accepts half of a write, and then nothing more."""

        def __init__(self, real: Any):
            self.real, self.full = real, False

        def write(self, data: bytes) -> int:
            taken = self.real.write(data if self.full or data == b"\n]\n" else data[: len(data) // 2])
            self.full = True
            return int(taken)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.real, name)

    monkeypatch.setattr(file, "_file", Full(file._file))
    file.add([whole._replace(name="cut")])
    file.add([whole._replace(name="late")])
    file.close()
    assert [event["name"] for event in events_of(path)] == ["whole"]
    assert "ends here" in caplog.text


def test_earlier_trace_is_archived_with_logs(tmp_path: Path):
    for attempt in range(3):
        with run_logs(tmp_path), trace.write_trace(tmp_path / trace.TRACE_FILE):
            trace.add_span(f"attempt {attempt}", time.time(), track="trainer")
    with run_logs(tmp_path):
        pass  # without a trace
    found = [tmp_path / "logs" / f"attempt_{number}" / trace.TRACE_FILE for number in (1, 2, 3)]
    assert [events_of(path)[0]["name"] for path in found] == [f"attempt {number}" for number in range(3)]
    assert not (tmp_path / trace.TRACE_FILE).exists()


def test_unwritable_trace_does_not_fail_run(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with trace.write_trace(tmp_path / "absent" / "trace.json"), trace.span("step"):
        assert not trace.is_enabled()
    assert "trainer.trace" in caplog.text and "no timeline" in caplog.text


@pytest.mark.usefixtures("collected")
def test_spans_of_another_process_get_its_name(tmp_path: Path):
    clock = RequestDeadlines(1)
    clock.add([("runs", None), ("never ran", None)])
    clock.remove("never ran")
    clock.remove("runs")
    spans = trace.drain_spans()
    assert [(span.name, span.track, span.details) for span in spans] == [("request", "requests", {"id": "runs"})]
    assert trace.drain_spans() == []
    with trace.write_trace(tmp_path / "trace.json"):
        trace.ingest_spans(spans, "engine 0")
    names = [event["args"]["name"] for event in json.loads((tmp_path / "trace.json").read_text()) if event["ph"] == "M"]
    assert names == ["driver", "engine 0", "requests"]


def test_spans_are_recorded_only_on_request():
    assert not trace.is_enabled()
    with trace.span("step"):
        trace.add_span("call", 0.0, track="calls")
    assert trace.drain_spans() == []
