from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined]

from skyrl_train.errors import ConfigError
from skyrl_train.report.protocol import (
    IDS_FILE,
    SAMPLE_COLUMNS,
    SampleRow,
    TrackerSetup,
    flatten_config,
    load_run_id,
    save_run_id,
)
from skyrl_train.report.tensorboard import TensorboardTracker
from skyrl_train.report.trackers import Trackers, make_trackers
from skyrl_train.terminal import escape_control_chars, escape_multiline

HOSTILE = "\x1b[31m\x00[bold]x[/bold]</think><script>\ud800\u202e\r\n"


class Recorder:
    """A tracker that records its calls, and raises if `fails`."""

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


def test_tables_go_to_trackers_that_support_them(tmp_path: Path):
    class Table(Recorder):
        def table(self, rows: Sequence[SampleRow], step: int) -> None:
            self._call("table", list(rows), step)

    samples, table_rows = (
        [SampleRow("p", "a", 1.0, "stop")],
        [SampleRow("p", "a", 1.0, "stop", sample=n) for n in range(5)],
    )
    with Trackers({"plain": (plain := Recorder()), "table": (table := Table())}) as trackers:
        trackers.samples(samples, 3)
        trackers.table(table_rows, 3)
    assert plain.calls == [("samples", samples, 3), ("close",)]
    assert table.calls == [("samples", samples, 3), ("table", table_rows, 3), ("close",)]


@pytest.mark.fault("F39")
def test_failing_tracker_is_dropped_with_one_warning(caplog: pytest.LogCaptureFixture):
    good, bad = Recorder(), Recorder(fails=True)
    with caplog.at_level(logging.WARNING), Trackers({"bad": bad, "good": good}) as trackers:
        for step in range(3):
            trackers.log({"x": 1.0}, step)
    assert [call[0] for call in good.calls] == ["log", "log", "log", "close"]
    assert len(bad.calls) == 1
    assert caplog.text.count("Tracker bad failed") == 1
    assert "disk full" in caplog.text


def test_tracker_warning_hides_password_in_url(caplog: pytest.LogCaptureFixture):
    tracker = Recorder(fails=True)
    tracker.failure = OSError("no answer from https://me:pass%20word@host:5000/api?mail=a@b")
    with caplog.at_level(logging.WARNING), Trackers({"one": tracker}) as trackers:
        trackers.log({"x": 1.0}, 1)
    assert "from https://***@host:5000/api?mail=a@b" in caplog.text and "me:" not in caplog.text


def test_fail_is_called_before_close():
    class Shows(Recorder):
        def fail(self, error: BaseException) -> None:
            self.calls.append(("fail", error))

    shows, plain, error = Shows(), Recorder(), ValueError("a reason")
    with pytest.raises(ValueError, match="a reason"), Trackers({"nested": Trackers({"a": shows, "b": plain})}):
        raise error
    assert shows.calls == [("fail", error), ("close",)] and plain.calls == [("close",)]
    good = Shows()
    with Trackers({"a": good}):
        pass
    assert good.calls == [("close",)]


SECRET = "canary-of-a-password"


