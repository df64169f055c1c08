from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.data.batch import TrainBatch, collate
from skyrl_train.data.trajectory import OK, TrajectoryGroup
from skyrl_train.report.rollout_files import RolloutReader, step_file, write_rollouts
from skyrl_train.report.rollout_views import RolloutViews
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts
from skyrl_train.trainer import rollout_writer
from skyrl_train.trainer.rollout_writer import RolloutWriter
from tests.support.disk_limits import limit_file_size
from tests.support.rollout_examples import CALLED, ODD, assert_rollouts_match_batch, groups_of_all_kinds, scored_batch


def write(writer: RolloutWriter, step: int, groups: list[TrajectoryGroup], batch: TrainBatch) -> None:
    async def take_step() -> None:
        async with writer.writing(step, groups, batch):
            await asyncio.sleep(0)

    asyncio.run(take_step())


def rows_of(run: Path, *steps: int) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = RolloutReader(run).table(steps or None).to_pylist()
    return rows


@pytest.mark.parametrize("chunk_tokens", [1, 1_000_000])
def test_token_values_equal_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_tokens: int):
    monkeypatch.setattr(rollout_writer, "CHUNK_TOKENS", chunk_tokens)
    groups = groups_of_all_kinds(more=3)
    batch = scored_batch(groups)
    write(RolloutWriter(tmp_path), 4, groups, batch)
    uids = [row["uid"] for row in rows_of(tmp_path) for _ in range(1 + len(row["restarts"]))]
    assert_rollouts_match_batch(RolloutReader(tmp_path).table(), batch, uids)


def test_columns_of_a_rollout(tmp_path: Path):
    groups = groups_of_all_kinds()
    write(RolloutWriter(tmp_path), 5, groups, scored_batch(groups, with_reference=False))
    one, two, several, failed, empty = rows_of(tmp_path)
    item = groups[0].trajectories[0]
    assert (one["step"], one["uid"], one["group"], one["sample"]) == (5, "7", 0, 0)
    assert (one["data_source"], one["env_class"], one["temperature"]) == ("made/up", "toy", 0.7)
    assert (one["reward"], one["raw_reward"], one["min_version"], one["max_version"]) == (1.0, 1.5, 3, 4)
    (turn,) = item.turns
    known = {name: getattr(turn, name) for name in one["turns"][0]}
    assert one["turns"] == [known | {"tool_calls": None}] and len(known) == 11
    assert [turn["environment_s"] for turn in two["turns"]] == [0.5, None]
    assert json.loads(two["turns"][0]["tool_calls"]) == [CALLED] and two["turns"][1]["tool_calls"] is None
    assert (one["prompt_tokens"], one["response_tokens"]) == (2, 3)
    assert one["ref_logprobs"] is None
    assert json.loads(one["env_metrics"]) == {"exact": 1.0}
    assert json.loads(one["env_extras"]) == {"answer": "five", "weight": None}
    for row, source in zip((one, two), groups[0].trajectories, strict=True):
        assert json.loads(row["messages"]) == source.messages and row["text"] == source.text
    assert (two["group"], two["sample"], several["group"], several["sample"]) == (0, 1, 1, 0)
    assert (failed["status"], failed["error"], failed["reward"]) == ("failed", "timeout", 0.0)
    assert failed["detail"] == "It took more than a second." and failed["loss_spans"] == []
    assert empty["response_ids"] == [] and json.loads(empty["messages"]) == [ODD]


def test_invalid_text_is_replaced(tmp_path: Path):
    groups = groups_of_all_kinds()
    write(RolloutWriter(tmp_path), 1, groups, scored_batch(groups))
    row = rows_of(tmp_path)[2]
    assert row["uid"] == "a \ufffd\0\x1b[31m"
    assert row["text"] == "half of a pair \ufffd, a NUL \0 and an escape \x1b[31m"
    assert json.loads(row["messages"]) == groups[1].trajectories[0].messages, "JSON keeps the exact text"


