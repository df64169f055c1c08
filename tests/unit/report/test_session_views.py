"""The calls of a session are written, read and prepared for pages, whatever a file holds."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from skyrl_train.report import rollout_files
from skyrl_train.report.rollout_files import COLUMNS, RolloutReader, pack_session, write_rollouts
from skyrl_train.report.rollout_views import RolloutViews
from skyrl_train.report.session_views import session_view
from skyrl_train.report.untrusted_files import to_json
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts
from tests.support.session_rollouts import ADVANTAGE, REASONING, session_group, write_session_rollouts

SECRET = "0123456789-secret"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOOL_API_KEY", SECRET)
        write_session_rollouts(folder, 1, [session_group(f"the key is {SECRET}")])
    return folder


def shown(run: Path, sample: int) -> dict[str, Any]:
    details: dict[str, Any] = json.loads(to_json(RolloutViews(run).rollout(1, "7", sample)))
    return details


def test_calls_are_shown_with_their_tokens(run: Path):
    details = shown(run, 0)
    calls, tokens = details["session"]["calls"], details["tokens"]
    assert [(call["previous"], call["parent"]) for call in calls] == [
        (None, None), (0, 0), (1, 1), (1, 1), (None, None), (4, 4)
    ]  # fmt: skip
    assert details["session"]["statistics"] == {
        "calls": 6,
        "branches": 1,
        "retokenized_messages": 0,
        "sampled_tokens": sum(call["stop"] - call["start"] for call in calls),
        "read_tokens": details["session"]["statistics"]["read_tokens"],
        "malformed_calls": 1,
        "overridden_parameters": 0,
    }
    for call in calls:
        span = slice(tokens["prompt"] + call["start"], tokens["prompt"] + call["stop"])
        assert call["trained_tokens"] == sum(tokens["trained"][span]) == call["stop"] - call["start"] > 0
        assert call["advantage"] == [ADVANTAGE, ADVANTAGE]
    first, second, *parallel, malformed, last = calls
    assert first["reasoning"] == REASONING and first["tool_calls"][0]["arguments"] == {"a": 1, "b": 2.0}
    assert second["messages"][0]["tool_call_id"] == first["tool_calls"][0]["id"]
    assert {call["content"] for call in parallel} == {"The left one.", "The right one."}
    assert "not valid JSON" in malformed["errors"][0]
    text = "".join(tokens["texts"][tokens["prompt"] + last["start"] : tokens["prompt"] + last["stop"]])
    assert text == f"{last['content']}<|im_end|>"


def test_failed_session_is_not_in_loss(run: Path):
    details = shown(run, 1)
    (call,) = details["session"]["calls"]
    assert details["error"] == "agent_crashed" and "stderr" in details["detail"]
    assert call["trained_tokens"] == 0 and call["advantage"] is None
    assert shown(run, 2)["session"]["calls"] == []


def test_secret_in_tool_result_is_redacted(run: Path):
    (stored, *_) = RolloutReader(run).table([1], ["session"])["session"].to_pylist()
    assert SECRET not in stored and "the key is <TOOL_API_KEY>" in stored
    assert SECRET not in json.dumps(shown(run, 0))


@pytest.mark.parametrize(("num_messages", "num_chars"), [(3, 30_000), (300, 200)])
def test_huge_session_is_shortened(monkeypatch: pytest.MonkeyPatch, num_messages: int, num_chars: int):
    monkeypatch.setattr(rollout_files, "MAX_SESSION_CHARS", 200_000)
    call = {"previous": None, "messages": [{"role": "user", "content": f"begin {'x' * num_chars} end"}] * num_messages}
    text = pack_session({"calls": [{**call, "start": index} for index in range(20)], "statistics": {"calls": 20}})
    record = json.loads(text)
    assert len(text) <= 200_000 and record["statistics"] == {"calls": 20}
    assert [one["start"] for one in record["calls"]] == [*range(20)]
    (shortened, *others) = record["calls"][0]["messages"]
    if num_messages == 3:
        assert len(others) == 2 and re.fullmatch(
            r"begin x+\n\[\.\.\. [\d,]+ characters are left out \.\.\.\]\nx+ end", shortened["content"]
        )
    else:
        assert not others and shortened["content"] == "[... 300 messages are left out ...]"


def test_rollouts_without_session_have_none(tmp_path: Path):
    table = synthetic_rollouts(2)
    assert "session" not in table.column_names
    write_rollouts(tmp_path, 1, table)
    assert RolloutViews(tmp_path).rollout(1, table["uid"][0].as_py(), 0)["session"] is None


DAMAGED: dict[str, Any] = {
    "no object": [1],
    "no calls": {"calls": 3, "statistics": []},
    "calls of other types": {"calls": [None, "a", 2.5, []]},
    "cycle": {"calls": [{"previous": 1, "parent": 0}, {"previous": 0, "parent": 1}]},
    "fields of other types": {
        "calls": [{"previous": True, "parent": "0", "messages": {"a": 1}, "answer": [], "stop_reason": {"a": []}}],
        "statistics": {"calls": "many", "branches": -1, "x": 1e300},
    },
    "answer of other types": {
        "calls": [{"answer": {"content": {"a": 1}, "reasoning": 7, "tool_calls": "f()", "errors": [{}, None]}}]
    },
    "spans": {
        "calls": [{"start": start, "stop": stop} for start, stop in ((0, 10**12), (2, 1), (-5, 2), ("0", 3), (0, 3))]
    },
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_record_is_shown_safely(name: str):
    view = session_view(DAMAGED[name], [True, False, True], [1.0, None, float("nan")])
    if name == "no object":
        assert view is None
        return
    assert view is not None and json.loads(to_json(view))
    assert all(type(value) is int and value >= 0 for value in view["statistics"].values())
    for number, call in enumerate(view["calls"]):
        for reference in (call["previous"], call["parent"]):
            assert reference is None or 0 <= reference < number
        assert 0 <= call["start"] <= call["stop"] <= 3
        texts = [call["content"], call["reasoning"], call["stop_reason"], *call["errors"]]
        assert all(isinstance(text, str) for text in texts)
        lists = call["messages"] + call["tool_calls"]
        assert all(isinstance(item, dict) for item in lists)
    spans = [call["stop"] - call["start"] for call in view["calls"]]
    assert sum(spans) <= 3 and (name != "spans" or spans[0] == 3)


def test_unreadable_json_shows_no_session(tmp_path: Path):
    table = synthetic_rollouts(3)
    texts = ["{", "[" * 5000 + "]" * 5000, "null"]
    table = table.append_column(COLUMNS.field("session"), pa.array(texts))
    write_rollouts(tmp_path, 1, table)
    views, uid = RolloutViews(tmp_path), table["uid"][0].as_py()
    assert [views.rollout(1, uid, sample)["session"] for sample in range(3)] == [None] * 3