@pytest.mark.defect("trackers-show-secrets")
@pytest.mark.parametrize("fails", [False, True])
def test_secrets_are_redacted_for_trackers_and_warnings(
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


@pytest.mark.defect("unprintable-metric-names")
def test_metric_names_are_printable_and_redacted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_PASSWORD", SECRET)
    tracker = Recorder()
    with Trackers({"one": tracker}) as trackers:
        trackers.log({"environment/a\ud800\x1b[31m": 1.0, f"environment/{SECRET}": 2.0, "eval/été/avg_score": 3.0}, 1)
    assert tracker.calls[0][1] == {
        r"environment/a\ud800\x1b[31m": 1.0,
        "environment/<MY_PASSWORD>": 2.0,
        "eval/été/avg_score": 3.0,
    }


def test_renamed_metrics_keep_their_deprecated_names():
    tracker = Recorder()
    with Trackers({"outer": Trackers({"inner": tracker})}) as trackers:
        trackers.log({"timing/offload_s": 2.0, "reward/mean": 0.5}, 1)
    assert tracker.calls[0] == ("log", {"timing/offload_s": 2.0, "timing/move_s": 2.0, "reward/mean": 0.5}, 1)


@pytest.mark.parametrize("names", [[], ["console", "console"]])
def test_jsonl_and_console_always_exist_once(names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with make_trackers(names, tmp_path, "project", "run", {}) as trackers:
        trackers.begin(0, 2)
        trackers.log({"reward/mean": 0.5}, 1)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["reward/mean"] == 0.5
    assert capsys.readouterr().out.count("step 1/2") == 1


def test_unknown_tracker_is_refused_with_suggestion(tmp_path: Path):
    with pytest.raises(ConfigError, match="Did you mean 'wandb'"):
        make_trackers(["wandbb"], tmp_path, "project", "run", {})


@pytest.mark.parametrize("name", ["mlflow", "tensorboard", "trackio", "wandb"])
def test_missing_library_names_the_install_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    module = f"skyrl_train.report.{name}"
    for loaded in [m for m in sys.modules if m == module or m.split(".")[0] == name]:
        monkeypatch.delitem(sys.modules, loaded)
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=f"pip install {name}"):
        make_trackers([name], tmp_path, "project", "run", {})


def test_tensorboard_drops_later_steps_of_resumed_run(tmp_path: Path):
    for start, value in ((0, 1.0), (2, 7.0)):
        tracker = Trackers({"tensorboard": TensorboardTracker(TrackerSetup(tmp_path, "project", "run"))})
        tracker.begin(start, 4)
        tracker.table([SampleRow(HOSTILE, HOSTILE, 1.0, "stop")], start)
        for step in range(start + 1, start + 4):  # a failing tracker gets no further calls
            tracker.log({"reward/mean": value, "nan": float("nan"), HOSTILE: 1e308}, step)
        tracker.close()
    assert [(e.step, e.value) for e in events_in(tmp_path).Scalars("reward/mean")] == [
        (1, 1),
        (2, 1),
        (3, 7),
        (4, 7),
        (5, 7),
    ]


@pytest.mark.filterwarnings("ignore:html5lib's sanitizer is deprecated:DeprecationWarning")  # TensorBoard's own copy
@pytest.mark.parametrize("markdown", [True, False])
def test_tensorboard_shows_completions_as_text(markdown: bool, tmp_path: Path):
    from tensorboard.plugins.text import text_plugin
    from tensorboard.util import tensor_util

    hostile = (
        HOSTILE + "<img src=x onerror=f()> **b** `c` [a](javascript:f())\n    # no code\n1. no list\n| no | table |"
    )
    with Trackers({"tensorboard": TensorboardTracker(TrackerSetup(tmp_path, "project", "run"))}) as tracker:
        tracker.begin(0, 1)
        tracker.table([SampleRow(hostile, "plain", 0.25, "stop", "a-3", "ok", 2, 1234, 7)], 1)
    (event,) = events_in(tmp_path).Tensors("samples")
    page = Page()
    page.feed(text_plugin.text_array_to_html(tensor_util.make_ndarray(event.tensor_proto), markdown))
    assert event.step == 1
    assert page.tags <= {"table", "tbody", "tr", "td", "p", "br"}
    assert page.cells == [
        "prompt",
        "response",
        "reward",
        "stop_reason",
        *("uid", "status", "turns", "tokens", "version", "sample"),
        escape_multiline(hostile),
        "plain",
        "0.25",
        "stop",
        *("a-3", "ok", "2", "1234", "7", "0"),
    ]


def test_tensorboard_has_configuration_as_hyperparameters(tmp_path: Path):
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    for seed in (1, 2):  # a resumed run may have a different configuration
        config = {"trainer": {"seed": seed, "policy": {"lr": 1e-6}, "run_name": HOSTILE}}
        with Trackers({"tensorboard": TensorboardTracker(TrackerSetup(tmp_path, "project", "run", config))}) as tracker:
            tracker.begin(seed - 1, 3)
            tracker.log({"x": float(seed)}, seed)
    found = events_in(tmp_path)
    content = found.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    values = HParamsPluginData.FromString(content).session_start_info.hparams
    assert values["trainer.policy.lr"].number_value == 1e-6
    assert values["trainer.run_name"].string_value == escape_control_chars(HOSTILE)
    assert [(e.step, e.value) for e in found.Scalars("x")] == [(1, 1), (2, 2)]


def events_in(run_dir: Path) -> EventAccumulator:
    events = EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return events


class Page(HTMLParser):
    """The elements of a page, and the texts of its table cells as a browser shows them."""

    def __init__(self):
        super().__init__()
        self.tags: set[str] = set()
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag == "td":
            self.cells.append("")
        elif tag == "br":
            self.cells[-1] += "\n"

    def handle_data(self, data: str) -> None:
        if self.cells and data != "\n":
            self.cells[-1] += data.replace("\xa0", " ")


CANARIES = ("SLURM_JWT", "SLURM_JOB_ID", "HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
WANDB_RUN = f"""
import sys
import time
from pathlib import Path
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.trackers import make_trackers
with make_trackers(["wandb"], Path(sys.argv[1]), "project", "run", {{"trainer": {{"seed": 1}}}}) as trackers:
    assert set(trackers._members) == {{"jsonl", "console", "wandb", "diagnosis"}}
    trackers.begin(0, 2)
    trackers.log({{"reward/mean": float("nan"), {HOSTILE!r}: 1e308}}, 1)
    trackers.samples([SampleRow("a", "of the few", 1.0, "stop")], 1)
    trackers.table([SampleRow({HOSTILE!r}, {HOSTILE!r}, 0.5 + n, "stop", "a-3", sample=n) for n in range(2)], 1)
    assert "wandb" in trackers._members, "a tracker that failed is dropped"
for start in filter(str.isdigit, sys.argv[2:]):
    time.sleep(1.1)  # W&B names folders by the second
    with make_trackers(["wandb"], Path(sys.argv[1]), "project", "run", {{}}) as trackers:
        trackers.begin(int(start), 2)
        trackers.log({{"reward/mean": 0.5}}, 2)
        if "fails" in sys.argv and start == "0":
            trackers.fail(RuntimeError("the run fails"))
        assert "wandb" in trackers._members, "a tracker that failed is dropped"
assert "torch" not in sys.modules
"""


@pytest.mark.defect("wrong-wandb-key-ends-run")
@pytest.mark.parametrize("account", [{"WANDB_MODE": "offline"}, {"WANDB_API_KEY": "canary-that-is-no-key-of-wandb"}])
def test_wandb_works_offline_and_gets_no_secrets(account: dict[str, str], tmp_path: Path):
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
    (address,) = [line for line in result.stdout.splitlines() if line.startswith("wandb: ")]
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert address == f"wandb: offline, `wandb sync {folder}` uploads this run"
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    (table,) = [json.loads(file.read_text()) for file in folder.glob("files/media/table/*.json")]
    assert table["columns"] == [*SAMPLE_COLUMNS]
    assert [dict(zip(table["columns"], row, strict=True)) for row in table["data"]] == [
        asdict(SampleRow(HOSTILE, HOSTILE, 0.5 + n, "stop", "a-3", sample=n)) for n in range(2)
    ]


def test_resumed_run_continues_its_wandb_run(tmp_path: Path):
    env = os.environ | {"WANDB_MODE": "offline", "HOME": str(tmp_path)}
    command = [sys.executable, "-c", WANDB_RUN, str(tmp_path), "1", "0", "fails"]
    result = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "failed" not in result.stderr
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    ids = [folder.name.rpartition("-")[2] for folder in folders]
    assert len(ids) == 3
    assert ids[0] == ids[1] != ids[2] == load_run_id(tmp_path, "wandb")
    assert [exit_code(*folder.glob("*.wandb")) for folder in folders] == [0, 0, 1]


def exit_code(file: Path) -> int:
    """Return the exit code in a W&B file of one block. Each record has a header of 7 bytes with its length."""
    content, offset = file.read_bytes(), 7
    assert len(content) < 32768
    while offset + 7 <= len(content):
        length = int.from_bytes(content[offset + 4 : offset + 6], "little")
        record = Record.FromString(content[offset + 7 : offset + 7 + length])
        if record.HasField("exit"):
            return int(record.exit.exit_code)
        offset += 7 + length
    raise AssertionError(f"{file} has no exit record")


def test_tracker_ids_are_saved_and_damaged_file_ignored(tmp_path: Path):
    assert load_run_id(tmp_path, "wandb") is None
    save_run_id(tmp_path, "wandb", "a")
    save_run_id(tmp_path, "mlflow", "b")
    assert (load_run_id(tmp_path, "wandb"), load_run_id(tmp_path, "mlflow")) == ("a", "b")
    for damaged in ("{", "[]", '{"wandb": 3}'):
        (tmp_path / IDS_FILE).write_text(damaged)
        assert load_run_id(tmp_path, "wandb") is None


def test_configuration_is_flattened():
    config = {"a": {"b": 1, "c": {"d": [1, None]}}, "e": None, "f": True, "g": "x\x1b", "\n": {}, "h": 0.5}
    assert flatten_config(config) == {"a.b": 1, "a.c.d": "[1, null]", "e": "null", "f": True, "g": r"x\x1b", "h": 0.5}