@pytest.mark.defect("nested-tool-call-hides-rollouts")
def test_secrets_are_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secret, escaped = "hunter2-hunter2", 'a "password" with \\'
    monkeypatch.setenv("SOME_API_KEY", secret)
    monkeypatch.setenv("SOME_PASSWORD", escaped)
    groups = groups_of_all_kinds()
    item = groups[0].trajectories[0]
    item.text = f"the key is {secret}, he said"
    item.messages[1]["content"] = item.text
    item.messages[1]["tool_calls"] = [{"arguments": {"key": secret}}]
    item.env_metrics[f"used_{secret}"] = 1.0
    deep = "[" * 600 + "]" * 600  # the JSON parser accepts this depth
    arguments = [secret, json.dumps({"key": escaped}), '{"query":  "as it was"}', f'{{"{secret}": {deep}}}']
    calls = tuple({"name": "login", "arguments": text} for text in arguments)
    item.turns[0] = replace(item.turns[0], tool_calls=calls)
    item.prompt.env_extras["login"] = secret
    groups[1].trajectories[1].detail = f"could not log in as {secret}"
    write(RolloutWriter(tmp_path), 1, groups, scored_batch(groups))
    read = json.dumps(rows_of(tmp_path))
    texts = [call["arguments"] for call in json.loads(rows_of(tmp_path)[0]["turns"][0]["tool_calls"])]
    assert texts == ["<SOME_API_KEY>", '{"key": "<SOME_PASSWORD>"}', arguments[2], f'{{"<SOME_API_KEY>": {deep}}}']
    assert secret not in read and read.count("<SOME_API_KEY>") == 9, "env_extras are in the rows of both samples"
    assert item.text.count(secret) == 1, "the run's own data is unchanged"


@pytest.mark.parametrize("known", [True, False])
def test_token_ids_that_spell_a_secret_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool):
    monkeypatch.setenv("SOME_API_KEY", "hunter2-hunter2")
    groups = groups_of_all_kinds()
    item = groups[0].trajectories[0]
    assert (item.prompt_ids.tolist(), item.response_ids.tolist()) == ([5, 6], [7, 8, 2])
    item.text = "hunter2-hunter2."
    item.messages[1]["content"] = item.text
    texts = ["", "", ".", "", "", "It", " is", "hunter2", "-hunter2", ""]
    batch = scored_batch(groups)
    write(RolloutWriter(tmp_path, vocabulary=(lambda: texts) if known else None), 1, groups, batch)
    hidden, *others = rows_of(tmp_path)
    assert hidden["prompt_ids"] == ([5, 6] if known else [-1, -1])
    assert hidden["response_ids"] == ([-1, -1, 2] if known else [-1, -1, -1])
    assert others[0]["response_ids"] == [9, 9, 1, 1, 4] and others[1]["response_ids"] == [7, 8, 9, 3, 2]
    assert batch.input_ids[:5].tolist() == [5, 6, 7, 8, 2], "the run's own data is unchanged"
    tokens = RolloutViews(tmp_path).rollout(1, "7", 0)["tokens"]
    shown = ["It", " is", "<secret>", "<secret>", "."] if known else ["<secret>"] * 5
    assert tokens["texts"] == shown and tokens["ids"] == [*hidden["prompt_ids"], *hidden["response_ids"]]


def test_token_view_hides_what_the_file_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    groups = groups_of_all_kinds()
    texts = ["", "", ".", "", "", "It", " is", "hunter2", "-hunter2", ""]
    write(RolloutWriter(tmp_path, vocabulary=lambda: texts), 1, groups, scored_batch(groups))
    monkeypatch.setenv("SOME_API_KEY", "hunter2-hunter2")
    tokens = RolloutViews(tmp_path).rollout(1, "7", 0)["tokens"]
    assert tokens["texts"] == ["It", " is", "<secret>", "<secret>", "."] and tokens["ids"] == [5, 6, -1, -1, 2]


