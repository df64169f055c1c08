from __future__ import annotations

import datetime
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given, strategies as st

from skyrl_train.data.chat import render_prompt
from skyrl_train.data.dataset import PromptDataset, PromptOrder, load_prompts
from skyrl_train.data.json_values import MAX_DEPTH, json_default
from skyrl_train.data.messages import Prompt
from skyrl_train.errors import DataError
from skyrl_train.testing.tiny_models import byte_tokenizer


def row(content: str = "6 * 7?", **columns: Any) -> dict[str, Any]:
    spec = {"method": "rule", "ground_truth": "42"}
    return {"prompt": [{"role": "user", "content": content}], "reward_spec": spec} | columns


def write(path: Path, *rows: Any) -> str:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(list(rows)), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(list(rows)))
    else:
        path.write_text("".join(json.dumps(item) + "\n" for item in rows))
    return str(path)


def words(prompt: Prompt) -> int:
    return sum(len(message["content"].split()) for message in prompt.messages)


def load(*sources: str, limit: int = 100) -> PromptDataset:
    return load_prompts(sources, words, limit, "gsm8k")


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
def test_row_becomes_prompt_with_extras(tmp_path: Path, suffix: str):
    rows = [row(env_class="arithmetic", data_source="toy", extra_info={"index": 3}, max_turns=2), row("second?")]
    first, second = load(write(tmp_path / f"data{suffix}", *rows)).prompts
    assert (first.uid, first.env_class, first.data_source) == ("0", "arithmetic", "toy")
    assert first.messages == [{"role": "user", "content": "6 * 7?"}]
    assert first.env_extras == {
        "data_source": "toy",
        "extra_info": {"index": 3},
        "max_turns": 2,
        "reward_spec": {"method": "rule", "ground_truth": "42"},
    }
    assert (second.uid, second.env_class, second.data_source) == ("1", "gsm8k", "unknown")


def test_json_suffix_accepts_json_lines(tmp_path: Path):
    (tmp_path / "data.json").write_text("\ufeff\n" + json.dumps(row("é")) + "\n\n" + json.dumps(row()) + "\n")
    assert [prompt.messages[0]["content"] for prompt in load(str(tmp_path / "data.json")).prompts] == ["é", "6 * 7?"]


def test_missing_message_keys_are_not_null(tmp_path: Path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]}
    messages = [{"role": "user", "content": "hi"}, call]
    path = write(tmp_path / "data.parquet", {"prompt": messages})
    normal = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    assert load_prompts([path], lambda _: 1, 10, "gsm8k")[0].messages == [messages[0], normal]


def test_long_prompts_are_dropped_and_counted(tmp_path: Path):
    first = write(tmp_path / "a.jsonl", row("one"), row("one two three four"), row("one two three"))
    second = write(tmp_path / "b.jsonl", row("one two three four five"), row("one two"))
    dataset = load(first, second, limit=3)
    assert (len(dataset), dataset.too_long) == (3, 2)
    assert [prompt.uid for prompt in dataset.prompts] == ["0", "2", "4"]


@pytest.mark.fault("F08")
def test_only_long_prompts_raise(tmp_path: Path):
    path = write(tmp_path / "data.jsonl", row("one two three"), row("one two three four"))
    with pytest.raises(DataError, match=r"none of 2 prompts has at most 2 tokens \(the shortest has about 3\)"):
        load(path, limit=2)


@pytest.mark.fault("F07")
def test_huge_prompt_is_dropped_without_tokenizing(tmp_path: Path):
    path = write(tmp_path / "data.jsonl", row("fine"), row("x " * (5 * 2**20)))
    tokenizer = byte_tokenizer()
    start = time.process_time()
    dataset = load_prompts(
        [path], lambda prompt: len(tokenizer(prompt.messages[0]["content"])["input_ids"]), 512, "gsm8k"
    )
    assert (len(dataset), dataset.too_long) == (1, 1)
    assert time.process_time() - start < 10.0


