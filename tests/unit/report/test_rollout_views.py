"""Searches match a plain loop over all rollouts, and rollouts are shown as they were written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from skyrl_train.errors import DataError
from skyrl_train.report import rollout_views
from skyrl_train.report.rollout_files import (
    FOLDER,
    RolloutReader,
    pack_messages,
    step_file,
    write_rollouts,
    write_vocabulary,
)
from skyrl_train.report.rollout_views import ORDERS, Query, RolloutIndex, RolloutViews
from skyrl_train.report.untrusted_files import to_json, to_json_value
from skyrl_train.report.viewer_page import render_page
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts, synthetic_run, synthetic_vocabulary
from tests.support.rollout_examples import sampled_tokens
from tests.support.synthetic_run_folders import ADVERSARIAL_TEXT

STEPS, COUNT = 5, 80


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    write_vocabulary(folder, synthetic_vocabulary())
    for step in range(1, STEPS + 1):
        table = synthetic_rollouts(COUNT, step, mean_tokens=30)
        pairs = zip(table["messages"].to_pylist(), table["text"].to_pylist(), strict=True)
        stored = pa.array([pack_messages(json.loads(messages), text) for messages, text in pairs])  # as a run does
        write_rollouts(folder, step, table.set_column(table.column_names.index("messages"), "messages", stored))
    return folder


@pytest.fixture(scope="module")
def views(run: Path) -> RolloutViews:
    return RolloutViews(run)


@pytest.fixture(scope="module")
def rows(run: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = RolloutReader(run).table().to_pylist()
    return found


def keys(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [(row["step"], row["group"], row["sample"]) for row in rows]


def reward(row: dict[str, Any]) -> float | None:
    return row["reward"] if row["status"] == "ok" else None


def within(value: float | None, minimum: float, maximum: float) -> bool:
    return value is not None and minimum <= value <= maximum


def conversation(row: dict[str, Any]) -> str:
    return "\n".join([row["text"], *(message["content"] for message in json.loads(row["messages"]))]).lower()


FILTERS: dict[str, tuple[dict[str, str], Callable[[dict[str, Any]], bool]]] = {
    "none": ({}, lambda row: True),
    "empty": ({"text": "", "source": "", "step": ""}, lambda row: True),
    "step": ({"step": "3"}, lambda row: row["step"] == 3),
    "steps": ({"step_from": "2", "step_to": "4"}, lambda row: 2 <= row["step"] <= 4),
    "source": ({"source": "math"}, lambda row: row["data_source"] == "math"),
    "no source": ({"source": "mat"}, lambda row: False),
    "failed": ({"status": "failed"}, lambda row: row["status"] == "failed"),
    "cut": ({"stop_reason": "length"}, lambda row: row["stop_reason"] == "length"),
    "rewards": ({"reward_min": "0.25", "reward_max": "0.5"}, lambda row: within(reward(row), 0.25, 0.5)),
    "no reward": ({"reward_max": "0"}, lambda row: within(reward(row), -9, 0)),
    "tokens": ({"tokens_min": "10", "tokens_max": "20"}, lambda row: 10 <= sampled_tokens(row) <= 20),
    "text": ({"text": "bada"}, lambda row: "bada" in conversation(row)),
    "capitals": ({"text": "BaDa"}, lambda row: "bada" in conversation(row)),
    "prompt": ({"text": "4 times 2 is what?"}, lambda row: "4 times 2 is what?" in conversation(row)),
    "names": ({"text": "content"}, lambda row: "content" in conversation(row)),
    "numbers": ({"text": "3 t"}, lambda row: "3 t" in conversation(row)),
    "number": ({"text": "42"}, lambda row: "42" in conversation(row)),
    "references": ({"text": "0, "}, lambda row: "0, " in conversation(row)),
    "pattern": ({"text": ".*"}, lambda row: False),
    "all": (
        {"text": "da", "step_from": "2", "source": "tools", "reward_min": "0.5", "tokens_max": "40", "status": "ok"},
        lambda row: (
            row["step"] >= 2
            and row["data_source"] == "tools"
            and within(reward(row), 0.5, 9)
            and sampled_tokens(row) <= 40
            and "da" in conversation(row)
        ),
    ),
}


EXTREME = ("none", "empty", "no source", "pattern", "names", "references")


@pytest.mark.parametrize("name", FILTERS)
def test_filters_match_a_plain_loop(views: RolloutViews, rows: list[dict[str, Any]], name: str):
    params, matches = FILTERS[name]
    found = views.rollouts(Query.from_params({**params, "limit": "500"}))
    expected = [row for row in rows if matches(row)]
    assert keys(found["rows"]) == keys(expected)
    assert found["total"] == len(expected)
    assert 0 < len(expected) < len(rows) or name in EXTREME


@pytest.mark.parametrize("order", ORDERS)
def test_rollouts_are_sorted_by_the_requested_order(views: RolloutViews, rows: list[dict[str, Any]], order: str):
    found = views.rollouts(Query.from_params({"order": order, "text": "da", "limit": "500"}))["rows"]
    sign, name = (-1 if order[0] == "-" else 1), order.lstrip("-")
    value = {"step": lambda row: row["step"], "reward": reward, "tokens": sampled_tokens}[name]

    def sort_key(row: dict[str, Any]) -> tuple[Any, ...]:
        number = value(row)
        return (number is None, 0 if number is None else sign * number, row["step"], row["group"], row["sample"])

    assert keys(found) == keys(sorted((row for row in rows if "da" in conversation(row)), key=sort_key))


def test_pages_are_slices_with_complete_rows(views: RolloutViews, rows: list[dict[str, Any]]):
    all_rows = views.rollouts(Query(order="-reward", limit=500))["rows"]
    pages = [views.rollouts(Query(order="-reward", limit=70, offset=at))["rows"] for at in range(0, 500, 70)]
    assert [row for page in pages for row in page] == all_rows and len(all_rows) == len(rows)
    by_key = dict(zip(keys(rows), rows, strict=True))
    for row, key in zip(all_rows, keys(all_rows), strict=True):
        saved = by_key[key]
        assert row == {
            **{name: saved[name] for name in ("step", "uid", "group", "sample", "status", "stop_reason")},
            "source": saved["data_source"],
            "reward": reward(saved),
            "tokens": sampled_tokens(saved),
            "turns": len(saved["turns"]),
            "preview": saved["text"][:240],
        }


def test_index_counts_sampled_tokens(tmp_path: Path):
    table = synthetic_rollouts(20)
    turns = table["turns"].to_pylist()
    turns[0][0]["observation_tokens"] = 3
    for step, length in (1, 12), (2, 8):
        part = table.slice(0, length).set_column(
            table.column_names.index("turns"), "turns", pa.array(turns[:length], table["turns"].type)
        )
        write_rollouts(tmp_path, step, part)
    rows: list[dict[str, Any]] = RolloutReader(tmp_path).table().to_pylist()
    index = RolloutIndex(tmp_path)
    index.refresh()
    assert index.table["tokens"].to_pylist() == [sampled_tokens(row) for row in rows]
    observed = [row["response_tokens"] - sampled_tokens(row) for row in rows]
    assert observed == [*([3] + [0] * 8 + [1] + [0] * 2), *([3] + [0] * 7)]


def test_page_of_many_steps_reads_texts_in_blocks(
    run: Path, rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(rollout_views, "BLOCK_BYTES", 1)
    monkeypatch.setattr(rollout_views, "TEXT_CACHE_BYTES", 0)
    views = RolloutViews(run)
    read: list[list[int]] = []
    texts_of = views.index._texts_of

    def recorded_texts_of(steps: list[int]) -> Any:
        read.append(steps)
        return texts_of(steps)

    monkeypatch.setattr(views.index, "_texts_of", recorded_texts_of)
    page = views.rollouts(Query(order="-tokens", limit=200))["rows"]
    texts = {(row["step"], row["group"], row["sample"]): row["text"] for row in rows}
    assert [row["preview"] for row in page] == [texts[key][:240] for key in keys(page)]
    assert read == [[step] for step in range(1, STEPS + 1)] and not views.index._texts


def test_facets_ignore_filters(views: RolloutViews):
    assert views.rollouts(Query(step=1, text="nowhere"))["facets"] == {
        "steps": [1, 2, 3, 4, 5],
        "sources": ["gsm8k", "math", "tools"],
        "statuses": ["failed", "ok"],
        "stop_reasons": ["length", "stop"],
    }


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"limit": "501"}, "limit=501 must be from 1 to 500"),
        ({"limit": "0"}, "limit=0 must be from 1"),
        ({"offset": "-1"}, "offset=-1 must be at least 0"),
        ({"step": "two"}, "step='two' is not an integer"),
        ({"step": "9" * 30}, "step=9+ is out of range"),
        ({"reward_min": "nan"}, "reward_min='nan' is not a number"),
        ({"order": "uid"}, "order='uid' is not one of step, -step"),
        ({"folder": "/etc"}, "'folder' is not a parameter of rollouts"),
        ({"text": "a" * 1001}, "text has 1001 characters"),
    ],
)
def test_invalid_query_is_refused_by_name(params: dict[str, str], message: str):
    with pytest.raises(DataError, match=message):
        Query.from_params(params)


# -- one rollout, one prompt -------------------------------------------------------------------------------------------


def test_rollout_details_have_all_saved_values(run: Path, views: RolloutViews, rows: list[dict[str, Any]]):
    texts = RolloutReader(run).vocabulary()
    for row in rows[::9]:
        shown = json.loads(to_json(views.rollout(row["step"], row["uid"], row["sample"])))
        for name in ("step", "uid", "group", "sample", "env_class", "error", "detail", "temperature", "max_version"):
            assert shown[name] == row[name]
        assert shown["reward"] == reward(row) and shown["source"] == row["data_source"]
        assert shown["messages"] == json.loads(row["messages"])
        calls = [json.loads(turn["tool_calls"] or "[]") for turn in row["turns"]]
        assert shown["turns"] == [
            turn | {"tool_calls": turn_calls} for turn, turn_calls in zip(row["turns"], calls, strict=True)
        ]
        assert shown["env_metrics"] == json.loads(row["env_metrics"])
        tokens, prompt = shown["tokens"], len(row["prompt_ids"])
        assert tokens["ids"] == row["prompt_ids"] + row["response_ids"] and tokens["prompt"] == prompt
        assert tokens["texts"] == [texts[token] for token in tokens["ids"]]
        assert tokens["trained"] == [False] * prompt + row["trained"]
        for name, column in (("old_logprobs", "old_logprobs"), ("advantages", "advantages")):
            assert tokens[name][:prompt] == [None] * prompt
            assert np.array_equal(np.float32(tokens[name][prompt:]), np.float32(row[column]))  # bitwise
        assert tokens["ref_logprobs"] == [None] * len(tokens["ids"])
        sampled = [
            any(turn["start"] <= at < turn["stop"] for turn in row["turns"]) for at in range(len(row["trained"]))
        ]
        expected = [
            value if was_sampled else None for value, was_sampled in zip(row["rollout_logprobs"], sampled, strict=True)
        ]
        assert [None if value is None else np.float32(value) for value in tokens["logprobs"][prompt:]] == expected
    assert not all(sampled for row in rows for sampled in row["trained"])


def test_group_has_prompt_and_all_samples(views: RolloutViews, rows: list[dict[str, Any]]):
    found = views.group(2, rows[COUNT]["uid"])
    assert [row["sample"] for row in found["rows"]] == list(range(8))
    assert {row["uid"] for row in found["rows"]} == {rows[COUNT]["uid"]}
    assert found["prompt"] == json.loads(rows[COUNT]["messages"])[:1]


def test_repeated_prompts_are_distinguished_by_group(tmp_path: Path):
    table = synthetic_rollouts(16)
    table = table.set_column(table.column_names.index("uid"), "uid", pa.array(["7"] * 16))
    write_rollouts(tmp_path, 1, table)
    views = RolloutViews(tmp_path)
    assert len(views.group(1, "7")["rows"]) == 16
    assert {row["group"] for row in views.group(1, "7", 1)["rows"]} == {1}
    assert views.rollout(1, "7", 3, 1)["messages"] == json.loads(table["messages"][11].as_py())


@pytest.mark.parametrize("key", [(9, "1000", 0), (1, "../..", 0), (1, "1000", 99)])
def test_missing_rollouts_are_reported(views: RolloutViews, key: tuple[int, str, int]):
    with pytest.raises(DataError, match=f"step {key[0]} has no sample"):
        views.rollout(*key)
    with pytest.raises(DataError, match="has no rollouts of the prompt"):
        views.group(9, key[1])


def test_rollouts_are_shown_without_a_vocabulary(tmp_path: Path):
    write_rollouts(tmp_path, 1, synthetic_rollouts(1))
    row = RolloutReader(tmp_path).table().to_pylist()[0]
    assert RolloutViews(tmp_path).rollout(1, row["uid"], 0)["tokens"]["texts"][0] == f"<{row['prompt_ids'][0]}>"


# -- an active run -----------------------------------------------------------------------------------------------------


def test_refresh_follows_added_changed_and_deleted_steps(tmp_path: Path, run: Path):
    views = RolloutViews(tmp_path)
    assert views.rollouts(Query())["total"] == 0
    shutil.copytree(run / FOLDER, tmp_path / FOLDER)
    assert views.rollouts(Query(text="bada"))["total"] > 0
    write_rollouts(tmp_path, 6, synthetic_rollouts(8, 6))
    found = views.rollouts(Query(step_from=5, limit=500))
    assert found["total"] == COUNT + 8 and found["facets"]["steps"][-1] == 6
    before = views.rollouts(Query(step=5, text="bada"))
    write_rollouts(tmp_path, 5, synthetic_rollouts(24, 5, adversarial_texts=["a bada more"]))
    after = views.rollouts(Query(step=5, text="bada"))
    assert views.rollouts(Query(step=5))["total"] == 24
    assert keys(after["rows"]) != keys(before["rows"]) and (5, 0, 0) in keys(after["rows"])
    step_file(tmp_path, 1).unlink()
    assert views.rollouts(Query(step=1))["total"] == 0
    assert views.rollouts(Query(text="bada", limit=500))["facets"]["steps"] == [2, 3, 4, 5, 6]


def test_read_ahead_stops_at_its_limit(run: Path, monkeypatch: pytest.MonkeyPatch):
    views = RolloutViews(run)
    assert not views.index.read_ahead()  # before the first refresh
    views.index.refresh()
    assert views.index.read_ahead() and not views.index.read_ahead()
    read = []
    monkeypatch.setattr(RolloutReader, "conversations", lambda self, step: read.append(step))
    assert views.rollouts(Query(text="bada"))["total"] > 0 and read == []
    monkeypatch.undo()
    monkeypatch.setattr(rollout_views, "READ_AHEAD_BYTES", 1)
    monkeypatch.setattr(rollout_views, "BLOCK_BYTES", 1)
    limited = RolloutViews(run)
    limited.index.refresh()
    assert limited.index.read_ahead() and not limited.index.read_ahead()
    assert limited.rollouts(Query(text="bada", limit=500)) == views.rollouts(Query(text="bada", limit=500))


def test_incomplete_file_is_ignored_until_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    for step in (1, 2, 3):
        write_rollouts(tmp_path, step, synthetic_rollouts(8, step))
    file = step_file(tmp_path, 2)
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    views = RolloutViews(tmp_path)
    found = views.rollouts(Query(text="is what?"))
    assert (found["total"], found["facets"]["steps"]) == (16, [1, 3])
    assert "rollouts of step 2 cannot be read" in caplog.text and "step_00000002.parquet" in caplog.text
    file.write_bytes(whole)
    assert views.rollouts(Query(text="is what?"))["total"] == 24


# -- what models write -------------------------------------------------------------------------------------------------


def test_hostile_texts_are_found_and_unchanged(tmp_path: Path):
    write_rollouts(
        tmp_path, 1, synthetic_rollouts(len(ADVERSARIAL_TEXT), samples_per_prompt=1, adversarial_texts=ADVERSARIAL_TEXT)
    )
    views, table = RolloutViews(tmp_path), RolloutReader(tmp_path).table(columns=["text", "uid"]).to_pylist()
    for index, text in enumerate(ADVERSARIAL_TEXT):
        if not any("\ud800" <= sign <= "\udfff" for sign in text):
            assert text in table[index]["text"]
            assert [row["sample"] for row in views.rollouts(Query(text=text))["rows"]] == [0], text
            assert views.rollouts(Query(text=text))["rows"][0]["uid"] == table[index]["uid"]
        shown = json.loads(to_json(views.rollout(1, table[index]["uid"], 0)))
        assert shown["text"] == table[index]["text"]


def test_json_is_valid_for_browsers():
    value = {"a": ["\ud800x", "x\udfff", "\ud83d\ude00", "😀", "\udc00\ud800"], "n": [float("nan"), float("-inf"), 1.5]}
    assert to_json_value(value) == {"a": ["�x", "x�", "😀", "😀", "��"], "n": [None, None, 1.5]}
    to_json(value).encode("utf-8")


def test_rewards_have_quantiles_by_step(tmp_path: Path, run: Path, views: RolloutViews, rows: list[dict[str, Any]]):
    views.index.refresh()
    assert list(views.index.quantiles) == ["reward/p10", "reward/p25", "reward/p75", "reward/p90"]
    for step in range(1, STEPS + 1):
        rewards = [value for row in rows if row["step"] == step and (value := reward(row)) is not None]
        for name, column in views.index.quantiles.items():
            percent = int(name.removeprefix("reward/p"))
            assert column[step] == pytest.approx(np.percentile(rewards, percent))
    assert RolloutViews(tmp_path).index.quantiles == {}


def test_two_distinct_rewards_have_no_quantiles(tmp_path: Path):
    index = RolloutIndex(tmp_path)
    graded = synthetic_rollouts(64)
    place, binary = graded.column_names.index("reward"), pc.cast(pc.greater(graded["reward"], 0.5), pa.float64())
    write_rollouts(tmp_path, 1, graded.set_column(place, "reward", binary))
    index.refresh()
    assert index.quantiles == {}
    write_rollouts(tmp_path, 2, synthetic_rollouts(64, 2))
    index.refresh()
    assert {*index.quantiles["reward/p25"]} == {1, 2}
    step_file(tmp_path, 2).unlink()
    index.refresh()
    assert index.quantiles == {}
    index.close()


@pytest.mark.on_demand
@pytest.mark.slow
def test_server_is_fast_with_100000_rollouts(tmp_path: Path):
    """The run has 1,563 files with 64 rollouts each. It opens in 3 s, and filters take 1 s.

    Texts are searched 5 s after the page was opened, when they are cached. Before that, a search takes 1 to 2 s.
    """
    synthetic_run(tmp_path, 1563, 64)
    (tmp_path / "metrics.jsonl").touch()
    render_page()  # builds the page before the measurement
    command = [sys.executable, "-m", "skyrl_train.entrypoints.watch", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            address = next(line.strip() for line in process.stdout if "access_token=" in line)
            server, _, token = address.partition("/#access_token=")
            limits = {"": 3.0} | dict.fromkeys(QUERIES, 1.0)
            for query, max_s in limits.items():
                if query == QUERIES[2]:
                    time.sleep(5)
                request = Request(f"{server}/api/rollouts?run=0&{query}", headers={"Authorization": f"Bearer {token}"})
                begun = time.perf_counter()
                with urlopen(request, timeout=60) as answer:
                    found = json.load(answer)["total"]
                elapsed_s = time.perf_counter() - begun
                assert elapsed_s <= max_s, (query, elapsed_s)
                assert (found == 100_032) == (query == "") and (found > 0) == ("nowhere" not in query)
        finally:
            process.terminate()


QUERIES = (
    "source=math&reward_min=0.5&order=-tokens",
    "step_from=20&step_to=400&stop_reason=length",
    "text=kiba",
    "text=nowhere&order=-reward",
    "text=bada&tokens_min=100",
)


@pytest.mark.on_demand
@pytest.mark.slow
def test_index_is_fast_with_100000_rollouts(tmp_path: Path):
    """The index opens in 3 s and filters in 1 s. An otherwise idle machine needs a tenth of that."""
    synthetic_run(tmp_path, 100, 1000)
    views = RolloutViews(tmp_path)
    begun = time.perf_counter()
    assert views.rollouts(Query())["total"] == 100_000
    assert time.perf_counter() - begun <= 3
    for query in (
        Query(text="kiba"),
        Query(text="nowhere", order="-reward"),
        Query(source="math", reward_min=0.5, order="-tokens"),
        Query(step_from=20, step_to=40, stop_reason="length"),
        Query(text="bada", tokens_min=100),
    ):
        begun = time.perf_counter()
        views.rollouts(query)
        assert time.perf_counter() - begun <= 1, query
