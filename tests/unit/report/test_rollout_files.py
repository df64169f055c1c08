from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from skyrl_train.report.rollout_files import (
    COLUMNS,
    RolloutReader,
    dump_json,
    pack_messages,
    step_file,
    write_rollouts,
    write_vocabulary,
)
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts, synthetic_run
from tests.support.disk_limits import limit_file_size


def assert_same(first: pa.Table, second: pa.Table) -> None:
    """Assert that two tables are equal bitwise, including NaN."""
    assert first.schema.names == second.schema.names and len(first) == len(second)
    for name in first.schema.names:
        left, right = first[name].combine_chunks(), second[name].combine_chunks()
        if pa.types.is_list(left.type) and left.type.value_type == pa.float32():
            assert left.is_null().equals(right.is_null()), name
            bits = [lists.flatten().to_numpy(zero_copy_only=False).view(np.int32) for lists in (left, right)]
            assert np.array_equal(*bits), name
            left, right = pc.list_value_length(left), pc.list_value_length(right)
        assert left.equals(right), name


def test_rollouts_round_trip_bitwise(tmp_path: Path):
    table = synthetic_rollouts(40, 3, adversarial_texts=["<script>alert(1)</script>", "a NUL \0", "half a pair \ud83d"])
    odd = np.array([float("nan"), -0.0, float("inf"), -float("inf"), 1e-45, 0.0, -1.0, -3.4e38], np.float32)
    for shift, name in enumerate(("rollout_logprobs", "old_logprobs", "ref_logprobs")):
        lists = table["response_ids"].combine_chunks()
        values = pa.array(np.resize(np.roll(odd, shift), len(lists.flatten())))
        column = pa.ListArray.from_arrays(lists.offsets, values)
        index = table.column_names.index(name) if name in table.column_names else len(table.column_names)
        table = table.remove_column(index) if name in table.column_names else table
        table = table.add_column(index, name, column)
    write_rollouts(tmp_path, 3, table)
    found = RolloutReader(tmp_path).table()
    assert found.schema.equals(COLUMNS)
    assert_same(found.select(table.column_names), table)
    assert "old_logprobs_from_rollout" in pq.read_schema(step_file(tmp_path, 3)).names


def test_unpaired_logprobs_are_stored_unchanged(tmp_path: Path):
    table = synthetic_rollouts(8).drop_columns(["rollout_logprobs", "advantages"])
    write_rollouts(tmp_path, 1, table)
    found = RolloutReader(tmp_path).table()
    assert_same(found.select(table.column_names), table)
    assert found["rollout_logprobs"].null_count == found["advantages"].null_count == 8


def test_step_can_be_written_as_several_tables(tmp_path: Path):
    table = synthetic_rollouts(30)
    write_rollouts(tmp_path, 1, [table.slice(0, 11), table.slice(11)])
    assert_same(RolloutReader(tmp_path).table(columns=table.column_names), table)
    assert pq.ParquetFile(step_file(tmp_path, 1)).num_row_groups == 2


def test_trained_mask_follows_from_spans(tmp_path: Path):
    write_rollouts(tmp_path, 1, synthetic_rollouts(60))
    for row in RolloutReader(tmp_path).table(columns=["loss_spans", "trained", "response_tokens"]).to_pylist():
        mask = [
            any(span["start"] <= n < span["stop"] for span in row["loss_spans"]) for n in range(row["response_tokens"])
        ]
        assert row["trained"] == mask


def test_steps_columns_and_filters(tmp_path: Path):
    synthetic_run(tmp_path, 4, 20)
    files = RolloutReader(tmp_path)
    assert files.steps() == [1, 2, 3, 4]
    assert files.table([4, 2], ["step", "uid"])["step"].unique().to_pylist() == [4, 2]
    filtered = files.table(
        columns=["old_logprobs", "messages"], filter=(pc.field("reward") > 0.5) & (pc.field("step") != 3)
    )
    expected = files.table().filter((pc.field("reward") > 0.5) & (pc.field("step") != 3))
    assert 0 < len(filtered) < 60
    assert_same(filtered, expected.select(["old_logprobs", "messages"]))
    assert files.vocabulary()[0] == "<end>" and len(files.vocabulary()) == 4096
    with pytest.raises(ValueError, match=r"columns=\['rewards'\]: not columns of rollouts\. Choose from step, uid, "):
        files.table(columns=["rewards"])