@pytest.mark.fault("F07")
@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".json"])
@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        ({"question": "6 * 7?"}, r"has no column 'prompt', only \["),
        ({"prompt": None}, "has no column 'prompt'"),
        ({"prompt": []}, "not a list of messages"),
        ({"prompt": [{"role": "user", "content": None}]}, "content of a user message is null"),
        ({"prompt": [{"role": None, "content": "a"}]}, "not a message"),
        (row(reward_spec={"method": "rule", "ground_truth": None}), "reward_spec has no ground_truth"),
        (row(reward_spec=None), "reward_spec has no ground_truth"),
    ],
)
def test_invalid_row_error_names_location(tmp_path: Path, suffix: str, bad: dict[str, Any], expected: str):
    path = write(tmp_path / f"data{suffix}", row(), row(), bad)
    with pytest.raises(DataError, match=rf"data\{suffix}, (row|line) 3: .*{expected}"):
        load(path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize("turns", [0, -1, 2.5, float("inf"), "3", True])
def test_max_turns_of_row_is_validated(tmp_path: Path, suffix: str, turns: Any):
    path = write(tmp_path / f"data{suffix}", row(max_turns=turns))
    with pytest.raises(DataError, match=rf"data\{suffix}, (row|line) 1: max_turns=.* must be an integer of at least 1"):
        load(path)


@pytest.mark.parametrize("turns", [None, 3, 3.0, float("nan")])
def test_tables_write_such_bounds_as_they_can(tmp_path: Path, turns: Any):
    load(write(tmp_path / "data.parquet", row(max_turns=turns)))


def nested(depth: int) -> list[Any]:
    return [] if depth == 1 else [nested(depth - 1)]


@pytest.mark.defect("bad-rows-found-late")
@pytest.mark.parametrize(
    ("suffix", "bad", "expected"),
    [
        (".parquet", row(image=b"\x89PNG"), "column 'image' holds a value of type bytes"),
        (".parquet", row(extra_info={"pages": [b"one"]}), "column 'extra_info' holds a value of type bytes"),
        (".parquet", {"prompt": [{"role": "user", "content": "a", "image": b"b"}]}, "column 'prompt' holds a value of"),
        (
            ".jsonl",
            row(tree=nested(MAX_DEPTH + 2)),
            f"column 'tree' holds lists or mappings more than {MAX_DEPTH} deep",
        ),
        (".jsonl", {"prompt": nested(900)}, "column 'prompt' holds lists or mappings"),
    ],
)
def test_non_json_row_is_rejected(tmp_path: Path, suffix: str, bad: dict[str, Any], expected: str):
    good = dict.fromkeys(bad) | row()  # a table has the columns of its first row
    path = write(tmp_path / f"data{suffix}", good, good, bad)
    rest = ".*rows hold text, numbers, .*Remove it, or store it as text"
    with pytest.raises(DataError, match=rf"data\{suffix}, (row|line) 3: {expected}{rest}"):
        load(path)


@pytest.mark.defect("bad-rows-found-late")
def test_objects_of_a_dataset_library_are_refused_too(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("datasets.load_dataset", lambda *names, split: [row(), row(image=object())])
    with pytest.raises(DataError, match="squad, row 2: column 'image' holds a value of type object"):
        load("squad")


def test_what_tables_and_json_hold_reaches_environments(tmp_path: Path):
    columns: dict[str, Any] = {
        "time": datetime.datetime(2024, 5, 6, 7),
        "day": datetime.date(2024, 5, 6),
        "span": datetime.timedelta(seconds=3),
        "price": Decimal("1.50"),
        "score": float("nan"),
        "tree": nested(40),
    }
    first, second = load(write(tmp_path / "data.parquet", row(**columns), row(image=None))).prompts
    sent = json.loads(json.dumps(first.env_extras, default=json_default))
    assert (sent["time"], sent["day"], sent["span"], sent["price"]) == (
        "2024-05-06 07:00:00",
        "2024-05-06",
        "0:00:03",
        "1.50",
    )
    assert second.env_extras["tree"] is None


@pytest.mark.defect("parquet-values-unknown-to-python")
@pytest.mark.parametrize(
    "values", [pa.array([0, 10**15], pa.timestamp("s")), pa.array([0, 1], pa.timestamp("s", "Mars"))]
)
def test_unconvertible_table_value_is_named(tmp_path: Path, values: pa.Array):
    path = tmp_path / "data.parquet"
    pq.write_table(pa.Table.from_pylist([row(), row()]).append_column("when", values), path)
    number = 1 if values.type.tz else 2
    with pytest.raises(DataError, match=rf"data\.parquet, row {number}: column 'when' has a value of type timestamp"):
        load(str(path))


@pytest.mark.defect("parquet-values-unknown-to-python")
def test_failing_dataset_row_is_named(monkeypatch: pytest.MonkeyPatch):
    def rows() -> Iterator[dict[str, Any]]:
        yield row()
        raise LookupError("its image cannot be decoded")

    monkeypatch.setattr("datasets.load_dataset", lambda *names, split: rows())
    with pytest.raises(DataError, match="squad, after row 1: LookupError: its image cannot be decoded"):
        load("squad")


def test_surrogate_in_row_is_named(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text('{"prompt": [{"role": "user", "content": "a \\ud800"}]}\n')
    tokenizer = byte_tokenizer()
    with pytest.raises(DataError, match=r"line 1: column 'prompt': half a surrogate pair at character \d+ of the"):
        load_prompts(
            [str(tmp_path / "data.jsonl")], lambda prompt: len(render_prompt(tokenizer, prompt.messages)), 512, "gsm8k"
        )


@pytest.mark.fault("F07")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (b'{"prompt": "\xff\xfe"}', "byte 12 is not UTF-8"),
        (b'{"prompt": ', "not JSON"),
        (b"[1, 2]", "a row must be an object of columns, got list"),
        (b"[" * 200_000, "not JSON"),
        (b'{"prompt": ' + b"7" * 5_000 + b"}", "not JSON: Exceeds the limit"),
        (b'{"prompt": "text"}', "not a list of messages"),
        (b'{"prompt": [{"role": "user", "content": 3}]}', "not a message"),
        (
            b'{"prompt": [{"role": "user", "content": "a"}], "env_class": 3}',
            "env_class is 3; it must be the name of an environment",
        ),
    ],
)
def test_invalid_json_line_is_named(tmp_path: Path, line: bytes, expected: str):
    path = tmp_path / "data.jsonl"
    path.write_bytes(json.dumps(row()).encode() + b"\n\n" + line + b"\n")
    with pytest.raises(DataError, match=rf"data\.jsonl, line 3: .*{expected}"):
        load(str(path))


@pytest.mark.fault("F07")
def test_invalid_utf8_in_parquet_names_the_file(tmp_path: Path):
    binary = pa.array([b"fine", b"\xff\xfe"], type=pa.binary())
    text = pa.StringArray.from_buffers(2, binary.buffers()[1], binary.buffers()[2])
    pq.write_table(pa.table({"prompt": text}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match=r"data\.parquet"):
        load(str(tmp_path / "data.parquet"))


@pytest.mark.fault("F07")
@pytest.mark.parametrize("name", ["data.jsonl", "data.json", "data.parquet"])
def test_an_empty_file_is_an_error(tmp_path: Path, name: str):
    (tmp_path / name).touch()
    with pytest.raises(DataError, match=name.replace(".", r"\.")):
        load(str(tmp_path / name))


def test_a_parquet_file_without_rows_is_an_error(tmp_path: Path):
    pq.write_table(pa.table({"prompt": pa.array([], type=pa.string())}), tmp_path / "data.parquet")
    with pytest.raises(DataError, match="has no rows"):
        load(str(tmp_path / "data.parquet"))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("nowhere/train.parquet", "no such file"),
        ("./not-a-file", "there is no such folder"),
        ("a/b/c", "there is no such folder"),
        ("nobody/nothing:test", "could not be loaded as a dataset with split 'test'"),
    ],
)
def test_a_source_that_is_not_there_is_named(source: str, expected: str):
    with pytest.raises(DataError, match=expected):
        load(source)


