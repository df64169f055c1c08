from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.report.protocol import SampleRow, TrackerSetup
from skyrl_train.report.trackers import Trackers, make_trackers

HOSTILE = "\x1b[31m\x00[bold]x[/bold]</think><script>\ud800\u202e\r\n"


class Recorder:
    """A tracker that keeps what it got, or raises."""

    def __init__(self, fails: bool = False):
        self.fails = fails
        self.failure = OSError("disk full")
        self.calls: list[tuple] = []

    def _call(self, *call: object) -> None:
        self.calls.append(call)
        if self.fails:
            raise self.failure

    def begin(self, step: int, total_steps: int) -> None:
        self._call("begin", step, total_steps)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._call("log", dict(metrics), step)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        self._call("samples", list(rows), step)

    def close(self) -> None:
        self._call("close")


@pytest.mark.fault("F39")
def test_a_tracker_that_raises_is_named_once_and_dropped_and_the_others_go_on(caplog: pytest.LogCaptureFixture):
    good, bad = Recorder(), Recorder(fails=True)
    with caplog.at_level(logging.WARNING), Trackers({"bad": bad, "good": good}) as trackers:
        for step in range(3):
            trackers.log({"x": 1.0}, step)
    assert [call[0] for call in good.calls] == ["log", "log", "log", "close"]
    assert len(bad.calls) == 1
    assert caplog.text.count("Tracker bad failed") == 1
    assert "disk full" in caplog.text


SECRET = "canary-of-a-password"


@pytest.mark.defect("trackers-showed-secrets-of-the-environment")
@pytest.mark.parametrize("fails", [False, True])
def test_trackers_get_no_secret_of_the_environment_and_none_is_said_of_those_that_fail(
    fails: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    tracker = Recorder(fails=fails)
    tracker.failure = OSError(f"no access with {SECRET}")
    with caplog.at_level(logging.WARNING), Trackers({"one": tracker}) as trackers:
        trackers.samples([SampleRow(f"print {SECRET}", f"it is {SECRET}", 1.0, "stop")], 1)
        trackers.log({f"environment/{SECRET}": 1.0}, 1)
    row = SampleRow("print <MY_PASSWORD>", "it is <MY_PASSWORD>", 1.0, "stop")
    assert tracker.calls[0] == ("samples", [row], 1)
    assert fails or tracker.calls[1] == ("log", {"environment/<MY_PASSWORD>": 1.0}, 1)
    assert SECRET not in caplog.text and ("<MY_PASSWORD>" in caplog.text) is fails


@pytest.mark.defect("names-that-trackers-do-not-take")
def test_trackers_get_names_that_are_printable_and_hold_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    tracker = Recorder()
    with Trackers({"one": tracker}) as trackers:
        trackers.log({"environment/a\ud800\x1b[31m": 1.0, f"environment/{SECRET}": 2.0, "eval/été/avg_score": 3.0}, 1)
    assert tracker.calls[0][1] == {
        r"environment/a\ud800\x1b[31m": 1.0,
        "environment/<MY_PASSWORD>": 2.0,
        "eval/été/avg_score": 3.0,
    }


@pytest.mark.parametrize("names", [[], ["console", "console"]])
def test_jsonl_and_console_are_always_there_and_a_name_counts_once(
    names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    with make_trackers(names, tmp_path, "project", "run", {}) as trackers:
        trackers.begin(0, 2)
        trackers.log({"reward/mean": 0.5}, 1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward/mean"] == 0.5
    assert capsys.readouterr().out.count("step 1/2") == 1


def test_an_unknown_tracker_is_refused_with_the_nearest_name(tmp_path: Path):
    with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
        make_trackers(["wandbb"], tmp_path, "project", "run", {})


@pytest.mark.parametrize(("name", "library"), [("wandb", "wandb"), ("tensorboard", "tensorboard.compat.proto")])
def test_a_missing_library_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, library: str
):
    module = f"skyrl_train.report.{name}"
    for loaded in [m for m in sys.modules if m == module or m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        make_trackers([name], tmp_path, "project", "run", {})


def test_tensorboard_files_hold_the_scalars_and_restart_where_the_run_goes_on(tmp_path: Path):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from skyrl_train.report.tensorboard import TensorboardTracker

    for start, value in ((0, 1.0), (2, 7.0)):
        tracker = Trackers({"tensorboard": TensorboardTracker(TrackerSetup(tmp_path, "project", "run"))})
        tracker.begin(start, 4)
        for step in range(start + 1, start + 4):
            tracker.log({"reward/mean": value, "nan": float("nan"), HOSTILE: 1e308}, step)
        tracker.samples([SampleRow(HOSTILE, HOSTILE, 1.0, "stop")], start)
        assert tracker._members
        tracker.close()
    events = event_accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1), (2, 1), (3, 7), (4, 7), (5, 7)]


CANARIES = ("SLURM_JWT", "SLURM_JOB_ID", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
WANDB_RUN = f"""
import sys
from pathlib import Path
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.trackers import make_trackers
with make_trackers(["wandb"], Path(sys.argv[1]), "project", "run", {{"trainer": {{"seed": 1}}}}) as trackers:
    assert set(trackers._members) == {{"jsonl", "console", "wandb", "diagnosis"}}
    trackers.begin(0, 2)
    trackers.log({{"reward/mean": float("nan"), {HOSTILE!r}: 1e308}}, 1)
    trackers.samples([SampleRow({HOSTILE!r}, {HOSTILE!r}, 1.0, "stop")], 1)
    assert "wandb" in trackers._members, "a tracker that failed is dropped"
assert "torch" not in sys.modules
"""


@pytest.mark.defect("a-wrong-key-of-wandb-ended-the-run")
@pytest.mark.parametrize("account", [{"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "canary-that-is-no-key-of-wandb"}])
def test_wandb_needs_neither_network_nor_account_and_gets_nothing_of_the_environment(
    account: dict[str, str], tmp_path: Path
):
    home = tmp_path / "home"
    home.mkdir()
    env = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    result = subprocess.run(
        [sys.executable, "-c", WANDB_RUN, str(tmp_path), "canary-argument"],
        env=env | account | {name: f"canary-{name}" for name in CANARIES} | {"HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "failed" not in result.stderr
    host = socket.gethostname().encode()
    assert "canary-" not in result.stdout + result.stderr
    for file in (path for path in tmp_path.rglob("*") if path.is_file()):
        content = file.read_bytes()
        assert b"canary-" not in content, f"{file} has something of the environment"
        # As text, or as protobuf writes it: bare, a short name is found in any random id.
        for written in (b'"%s"' % host, bytes([len(host)]) + host):
            assert written not in content, f"{file} has the name of this machine"
        assert file.name != "requirements.txt"
    (where,) = [line for line in result.stdout.splitlines() if line.startswith("wandb: ")]
    (kept,) = (tmp_path / "wandb").glob("offline-run-*")
    assert where == f"wandb: offline, `wandb sync {kept}` sends this run"
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