def test_deleted_steps_and_missing_folder_are_empty(tmp_path: Path):
    synthetic_run(tmp_path, 2, 4)
    files = RolloutReader(tmp_path)
    step_file(tmp_path, 1).unlink()
    assert files.table([1, 2])["step"].unique().to_pylist() == [2]
    nothing = RolloutReader(tmp_path / "elsewhere")
    assert nothing.steps() == [] and nothing.vocabulary() == {}
    assert nothing.table().schema.equals(COLUMNS)


def test_files_with_fewer_columns_are_read(tmp_path: Path):
    table = synthetic_rollouts(4).select(["uid", "text"])
    step_file(tmp_path, 9).parent.mkdir()
    pq.write_table(table, step_file(tmp_path, 9))
    found = RolloutReader(tmp_path).table(columns=["uid", "ref_logprobs"])
    assert found["uid"].equals(table["uid"]) and found["ref_logprobs"].null_count == 4


NEW_TURN_FIELDS = ("environment_s", "tool_calls", "observation_tokens")
"""Fields of turns that files of earlier versions lack."""


def test_turns_of_older_and_newer_versions_are_read(tmp_path: Path):
    turn_type = COLUMNS.field("turns").type.value_type
    older = pa.list_(pa.struct([field for field in turn_type if field.name not in NEW_TURN_FIELDS]))
    table = synthetic_rollouts(20)
    step_file(tmp_path, 9).parent.mkdir()
    old = table.set_column(table.column_names.index("turns"), "turns", table["turns"].cast(older))
    pq.write_table(old, step_file(tmp_path, 9))
    for turns, read in zip(
        table["turns"].to_pylist(), RolloutReader(tmp_path).table(columns=["turns"])["turns"].to_pylist(), strict=True
    ):
        assert read == [turn | dict.fromkeys(NEW_TURN_FIELDS) for turn in turns]
    newer = pa.list_(pa.struct([*turn_type, pa.field("more", pa.int32())]))
    pq.write_table(table.set_column(table.column_names.index("turns"), "turns", table["turns"].cast(newer)),
                   step_file(tmp_path, 9))  # fmt: skip
    assert RolloutReader(tmp_path).table(columns=["turns"])["turns"].equals(table["turns"])


def test_unknown_columns_are_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="'rewards'"):
        write_rollouts(tmp_path, 1, pa.table({"rewards": [1.0]}))
    assert RolloutReader(tmp_path).steps() == []


def test_full_disk_leaves_the_previous_file(tmp_path: Path):
    write_rollouts(tmp_path, 1, synthetic_rollouts(4))
    before = step_file(tmp_path, 1).read_bytes()
    with limit_file_size(None, 1000), pytest.raises(OSError, match="File too large"):
        write_rollouts(tmp_path, 1, synthetic_rollouts(40))
    assert [path.read_bytes() for path in step_file(tmp_path, 1).parent.iterdir()] == [before]


def test_messages_are_stored_as_references_and_restored(tmp_path: Path):
    text = "assistant: the first long answer\ntool: what it returned, at length\nassistant: yes"
    messages = [
        {"role": "user", "content": "the first long question"},
        {"role": "assistant", "content": "the first long answer", "tool_calls": []},
        {"role": "tool", "content": "what it returned, at length"},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": [{"type": "text", "text": "a part"}]},
    ]
    stored = pack_messages(messages, text, [dump_json(messages[0])])
    assert "the first long answer" not in stored and "at length" not in stored
    write_rollouts(tmp_path, 1, pa.table({"messages": [stored, dump_json(messages), None], "text": [text, text, text]}))
    found = RolloutReader(tmp_path).table(columns=["messages"])["messages"].to_pylist()
    assert found == [dump_json(messages), dump_json(messages), None]


def test_dump_json_accepts_unusual_values():
    class Odd:
        def __str__(self) -> str:
            return "odd"

    assert dump_json({"a": [float("nan"), np.float32(0.5), Odd()], "b": "é\ud83d"}) == (
        '{"a": [null, 0.5, "odd"], "b": "\\u00e9\\ud83d"}'
    )
    assert dump_json("é") == '"é"'


def test_vocabulary_holds_any_text(tmp_path: Path):
    write_vocabulary(tmp_path, ["a", "\0", "<0xE2>"])
    assert RolloutReader(tmp_path).vocabulary() == {0: "a", 1: "\0", 2: "<0xE2>"}
