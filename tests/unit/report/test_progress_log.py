from __future__ import annotations

import re
import time

import pytest

from skyrl_train.report import progress_log
from skyrl_train.report.progress_log import report_progress, startup_phase


def test_startup_phase_prints_its_duration(capsys: pytest.CaptureFixture[str]):
    with startup_phase("Ray", "its processes"):
        pass
    assert re.fullmatch(r"Ray +0\.0 s\n", capsys.readouterr().out)


def test_long_phase_reports_progress_less_often(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress_log, "FIRST_REPORT_S", 0.1)
    monkeypatch.setattr(progress_log, "FREQUENT_REPORTS_S", 0.25)
    with startup_phase("models", "ranks and engines that load"):
        time.sleep(0.8)
    *lines, last = capsys.readouterr().out.splitlines()
    assert 2 <= len(lines) <= 3  # after 0.1, 0.2 and 0.3 s; fewer on a busy machine
    assert all(line.endswith("so far: ranks and engines that load") for line in lines)
    assert re.fullmatch(r"models +\d\.\d s", last)


def test_failed_phase_prints_no_duration(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(KeyError), startup_phase("Ray", "its processes"):
        raise KeyError("a bug")
    assert capsys.readouterr().out == ""


def test_closed_stream_is_ignored(monkeypatch: pytest.MonkeyPatch):
    class FullDisk:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("sys.stdout", FullDisk())
    with startup_phase("Ray", "its processes"):
        pass


def test_only_long_steps_report_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(progress_log, "FIRST_REPORT_S", 0.3)
    begun = time.monotonic()

    def progress() -> str:
        elapsed_s = time.monotonic() - begun
        return (
            f"generate, {5 * elapsed_s:.0f} of 4 groups"
            if elapsed_s < 1.05
            else "score"
            if elapsed_s < 1.2
            else "update"
        )

    with report_progress("step 7", progress):
        time.sleep(2.4)
    lines = [line.split("so far: ")[1] for line in capsys.readouterr().out.splitlines()]
    assert len(lines) >= 4, lines  # every 0.3 s
    assert lines[0].startswith("generate, ") and lines[-1] == "update", lines
    with report_progress("step 8", "nothing"):
        pass
    assert capsys.readouterr().out == ""
