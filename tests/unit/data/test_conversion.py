from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import constants

from skyrl_train.data.conversion import conversion_main, source_rows, text_column, write_split
from skyrl_train.data.dataset import load_prompts
from skyrl_train.errors import DataError
from skyrl_train.storage.hugging_face_hub import hub_responds
from tests.support.web_server import Response, web_server


def convert(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any] | None:
    if row.get("skip"):
        return None
    question = text_column(where, row, "q")
    return {"prompt": [{"role": "user", "content": question}], "extra_info": {"split": split, "index": index}}


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str, **keywords: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["script", *arguments])
    conversion_main(convert, doc="what it does", hub="owner/name", **keywords)


def test_rows_are_converted_left_out_and_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    rows: list[dict[str, Any]] = [{"q": "a"}, {"q": "b", "skip": True}, {"q": "c"}, {"q": "d"}]
    write_lines(tmp_path / "train.jsonl", rows)
    pq.write_table(pa.Table.from_pylist([{"q": "e"}]), tmp_path / "test.parquet")
    call(monkeypatch, "--input", str(tmp_path), "--output", str(tmp_path / "deep" / "out"), "--limit", "2")
    output = capsys.readouterr().out
    assert "train.parquet: 2 rows, 1 left out\n" in output and "validation.parquet: 1 rows\n" in output
    kept = load_prompts([str(tmp_path / "deep" / "out" / "train.parquet")], lambda messages: 1, 10, "chat").prompts
    assert [prompt.messages[0]["content"] for prompt in kept] == ["a", "c"]
    assert [prompt.env_extras["extra_info"]["index"] for prompt in kept] == [0, 2]


def test_source_splits_can_be_renamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_lines(tmp_path / "dev.json", [{"q": "a"}])
    call(monkeypatch, "--input", str(tmp_path), "--output_dir", str(tmp_path), splits={"dev": "only"})
    assert pq.read_table(tmp_path / "only.parquet").to_pylist()[0]["extra_info"] == {"index": 0, "split": "dev"}


def test_invalid_row_ends_script_with_location(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_lines(tmp_path / "train.jsonl", [{"q": "a"}, {"q": " "}])
    with pytest.raises(
        SystemExit, match=r"train.jsonl, line 2: needs text in the column 'q', got ' '; columns: \['q'\]"
    ):
        call(monkeypatch, "--input", str(tmp_path), "--output", str(tmp_path))


@pytest.mark.defect("converted-row-error-lacks-row")
@pytest.mark.parametrize("value", ["a \ud800", {"\ud800": 1}, 2**64, [1, "a"]])
def test_a_row_that_parquet_cannot_hold_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: Any):
    write_lines(tmp_path / "train.jsonl", [{"q": "a"}, {"q": "b"}])

    def keeps(where: str, row: dict[str, Any], split: str, index: int) -> dict[str, Any]:
        return {"prompt": [], "kept": value if row["q"] == "b" else None}

    monkeypatch.setattr(sys, "argv", ["script", "--input", str(tmp_path), "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"train\.jsonl, line 2: parquet cannot store the converted row"):
        conversion_main(keeps, doc="", hub="owner/name", splits={"train": "train"})
    with pytest.raises(DataError, match=r"c\.parquet: "):
        write_split(tmp_path, "c", [{"x": value}])


def test_folder_needs_exactly_one_split_file(tmp_path: Path):
    with pytest.raises(DataError, match=r"needs exactly one of train.parquet, train.json, train.jsonl, has none"):
        source_rows(str(tmp_path), "train")
    (tmp_path / "train.json").write_text("[]")
    (tmp_path / "train.jsonl").write_text("")
    with pytest.raises(DataError, match=r"has train.jsonl, train.json\."):
        source_rows(str(tmp_path), "train")


def test_configuration_and_split_reach_the_hub(monkeypatch: pytest.MonkeyPatch):
    import datasets

    asked: list[tuple[Any, ...]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [{"q": "a"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert list(source_rows("owner/name", "test", "main")) == [("owner/name:test, row 1", {"q": "a"})]
    list(source_rows("owner/name:train[9:]", "test"))
    assert asked == [("owner/name", "main", "test"), ("owner/name", None, "train[9:]")]


@pytest.mark.parametrize("is_offline", [False, True])
def test_unreachable_hub_message_names_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_offline: bool):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", is_offline)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    start = time.monotonic()
    with pytest.raises(SystemExit, match=r"owner/name.* Pass --input FOLDER with train.jsonl, test.jsonl \(or"):
        call(monkeypatch, "--output", str(tmp_path))
    assert time.monotonic() - start < 20  # the hub's client retries for minutes


@pytest.mark.parametrize("status", [401, 404, 503])
def test_error_status_counts_as_response(monkeypatch: pytest.MonkeyPatch, status: int):
    with web_server(lambda request: Response(status=status)) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        assert hub_responds("owner/name")


def test_mixed_columns_raise_and_missing_are_null(tmp_path: Path):
    write_split(tmp_path, "a", [{"x": 1}, {"y": {"z": "b"}}])
    assert pq.read_table(tmp_path / "a.parquet").to_pylist() == [{"x": 1, "y": None}, {"x": None, "y": {"z": "b"}}]
    with pytest.raises(DataError, match=r"b.parquet: .*every row needs the same types"):
        write_split(tmp_path, "b", [{"x": 1}, {"x": "one"}])