def test_no_sources_at_all_are_an_error():
    with pytest.raises(DataError, match="no data files"):
        load()


def test_folder_loads_as_dataset_split(tmp_path: Path):
    write(tmp_path / "train.jsonl", row("one"))
    write(tmp_path / "test.jsonl", row("two"), row("three"))
    assert [p.messages[0]["content"] for p in load(str(tmp_path)).prompts] == ["one"]
    assert [p.messages[0]["content"] for p in load(f"{tmp_path}:test").prompts] == ["two", "three"]


def test_hub_name_loads_with_split(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    asked = []

    def from_hub(name: str, config: str | None, split: str) -> Dataset:
        assert config is None
        asked.append((name, split))
        return Dataset.from_list([row()])

    monkeypatch.setattr("datasets.load_dataset", from_hub)
    monkeypatch.chdir(tmp_path)
    assert len(load("someone/some.data", "someone/some.data:test", "squad")) == 3
    assert asked == [("someone/some.data", "train"), ("someone/some.data", "test"), ("squad", "train")]


def test_token_count_error_names_row(tmp_path: Path):
    def length(prompt: Prompt) -> int:
        raise DataError("roles must alternate")

    path = write(tmp_path / "data.jsonl", row())
    with pytest.raises(DataError, match=r"data\.jsonl, line 1: column 'prompt': roles must alternate"):
        load_prompts([path], length, 10, "gsm8k")


@pytest.mark.fault("F09")
@pytest.mark.parametrize(
    "changed",
    [
        [row("one"), row("three")],
        [row("two"), row("one")],
        [row("one")],
        [row("one"), row("two", reward_spec={"method": "rule", "ground_truth": "43"})],
        [row("one"), row("two", env_class="arithmetic")],
        [row("one two three"), row("one"), row("two")],
    ],
)
def test_changed_dataset_has_another_fingerprint(tmp_path: Path, changed: list[dict[str, Any]]):
    before = load(write(tmp_path / "before.jsonl", row("one"), row("two")), limit=2)
    same = load(write(tmp_path / "moved.parquet", row("one"), row("two")), limit=2)
    assert same.fingerprint == before.fingerprint
    assert load(write(tmp_path / "after.jsonl", *changed), limit=2).fingerprint != before.fingerprint


def test_loading_prompts_imports_no_torch(tmp_path: Path):
    path = write(tmp_path / "data.parquet", row())
    code = (
        "import sys; from skyrl_train.data.dataset import load_prompts; "
        f"print(len(load_prompts([{path!r}], lambda prompt: 1, 9, 'gsm8k')), 'torch' in sys.modules)"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == ["1", "False"]


@given(st.integers(1, 50), st.integers(0, 2**32))
def test_every_epoch_visits_every_row_once(size: int, seed: int):
    order = PromptOrder(size, seed)
    for epoch in range(3):
        assert sorted(order.row(epoch * size + position) for position in range(size)) == list(range(size))


def test_order_depends_on_epoch_and_seed():
    first = [PromptOrder(100, 0).row(index) for index in range(200)]
    assert first[:100] != first[100:]
    assert first == [PromptOrder(100, 0).row(index) for index in range(200)]
    assert first != [PromptOrder(100, 1).row(index) for index in range(200)]


def test_prompt_order_is_pinned_for_checkpoints():
    assert [PromptOrder(10, 42).row(index) for index in range(12)] == [5, 6, 0, 7, 3, 2, 4, 9, 1, 8, 0, 8]


def test_order_of_no_rows_is_refused():
    with pytest.raises(DataError, match="at least one row"):
        PromptOrder(0, 0)