def test_sessions_are_written_without_secrets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_API_KEY", "sk-0123456789abcdef")
    groups = groups_of_all_kinds()
    call = {
        "parent": None,
        "messages": [{"role": "tool", "content": "key: sk-0123456789abcdef"}],
        "start": 0,
        "stop": 2,
    }
    groups[0].trajectories[0].session = {"calls": [call], "statistics": {"calls": 1}}
    write(RolloutWriter(tmp_path), 5, groups, scored_batch(groups))
    one, two, *_ = rows_of(tmp_path)
    assert json.loads(one["session"])["calls"][0]["messages"][0]["content"] == "key: <MY_API_KEY>"
    assert two["session"] is None and json.loads(one["session"])["statistics"] == {"calls": 1}
    views = RolloutViews(tmp_path)
    details = views.rollout(5, one["uid"], one["sample"], None)
    assert details["session"]["calls"][0]["stop"] == 2


def test_only_first_groups_are_written(tmp_path: Path):
    groups = groups_of_all_kinds(more=2)
    batch = scored_batch(groups)
    write(RolloutWriter(tmp_path / "sample", max_groups=3), 1, groups, batch)
    write(RolloutWriter(tmp_path / "all"), 1, groups, batch)
    write(RolloutWriter(tmp_path / "none", max_groups=0), 1, groups, batch)
    all_rows, sample = rows_of(tmp_path / "all"), rows_of(tmp_path / "sample")
    assert [row["uid"] for row in sample] == ["7"] * 2 + ["a \ufffd\0\x1b[31m"] * 3 + ["plain 0"] * 2
    assert repr(sample) == repr(all_rows[: len(sample)]) and len(all_rows) == 9
    assert not (tmp_path / "none").exists()


def test_completions_without_logprobs(tmp_path: Path):
    groups = groups_of_all_kinds()[:1]
    for item in groups[0].trajectories:
        item.logprobs = item.logprobs[:0]
    write(RolloutWriter(tmp_path), 1, groups, collate(groups))
    assert [row["rollout_logprobs"] for row in rows_of(tmp_path)] == [None, None]
    assert [row["response_ids"] for row in rows_of(tmp_path)] == [[7, 8, 2], [9, 9, 1, 1, 4]]


def test_oldest_steps_are_deleted_above_the_limit(tmp_path: Path):
    groups = groups_of_all_kinds(more=30)
    batch = scored_batch(groups)
    write(RolloutWriter(tmp_path / "one"), 1, groups, batch)
    size = step_file(tmp_path / "one", 1).stat().st_size
    writer = RolloutWriter(tmp_path / "run", max_bytes=3.5 * size, vocabulary=lambda: ["a"])
    for step in range(1, 8):
        write(writer, step, groups, batch)
        files = [*(tmp_path / "run" / "rollouts").iterdir()]
        assert sum(file.stat().st_size for file in files) <= 3.5 * size
    assert RolloutReader(tmp_path / "run").steps() == [5, 6, 7]


def test_resumed_run_keeps_the_same_rollout_files(tmp_path: Path):
    groups = groups_of_all_kinds(more=30)
    batch = scored_batch(groups)
    write(RolloutWriter(tmp_path / "one"), 1, groups, batch)
    max_bytes = 4.5 * step_file(tmp_path / "one", 1).stat().st_size
    for name, attempts in (("straight", [(0, 9)]), ("killed", [(0, 6), (4, 9)])):
        for resumed_at, last in attempts:
            writer = RolloutWriter(tmp_path / name, max_bytes=max_bytes)
            writer.begin(resumed_at)
            for step in range(resumed_at + 1, last + 1):
                write(writer, step, groups, batch)
    files = [
        {file.name: file.read_bytes() for file in (tmp_path / name / "rollouts").iterdir()}
        for name in ("straight", "killed")
    ]
    assert files[0] == files[1] and len(files[0]) == 4


