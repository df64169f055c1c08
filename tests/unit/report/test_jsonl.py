from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from skyrl_train.report.jsonl import JsonlTracker, MetricsFollower, read_jsonl, read_metrics
from skyrl_train.report.protocol import SampleRow
from tests.support.disk_limits import limit_file_size


def strict(text: str) -> dict:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_non_finite_values_become_null(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"a": float("nan"), "b": float("inf"), "c": 1}, 3)
    line = strict((tmp_path / "metrics.jsonl").read_text())
    assert (line["step"], line["a"], line["b"], line["c"]) == (3, None, None, 1.0)


@pytest.mark.fault("F24")
@given(text=st.text(st.characters(exclude_categories=())))
def test_any_completion_round_trips_as_one_line(tmp_path_factory: pytest.TempPathFactory, text: str):
    folder = tmp_path_factory.mktemp("run")
    JsonlTracker(folder).samples([SampleRow(text, text, 0.0, "stop")], 1)
    lines = (folder / "samples.jsonl").read_bytes().splitlines()
    assert len(lines) == 1
    assert strict(lines[0].decode("ascii"))["response"] == text


def test_resumed_run_drops_later_and_partial_lines(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    for step in range(4):
        tracker.log({"x": step}, step)
        tracker.samples([SampleRow("p", "r", 1.0, "stop")], step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 1, "x"')
    JsonlTracker(tmp_path).begin(2, 10)
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2]
    assert [line["step"] for line in read_jsonl(tmp_path / "samples.jsonl")] == [0, 1, 2]
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        strict(line)


def test_restarted_run_drops_earlier_attempt(tmp_path: Path):
    JsonlTracker(tmp_path).log({"x": 1.0}, 0)
    JsonlTracker(tmp_path).begin(0, 10)
    assert read_jsonl(tmp_path / "metrics.jsonl") == []


@pytest.mark.fault("F39")
@pytest.mark.defect("C6-full-disk-truncates-metrics-file")
def test_full_disk_loses_no_line(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tracker = JsonlTracker(tmp_path)
    tracker.begin(0, 9)
    tracker.log({"a": 1.0}, 0)
    with limit_file_size(tmp_path / "metrics.jsonl", 5):
        for step in (1, 2):
            tracker.log({"a": 1.0}, step)
            assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [0]
            assert (tmp_path / "metrics.jsonl").read_text().endswith("}\n")
    tracker.log({"a": 1.0}, 3)
    tracker.close()
    assert [line["step"] for line in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3]
    assert caplog.text.count("cannot be written") == 1
    assert "no line is lost" in caplog.text


def test_lost_last_lines_are_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    tracker = JsonlTracker(tmp_path)
    tracker.log({"a": 1.0}, 0)
    with limit_file_size(tmp_path / "metrics.jsonl", 5):
        tracker.log({"a": 1.0}, 1)
        tracker.close()
    assert "lacks its last lines" in caplog.text


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ({"timing/move_s": 2.0}, 2.0),
        ({"timing/move_s": 2.0, "timing/offload_s": 3.0}, 3.0),
        ({"timing/offload_s": 3.0, "timing/move_s": None}, 3.0),
    ],
)
def test_readers_use_current_metric_names(tmp_path: Path, written: dict[str, float | None], value: float):
    file = tmp_path / "metrics.jsonl"
    file.write_text(json.dumps({"step": 1, **written}) + "\n")
    assert read_metrics(file) == [{"step": 1, "timing/offload_s": value}]
    assert MetricsFollower(file).read_new_lines()[1] == [{"step": 1, "timing/offload_s": value}]


def test_repeated_step_replaces_its_line(tmp_path: Path):
    tracker = JsonlTracker(tmp_path)
    tracker.begin(0, 9)
    for step in (0, 1, 2):
        tracker.log({"a": float(step)}, step)
    again = JsonlTracker(tmp_path)
    again.begin(2, 9)
    again.log({"a": 2.0, "eval/x/avg_score": 1.0}, 2)
    again.log({"a": 3.0}, 3)
    lines = read_jsonl(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert lines[2]["eval/x/avg_score"] == 1.0
