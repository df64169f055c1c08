"""A damaged or malicious file of a run hides no other run, and no other file of the same run."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_train.report import run_reader
from skyrl_train.report.diagnosis import DIAGNOSIS_FILE
from skyrl_train.report.html_report import make_report
from skyrl_train.report.jsonl import METRICS_FILE, read_metrics
from skyrl_train.report.rollout_files import RolloutReader, step_file, vocabulary_file
from skyrl_train.report.run_reader import RunReader
from skyrl_train.report.untrusted_files import MAX_YAML_BYTES, open_untrusted, parse_yaml_mapping
from skyrl_train.report.watch_server import WatchServer
from tests.support.synthetic_run_folders import write_synthetic_run

PAGE = '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'">'
MAX_BYTES = 5_000_000
BILLION = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n"
    for before, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
MERGES = "a: &a {k: 1}\n" + "".join(
    f"{name}: &{name} {{<<: [{', '.join([f'*{before}'] * 9)}]}}\n"
    for before, name in zip("abcdefghijk", "bcdefghijkl", strict=True)
)
DEEP = "[" * 50_000
NESTED = "[" * 700 + "]" * 700
HUGE = "9" * 400


def fifo(file: Path) -> None:
    file.unlink(missing_ok=True)
    os.mkfifo(file)


def folder(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.mkdir()


def endless(file: Path) -> None:
    file.unlink(missing_ok=True)
    file.symlink_to("/dev/zero")


def sparse(file: Path) -> None:
    with file.open("wb") as handle:
        handle.truncate(1 << 40)


def truncate(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def replaced(file: Path) -> None:
    """Replace a folder by a file."""
    file.rename(file.with_name("moved"))
    file.write_text("x")


def table(content: pa.Table) -> Callable[[Path], object]:
    return lambda file: pq.write_table(content, file)


def noise(file: Path) -> None:
    file.write_bytes(bytes(range(256)) * 20)


def text(content: str) -> Callable[[Path], object]:
    return lambda file: file.write_bytes(content.encode("latin-1"))


def lines(*rows: str) -> Callable[[Path], object]:
    """Return a function that writes these lines around a valid one."""
    good = json.dumps({"step": 1, "reward/mean": 0.5, "timing/step_s": 2.0})
    return text("\n".join([*rows, good, *rows]) + "\n")


def columns(**changed: pa.Array | None) -> Callable[[Path], object]:
    """Return a function that replaces columns of a step's file; None removes the column."""

    def change(file: Path) -> None:
        table = pq.read_table(file)
        for name, values in changed.items():
            index = table.schema.get_field_index(name)
            table = table.remove_column(index)
            if values is not None:
                table = table.add_column(index, name, pa.chunked_array([values]))
        pq.write_table(table, file)

    return change