def test_too_large_step_deletes_no_other_file(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    write_rollouts(tmp_path, 1, synthetic_rollouts(4))
    writer = RolloutWriter(tmp_path, max_bytes=step_file(tmp_path, 1).stat().st_size + 10)
    groups = groups_of_all_kinds(more=300)
    for step in (2, 3):
        write(writer, step, groups, scored_batch(groups))
    assert RolloutReader(tmp_path).steps() == [1]
    assert caplog.text.count("more than trainer.keep_rollouts_gb allows") == 1


def test_files_deleted_by_others_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    groups = groups_of_all_kinds()
    writer, steps = RolloutWriter(tmp_path, max_bytes=1e9), RolloutReader.steps
    write(writer, 1, groups, scored_batch(groups))
    monkeypatch.setattr(RolloutReader, "steps", lambda files: [1, *steps(files)])  # lists a file that was just deleted
    step_file(tmp_path, 1).unlink()
    write(writer, 2, groups, scored_batch(groups))
    assert steps(RolloutReader(tmp_path)) == [2] and caplog.text == ""


def test_full_disk_logs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    groups = groups_of_all_kinds(more=30)
    batch, writer = scored_batch(groups), RolloutWriter(tmp_path, vocabulary=lambda: ["a"])
    with limit_file_size(None, 100):
        for step in (1, 2):
            write(writer, step, groups, batch)
    assert caplog.text.count("trainer.keep_rollouts: the rollouts of step 1 were not written") == 1
    assert "step 2" not in caplog.text and not [*(tmp_path / "rollouts").iterdir()]
    write(writer, 3, groups, batch)
    assert RolloutReader(tmp_path).steps() == [3] and RolloutReader(tmp_path).vocabulary() == {0: "a"}


def test_unwritable_messages_do_not_raise(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    groups = groups_of_all_kinds()
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    groups[0].trajectories[0].messages[1]["content"] = deep
    write(RolloutWriter(tmp_path), 1, groups, scored_batch(groups))
    assert "the rollouts of step 1 were not written (RecursionError" in caplog.text
    while deep:  # Python would free it by recursion
        deep = deep[0]


def test_failing_vocabulary_omits_only_token_texts(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def vocabulary() -> list[str]:
        raise KeyError("no such token")

    groups, writer = groups_of_all_kinds(), RolloutWriter(tmp_path, vocabulary=vocabulary)
    for step in (1, 2):
        write(writer, step, groups, scored_batch(groups))
    assert RolloutReader(tmp_path).steps() == [1, 2] and RolloutReader(tmp_path).vocabulary() == {}
    assert caplog.text.count("texts of token ids are unknown (KeyError") == 1


def test_loss_spans_before_correction_are_written(tmp_path: Path):
    groups = groups_of_all_kinds()
    batch = scored_batch(groups)
    write(RolloutWriter(tmp_path), 1, groups, replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)))
    for row, item in zip(rows_of(tmp_path), (item for group in groups for item in group.trajectories), strict=True):
        spans = [(span["start"], span["stop"]) for span in row["scored_spans"]]
        assert spans == (item.loss_spans if item.status == OK else []) and row["loss_spans"] == []


def test_begin_deletes_files_of_later_steps(tmp_path: Path):
    for step in (1, 2, 3):
        write_rollouts(tmp_path, step, synthetic_rollouts(4, step))
    deleted: list[Path] = []
    RolloutWriter(tmp_path, max_groups=0, on_delete=deleted.append).begin(1)
    assert RolloutReader(tmp_path).steps() == [1]
    assert deleted == [step_file(tmp_path, step) for step in (2, 3)]
    RolloutWriter(tmp_path / "new").begin(0)


def test_canceled_step_still_waits_for_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    groups = groups_of_all_kinds()
    batch, writer = scored_batch(groups), RolloutWriter(tmp_path)

    async def take_long_step() -> None:
        async with writer.writing(1, groups, batch):
            await asyncio.sleep(60)

    async def run() -> None:
        task = asyncio.create_task(take_long_step())
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert step_file(tmp_path, 1).exists()

    original = rollout_writer.write_rollouts

    def write_slowly(*arguments: Any) -> Path:
        import time

        time.sleep(0.2)
        return original(*arguments)

    monkeypatch.setattr(rollout_writer, "write_rollouts", write_slowly)
    asyncio.run(run())
