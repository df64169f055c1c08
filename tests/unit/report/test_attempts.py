"""The attempts of a run, as its folder records them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from skyrl_train.errors import WorkerDied
from skyrl_train.report.attempts import ATTEMPTS_FILE, read_attempts
from skyrl_train.trainer.run_folder import RunFolder


def folder(path: Path) -> RunFolder:
    return RunFolder(path, {"run_name": "a"}, allow_resume=True)


def test_attempts_have_hardware_and_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "sk-123456789abcdef")
    error = WorkerDied("rank 3 died with sk-123456789abcdef")
    run = folder(tmp_path).__enter__()
    run.record_hardware("gpu", 16, 2, ["H100"])
    run.__exit__(WorkerDied, error, None)
    with folder(tmp_path):
        pass
    first, second = read_attempts(tmp_path)
    assert first.hardware == {"device": "gpu", "slots": 16, "nodes": 2, "accelerators": ["H100"]}
    assert first.error == "WorkerDied: rank 3 died with <MY_API_KEY>"
    assert first.end is not None and first.start <= first.end <= second.start
    assert second.end is not None and (second.error, second.hardware) == ("", {})


def test_open_and_interrupted_attempts_differ(tmp_path: Path):
    with pytest.raises(asyncio.CancelledError), folder(tmp_path):
        raise asyncio.CancelledError
    with folder(tmp_path):
        interrupted, running = read_attempts(tmp_path)
    assert "interrupted" in interrupted.error
    assert running.end is None and running.error == ""


def test_unwritable_file_does_not_stop_run(tmp_path: Path):
    (tmp_path / ATTEMPTS_FILE).mkdir()
    with folder(tmp_path) as run:
        assert (run.path / "run.json").is_file()
    assert read_attempts(tmp_path) == []


@pytest.mark.parametrize(
    "line",
    [
        *("", "{", "[]", "3", "[" * 100_000, '{"event": "start"}', '{"event": "other", "time": 5}'),
        *(f'{{"event": "start", "time": {time}}}' for time in ('"x"', "-1", "1e300", "NaN", "true")),
    ],
)
def test_invalid_lines_are_skipped(tmp_path: Path, line: str):
    events = [{"event": "end", "time": 1}, {"event": "start", "time": 2}]
    hardware = {"event": "hardware", "time": 3, "device": [1], "slots": "x", "nodes": -1, "accelerators": {"a": 1}}
    lines = [*map(json.dumps, events), line, json.dumps(hardware), '{"event": "end", "time": 4, "error": 5}']
    (tmp_path / ATTEMPTS_FILE).write_text("\n".join(lines))
    (attempt,) = read_attempts(tmp_path)
    assert (attempt.start, attempt.end, attempt.error) == (2.0, 4.0, "")
    assert attempt.hardware == {"device": "", "accelerators": []}
