"""skyrl-train report and watch, started and ended as a person does."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.entrypoints.report import main as report
from skyrl_train.entrypoints.watch import main as watch
from skyrl_train.report.rollout_files import write_rollouts
from skyrl_train.report.viewer_page import render_page
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts
from tests.support.synthetic_run_folders import synthetic_metrics, write_metrics, write_synthetic_run
from tests.support.viewer_page import requires_viewer

pytestmark = requires_viewer


@contextmanager
def watching(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start the command; yield its process and the URL that it prints."""
    render_page()  # building the page may take time
    command = [sys.executable, "-m", "skyrl_train.entrypoints.cli", "watch", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert lines[2] == "Ctrl-C ends it.\n", (lines, process.stderr and process.stderr.read())
            yield process, lines[1].strip()
        finally:
            process.kill()


def test_running_run_is_watched_until_interrupt(tmp_path: Path):
    folder = write_synthetic_run(tmp_path / "run", 2, total=5)
    with watching(str(folder)) as (process, address):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#access_token=[\w-]{43}", address)
        server, _, token = address.partition("/#access_token=")

        def get(path: str) -> Any:
            request = urllib.request.Request(f"{server}/api/{path}", headers={"Authorization": f"Bearer {token}"})
            with urllib.request.urlopen(request, timeout=30) as answer:
                return json.load(answer)

        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{server}/api/runs", timeout=30)
        with urllib.request.urlopen(address, timeout=30) as answer:
            assert answer.read().decode() == render_page()
        assert get("runs")["runs"][0]["step"] == 2
        assert get("rollouts?run=0")["total"] == 32
        write_metrics(folder, [synthetic_metrics(3)], 5, after=2)
        write_rollouts(folder, 3, synthetic_rollouts(8, 3))
        assert get("metrics?run=0")["steps"] == [1, 2, 3]
        assert get("rollouts?run=0&step=3")["total"] == 8
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
        assert (process.returncode, errors) == (0, "")


def test_report_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [write_synthetic_run(tmp_path / "one", 2), write_synthetic_run(tmp_path / "two", 3, rollouts=0)]
    before = {file for run in runs for file in run.rglob("*")}
    out = tmp_path / "out.html"
    report([*map(str, runs), "--out", str(out)])
    assert re.fullmatch(r".*/out\.html: 0\.\d MB with 32 of 32 saved rollouts\.\n", capsys.readouterr().out)
    html = out.read_text(encoding="utf-8")
    assert html.count("<script") == 2 and "connect-src 'none'" in html
    assert {file for run in runs for file in run.rglob("*")} == before


@pytest.mark.parametrize("main", [report, watch])
def test_folders_without_run_are_refused(main: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit:
        main([str(tmp_path / "\x1b[31mnowhere")])
    assert exit.value.code == 2
    errors = capsys.readouterr().err
    assert "is not the folder of a run: it has neither metrics.jsonl nor config.yaml" in errors and "\x1b" not in errors


@pytest.mark.parametrize("main", [report, watch])
def test_overlong_file_names_are_reported(main: Any, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="2"):
        main(["x" * 300])
    assert "File name too long" in capsys.readouterr().err


def test_unwritable_report_file_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = write_synthetic_run(tmp_path / "run", 1, rollouts=0)
    with pytest.raises(SystemExit):
        report([str(run), "--out", str(tmp_path / "no" / "report.html")])
    assert "cannot be written: No such file or directory" in capsys.readouterr().err
