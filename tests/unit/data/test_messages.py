from __future__ import annotations

import json
from typing import Any

import pytest

from skyrl_train.data.messages import append_assistant_text, get_chat_template_kwargs, parse_messages, parse_tools
from skyrl_train.errors import DataError

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def parts(*texts: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def test_text_parts_become_one_text():
    row = [{"role": "user", "content": [*parts("What is ", "2 + 2?"), {"text": "!", "image": None}]}]
    assert parse_messages("row 1", "prompt", row) == [{"role": "user", "content": "What is 2 + 2?!"}]


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ({"type": "image", "image": "a.png"}, "a part of type 'image'"),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, "a part of type 'image_url'"),
        ({"type": "text", "text": None}, "a part of type 'text'"),
        (3, "a value of type int"),
    ],
)
def test_other_parts_are_refused_with_their_field(part: Any, expected: str):
    row = [{"role": "user", "content": "hi"}, {"role": "user", "content": [*parts("look"), part]}]
    with pytest.raises(
        DataError, match=rf"^a\.jsonl, line 3: prompt\[1\]\.content\[1\] is {expected}; only text parts"
    ):
        parse_messages("a.jsonl, line 3", "prompt", row)


def test_tool_calls_get_empty_content_and_mappings():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": null}'}}
    (message,) = parse_messages("row 1", "messages", [{"role": "assistant", "content": None, "tool_calls": [call]}])
    assert message["content"] == ""
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": None}


@pytest.mark.parametrize("calls", ["add()", [{"arguments": {}}], [3]])
def test_tool_calls_of_another_form_are_refused(calls: Any):
    with pytest.raises(DataError, match=r"row 1: messages\[0\]\.tool_calls"):
        parse_messages("row 1", "messages", [{"role": "assistant", "content": "", "tool_calls": calls}])


@pytest.mark.parametrize("calls", [None, []])
def test_null_content_without_calls_is_refused(calls: Any):
    with pytest.raises(DataError, match=r"row 1: messages\[0\]: the content of a assistant message is null"):
        parse_messages("row 1", "messages", [{"role": "assistant", "content": None, "tool_calls": calls}])


@pytest.mark.parametrize("value", [[TOOL], json.dumps([TOOL])])
def test_tools_may_be_json_text(value: Any):
    assert parse_tools("row 1", value) == [TOOL]
    assert get_chat_template_kwargs({"tools": value}, {"x": 1}) == {"x": 1, "tools": [TOOL]}


@pytest.mark.parametrize("value", [None, [], "[]"])
def test_rows_without_tools_add_none(value: Any):
    assert parse_tools("row 1", value) is None
    assert get_chat_template_kwargs({"tools": value}, {"x": 1}) == {"x": 1}


@pytest.mark.parametrize("value", [["add"], "add", {"add": {}}, [{"type": "function"}]])
def test_other_tools_columns_raise_or_are_ignored(value: Any):
    with pytest.raises(DataError, match=r"row 1: tools is .*not a list of definitions"):
        parse_tools("row 1", value)
    assert get_chat_template_kwargs({"tools": value}, {}) == {}


def test_answer_continues_last_assistant_message():
    question = {"role": "user", "content": "?"}
    partial = {"role": "assistant", "content": "The answer"}
    assert append_assistant_text([question, partial], " is 4") == [
        question,
        {"role": "assistant", "content": "The answer is 4"},
    ]
    assert append_assistant_text([question], "4") == [question, {"role": "assistant", "content": "4"}]
    called = {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]}
    assert append_assistant_text([called], "4") == [called, {"role": "assistant", "content": "4"}]