ROWS = 8
INT = pa.int32()
SPAN = pa.list_(pa.struct([("start", INT), ("stop", INT)]))
NO_INTS, NO_TEXTS = pa.nulls(ROWS, INT), pa.nulls(ROWS, pa.string())
HOST = socket.gethostname()
ODD = {"FIFO": fifo, "folder": folder, "device": endless, "noise": noise}
SPANS = pa.array([[{"start": -5, "stop": 10**6}]] * ROWS)
NOT_UTF8 = pa.StringArray.from_buffers(
    ROWS, pa.array(range(0, 2 * ROWS + 1, 2), INT).buffers()[1], pa.py_buffer(b"\xff\xfe" * ROWS)
)
DAMAGE: dict[str, dict[str, Callable[[Path], object]]] = {
    "config.yaml": {
        **ODD,
        "aliases": text(BILLION),
        "merges": text(MERGES),
        "itself": text("a: &a [*a]"),
        "base 60": text("trainer: {max_steps: 1" + ":59" * 60_000 + "}"),
        "deep": text(DEEP),
        "nested": text("trainer: " + NESTED),
        "large": text("a: " + "x" * MAX_YAML_BYTES),
        "odd tag": text("a: !!timestamp x\nb: !!int z"),
        "huge": text(f"trainer: {{max_steps: {HUGE}, run_name: [{HUGE}]}}"),
    },
    "run.json": {
        **ODD,
        "nested": text('{"run_name": ' + NESTED + "}"),
        "huge": text('{"run_name": ' + HUGE + ', "project_name": {"a": [1e999]}}'),
        "long": text('{"run_name": "' + "x" * 10**6 + '"}'),
        "not UTF-8": text('{"run_name": "\xff"}'),
        "sparse": sparse,
    },
    "attempts.jsonl": {
        **ODD,
        "huge": text(f'{{"event": "start", "time": {HUGE}}}'),
        "nested": text('{"event": "start", "time": 1}\n{"event": "end", "time": 2, "error": ' + NESTED + "}"),
        "infinite": text('{"event": "start", "time": 1e999}\n{"event": "start", "time": NaN}'),
        "not UTF-8": text('{"event": "start", "time": 1, "host": "\xff"}'),
    },
    ".lock": {**ODD, "huge": text(f"process {HUGE} on {HOST}"), "negative": text(f"process -1 on {HOST}")},
    DIAGNOSIS_FILE: {
        **ODD,
        "huge": text(f'{{"total_steps": {HUGE}, "findings": [{{"since": {HUGE}}}, {{"since": 1, "until": [1]}}]}}'),
        "nested": text('{"findings": [{"since": 1, "evidence": ' + NESTED + "}]}"),
        "missing": lambda file: file.unlink(),
    },
    METRICS_FILE: {
        **ODD,
        "huge number": lines(f'{{"step": 1, "reward/mean": {HUGE}, "time": {HUGE}, "timing/step_s": {HUGE}}}'),
        "infinite": lines('{"step": 1, "reward/mean": 1e999, "timing/step_s": NaN, "policy/entropy": -Infinity}'),
        "greatest": lines(*(f'{{"step": {n}, "reward/mean": 1.7e308, "timing/step_s": 1e308}}' for n in range(9))),
        "huge step": lines(f'{{"step": {HUGE}, "a": 1}}', '{"step": 99999999999, "a": 1}', '{"step": true, "a": 1}'),
        "no number": lines('{"step": 2, "reward/mean": "x", "timing/step_s": [1], "policy/entropy": {}, "time": "x"}'),
        "deep": lines('{"step": 1, "a": ' + DEEP),
        "not UTF-8": lines('{"step": 1, "\xff": 1}'),
        "sparse": sparse,
    },
    "rollouts": {"file": replaced},
    "rollouts/vocabulary.parquet": {
        **ODD,
        "truncated": truncate,
        "not UTF-8": table(pa.table({"id": pa.array(range(ROWS), INT), "text": NOT_UTF8})),
        "other columns": table(pa.table({"x": [1]})),
        "nulls": table(pa.table({"id": [None, 1], "text": ["a", None]})),
    },
    "rollouts/step_00000002.parquet": {
        **ODD,
        "truncated": truncate,
        "empty": text(""),
        "not UTF-8": columns(text=NOT_UTF8),
        "not UTF-8 uid": columns(uid=NOT_UTF8),
        "other columns": table(pa.table({"x": [1]})),
        "no rows": lambda file: pq.write_table(pq.read_table(file).slice(0, 0), file),
        "spans": columns(loss_spans=SPANS),
        "turns": columns(turns=pa.array([[{"start": None, "stop": 5}]] * ROWS)),
        "long turns": columns(turns=pa.array([[{"start": 0, "stop": 2**31 - 1}]] * ROWS, SPAN)),
        "negative length": columns(response_tokens=pa.array([-3] * ROWS, pa.int32())),
        "huge length": columns(response_tokens=pa.array([2**31 - 1] * ROWS, pa.int32())),
        "no lengths": columns(response_tokens=NO_INTS),
        "no groups": columns(group=NO_INTS, sample=NO_INTS, uid=NO_TEXTS),
        "other step": columns(step=pa.array([77] * ROWS, pa.int32())),
        "rewards": columns(reward=pa.array([float("nan"), float("inf"), -1e308, 1e308] * (ROWS // 4))),
        "short columns": columns(advantages=pa.array([[1.0]] * ROWS, pa.list_(pa.float32()))),
        "nested JSON": columns(messages=pa.array([f'[{{"role": "user", "content": {NESTED}}}]'] * ROWS)),
        "references": columns(messages=pa.array(['{"messages": [], "text": [[5, 0, 1]]}'] * ROWS)),
        "other JSON": columns(messages=pa.array(["3"] * ROWS), env_metrics=pa.array(["[1]"] * ROWS)),
    },
}
CASES = [(name, how) for name, kinds in DAMAGE.items() for how in kinds]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic_run(tmp_path_factory.mktemp("good") / "b", 3, name="b", rollouts=ROWS)


def data_of(folders: list[Path]) -> dict[str, Any]:
    """Return the data of a report of these runs."""
    found: dict[str, Any] = json.loads(make_report(folders, json.dumps, MAX_BYTES).html)
    return found


def answers(folders: list[Path], paths: list[str]) -> list[tuple[int, Any]]:
    async def ask() -> list[tuple[int, Any]]:
        found = []
        async with WatchServer(folders, PAGE) as server, aiohttp.ClientSession(server.url) as session:
            for path in paths:
                headers = {"Authorization": f"Bearer {server.token}"}
                async with session.get(f"/api/{path}", headers=headers) as answer:
                    body = await answer.text()
                    found.append((answer.status, json.loads(body) if answer.status == 200 else body))
        return found

    return asyncio.run(asyncio.wait_for(ask(), 60))


def endpoints(run: int) -> list[str]:
    kinds = ["metrics", "diagnosis", "rollouts", "rollouts?text=is+what"]
    return [f"{kind}{'&' if '?' in kind else '?'}run={run}" for kind in kinds]


@pytest.mark.defect("one-bad-file-hides-runs")
@pytest.mark.parametrize(("name", "how"), CASES, ids=[f"{name} {how}" for name, how in CASES])
def test_odd_file_hides_nothing_else(name: str, how: str, tmp_path: Path, good: Path):
    bad = write_synthetic_run(tmp_path / "a", 3, name="a", rollouts=ROWS)
    DAMAGE[name][how](bad / name)
    data = data_of([bad, good])
    assert [run["name"] for run in data["runs"]["runs"]][1] == "b"
    assert len(data["runs"]["runs"][0]["name"]) <= 1000
    assert data["metrics"]["1"]["columns"]["reward/mean"] == [0.01, 0.02, 0.03]
    assert len(data["rollouts"]["1"]) == 3 * ROWS
    if name != METRICS_FILE:
        assert data["metrics"]["0"]["columns"]["reward/mean"] == [0.01, 0.02, 0.03]
    if not name.startswith("rollouts"):
        assert len(data["rollouts"]["0"]) == 3 * ROWS
    elif name != "rollouts":
        intact = {step for step in (1, 2, 3) if step_file(bad, step) != bad / name}
        assert intact <= {rollout["step"] for rollout in data["rollouts"]["0"]}
    runs, *bad_answers = answers([bad, good], ["runs", *endpoints(0)])
    assert runs[0] == 200 and [run["has_rollouts"] for run in runs[1]["runs"]][1]
    statuses = [status for status, _ in bad_answers]
    assert statuses[1:] == [200, 200, 200] if name != METRICS_FILE else statuses[2:] == [200, 200]
    assert statuses[0] in (200, 400) and statuses[1] in (200, 400)


def test_inconsistent_rollout_is_refused_by_name(tmp_path: Path):
    bad = write_synthetic_run(tmp_path / "a", 3, name="a", rollouts=ROWS)
    DAMAGE["rollouts/step_00000002.parquet"]["short columns"](step_file(bad, 2))
    columns(rollout_logprobs=pa.array([[1.0]] * ROWS, pa.list_(pa.float32())))(step_file(bad, 2))
    uid = RolloutReader(bad).table([2], ["uid"])["uid"][0].as_py()
    (damaged, fine) = answers([bad], [f"rollout?run=0&step=2&uid={uid}&sample=0", f"group?run=0&step=2&uid={uid}"])
    assert damaged[0] == 400 and "cannot be" in damaged[1]
    assert fine[0] == 200


@pytest.mark.parametrize("make", [fifo, folder, endless], ids=["FIFO", "folder", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, make: Callable[[Path], object]):
    make(tmp_path / "x")
    with pytest.raises(OSError, match="x is not a regular file"), open_untrusted(tmp_path / "x"):
        raise AssertionError("opened")
    with pytest.raises(FileNotFoundError), open_untrusted(tmp_path / "none"):
        raise AssertionError("opened")


def test_errors_inside_context_name_the_file(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"12345")
    with pytest.raises(OSError, match=r"x cannot be read: \\x1b"), open_untrusted(tmp_path / "x"):
        raise ValueError("\x1b")
    with pytest.raises(OSError, match="has 5 bytes; at most 4 are allowed"), open_untrusted(tmp_path / "x", 4):
        raise AssertionError("opened")


def test_aliases_of_a_hand_written_file_are_followed():
    found = parse_yaml_mapping(b"a: &a {lr: 1.0e-6, when: 2024-01-01}\nb: *a\nc: {<<: *a, lr: 2}")
    assert found == {
        "a": {"lr": 1e-6, "when": "2024-01-01"},
        "b": {"lr": 1e-6, "when": "2024-01-01"},
        "c": {"lr": 2, "when": "2024-01-01"},
    }


def test_metrics_hold_finite_numbers_only(tmp_path: Path):
    lines(f'{{"step": 1, "a": {HUGE}, "b": "x", "c": 1e999, "d": 3}}')(tmp_path / METRICS_FILE)
    assert read_metrics(tmp_path / METRICS_FILE)[0] == {"step": 1, "a": None, "b": None, "c": None, "d": 3}
    assert read_metrics(tmp_path / "none") == []


def test_values_beyond_chart_range_are_none(tmp_path: Path):
    rows = '{"step": 0, "time": 1e300, "reward/mean": -1.7e308}\n{"step": 1, "reward/mean": 0.5}\n'
    text(rows)(tmp_path / METRICS_FILE)
    assert read_metrics(tmp_path / METRICS_FILE)[0]["reward/mean"] == -1.7e308
    columns = RunReader(tmp_path).metrics(99, extra_columns={"reward/p10": {0: 1.7e308, 1: 0.5}})["columns"]
    assert columns["reward/mean"] == [None, 0.5] and columns["reward/p10"] == [None, 0.5]


def test_number_of_curves_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_reader, "MAX_METRICS", 5)
    rows = [{"step": step, "reward/mean": 1.0, f"id/{step}": 1.0} for step in range(20)]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = RunReader(tmp_path).metrics(99)
    assert len(found["columns"]) == 5 and found["columns"]["reward/mean"] == [1.0] * 20


@pytest.mark.defect("wide-line-exhausts-memory")
def test_number_of_values_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_reader, "MAX_VALUES", 100)
    wide = {"step": 0, **{f"metric/{number}": 1.0 for number in range(10)}}
    rows = [wide, *({"step": step} for step in range(1, 1000))]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = RunReader(tmp_path).metrics(99)
    assert found["steps"] == list(range(10)) and found["columns"]["metric/9"] == [1.0, *[None] * 9]


def test_unreadable_vocabulary_shows_token_ids(tmp_path: Path):
    bad = write_synthetic_run(tmp_path / "a", 1, name="a", rollouts=ROWS)
    truncate(vocabulary_file(bad))
    shown = data_of([bad])["rollouts"]["0"][0]["tokens"]
    assert shown["texts"] == [f"<{token}>" for token in shown["ids"]]
