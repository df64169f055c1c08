"""Responses, as OpenAI's SDK calls it and with its strict validation of every response and event."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from skyrl_train.engines.http.dialects.responses import ResponseStore
from skyrl_train.engines.http.exchange import ApiError
from tests.support.chat_clients import (
    CALL,
    CALLED,
    OTHER_CALL,
    PARAMETERS,
    SLOWLY,
    TOKEN,
    LateFailingEngine,
    ObedientEngine,
    endpoint_in_thread,
    find_unknown_members,
    wish,
)

TOOL = {"type": "function", "name": "weather", "description": "tells it", "parameters": PARAMETERS, "strict": True}
BARE = {"type": "function", "name": "now", "parameters": None, "strict": None}
SCHEMA = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
REST = ' {"city": "Bern"}}\n</tool_call>'
JSON_REST = '{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
REASONED = "<think>\n41?\n</think>\n\n42"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with endpoint_in_thread(ObedientEngine()) as url, connect(url) as client:
        yield client


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, _strict_response_validation=True)


def user(text: str, **members: Any) -> dict[str, Any]:
    return {"role": "user", "content": wish(text), **members}


def called(id: str = "call_1", arguments: str = '{"city": "Bern"}') -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "weather", "arguments": arguments}


def output(content: Any = "sunny", id: str = "call_1") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": content}


def text_part(text: str, kind: str = "input_text") -> dict[str, Any]:
    return {"type": kind, "text": text} | ({"annotations": []} if kind == "output_text" else {})


ANSWER = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [text_part("ok", "output_text")],
}
THOUGHT = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
TOOLS: dict[str, Any] = {"tools": [TOOL]}

CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "string": (wish("hello"), {}, {"text": "hello"}),
    "message": ([user("hello")], {}, {"text": "hello"}),
    "typed message": ([user("hello", type="message")], {}, {"text": "hello"}),
    "parts": ([{"role": "user", "content": [text_part(wish("hi"))]}], {}, {"text": "hi"}),
    "instructions": (wish("hi"), {"instructions": "be brief"}, {"text": "hi"}),
    "developer": ([{"role": "developer", "content": "be brief"}, user("hi")], {}, {"text": "hi"}),
    "system": ([{"role": "system", "content": "be brief"}, user("hi")], {}, {"text": "hi"}),
    "answer": ([user("x"), {"role": "assistant", "content": "y"}, user("hi")], {}, {"text": "hi"}),
    "returned answer": ([user("x"), ANSWER, user("hi")], {}, {"text": "hi"}),
    "returned reasoning": ([user("x"), THOUGHT, ANSWER, user("hi")], {}, {"text": "hi"}),
    "unicode": (wish("é🙂\u2028x"), {}, {"text": "é🙂\u2028x"}),
    "empty": (wish(""), {}, {"text": ""}),
    "slow": (wish(f"{SLOWLY}hello world"), {}, {"text": "hello world"}),
    "slow call": (
        wish(f"{SLOWLY}<think>\nwell\n</think>\n\nOne moment.\n{CALL}"),
        TOOLS,
        {"reasoning": "well", "text": "One moment.", "calls": [CALLED]},
    ),
    "sampling": (wish("hi"), {"temperature": 0.5, "top_p": 0.9}, {"text": "hi"}),
    "max_output_tokens": (wish("hello"), {"max_output_tokens": 4}, {"text": "hell", "status": "incomplete"}),
    "no call": (wish("hi"), TOOLS, {"text": "hi"}),
    "call": (wish(CALL), TOOLS, {"calls": [CALLED]}),
    "text and call": (wish(f"Let me look.\n{CALL}"), TOOLS, {"text": "Let me look.", "calls": [CALLED]}),
    "calls": (wish(f"{CALL}\n{OTHER_CALL}"), TOOLS, {"calls": [CALLED, ("weather", {"city": "Oslo"})]}),
    "one call": (wish(f"{CALL}\n{OTHER_CALL}"), {**TOOLS, "parallel_tool_calls": False}, {"calls": [CALLED]}),
    "null argument": (wish(CALL.replace('"Bern"', "null")), TOOLS, {"calls": [("weather", {"city": None})]}),
    "auto": (wish(CALL), {**TOOLS, "tool_choice": "auto"}, {"calls": [CALLED]}),
    "none": (wish(CALL), {**TOOLS, "tool_choice": "none"}, {"text": CALL}),
    "required": (wish(JSON_REST), {**TOOLS, "tool_choice": "required"}, {"calls": [CALLED]}),
    "named": (wish(REST), {**TOOLS, "tool_choice": {"type": "function", "name": "weather"}}, {"calls": [CALLED]}),
    "no parameters": (wish("hi"), {"tools": [BARE]}, {"text": "hi"}),
    "malformed call": (wish("<tool_call>\n{]\n</tool_call>"), TOOLS, {"text": "<tool_call>\n{]\n</tool_call>"}),
    "call and output": ([user("hi"), called(), output()], TOOLS, {"text": "hi"}),
    "call with ids": ([user("hi"), {**called(), "id": "fc_1", "status": "completed"}, output()], TOOLS, {"text": "hi"}),
    "parallel outputs": ([user("hi"), called(), called("b"), output(), output(id="b")], TOOLS, {"text": "hi"}),
    "text, call and output": ([user("hi"), THOUGHT, ANSWER, called(), output()], TOOLS, {"text": "hi"}),
    "output in parts": ([user("hi"), called(), output([text_part("sunny")])], TOOLS, {"text": "hi"}),
    "spaced arguments": ([user("hi"), called(arguments='{"city"  :"Bern"}'), output()], TOOLS, {"text": "hi"}),
    "reasoning": (wish(REASONED), {}, {"text": "42", "reasoning": "41?"}),
    "reasoning and call": (
        wish(f"<think>\nhm\n</think>\n\n{CALL}"),
        TOOLS,
        {"reasoning": "hm", "calls": [CALLED]},
    ),
    "effort": (wish("hi"), {"reasoning": {"effort": "low", "summary": "auto"}}, {"text": "hi"}),
    "text format": (wish("hi"), {"text": {"format": {"type": "text"}}}, {"text": "hi"}),
    "include": (wish("hi"), {"include": ["reasoning.encrypted_content"]}, {"text": "hi"}),
    "logprobs": (wish("hi"), {"include": ["message.output_text.logprobs"]}, {"text": "hi", "logprobs": 3}),
    "top_logprobs": (wish("hi"), {"top_logprobs": 2}, {"text": "hi", "logprobs": 3}),
    "JSON": (wish('{"a": 1}'), {"text": {"format": {"type": "json_object"}}}, {"text": '{"a": 1}'}),
    "schema": (wish('{"a": 1}'), {"text": {"format": SCHEMA}}, {"text": '{"a": 1}'}),
    "metadata": (wish("hi"), {"metadata": {"a": "b"}}, {"text": "hi"}),
    "not stored": (wish("hi"), {"store": False}, {"text": "hi"}),
    "ignored": (
        wish("hi"),
        {"user": "me", "truncation": "auto", "service_tier": "auto", "prompt_cache_key": "k", "max_tool_calls": 3},
        {"text": "hi"},
    ),
    "no effect": (wish("hi"), {"background": False}, {"text": "hi"}),
    "unknown": (wish("hi"), {"extra_body": {"some_new_parameter": 1}}, {"text": "hi"}),
}


@pytest.mark.parametrize("case", CASES)
def test_response_parses_strictly(client: openai.OpenAI, case: str):
    given, options, expected = CASES[case]
    check(client.responses.create(model="m", input=given, **options), expected)


@pytest.mark.parametrize("case", CASES)
def test_stream_parses_strictly(client: openai.OpenAI, case: str):
    given, options, expected = CASES[case]
    with client.responses.create(model="m", input=given, stream=True, **options) as stream:
        events: list[Any] = list(stream)
    assert [find_unknown_members(event) for event in events] == [[]] * len(events)
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    status = expected.get("status", "completed")
    assert (kinds[0], kinds[-1]) == ("response.created", f"response.{status}")
    check(events[-1].response, expected)
    items = events[-1].response.output
    assert [event.item.model_dump() for event in events if event.type == "response.output_item.done"] == [
        item.model_dump() for item in items
    ]
    parts: dict[str, str] = {}
    for event in events:
        if event.type.endswith(".delta"):
            parts[event.item_id] = parts.get(event.item_id, "") + event.delta
    assert parts == {item.id: getattr(item, "arguments", None) or item.content[0].text for item in items}


def check(response: Any, expected: dict[str, Any]) -> None:
    assert find_unknown_members(response) == []
    reasoning = [part.text for item in response.output if item.type == "reasoning" for part in item.content]
    calls = [item for item in response.output if item.type == "function_call"]
    assert response.output_text == expected.get("text", "") and "".join(reasoning) == expected.get("reasoning", "")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == expected.get("calls", [])
    assert all(call.call_id and call.id for call in calls)
    assert response.status == expected.get("status", "completed")
    assert (response.incomplete_details is not None) == (response.status == "incomplete")
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens > 0
    assert (response.usage.output_tokens_details.reasoning_tokens > 0) == ("reasoning" in expected)
    if "logprobs" in expected:
        assert len(response.output[0].content[0].logprobs) == expected["logprobs"]


def test_stream_helper_accumulates_events(client: openai.OpenAI):
    with client.responses.stream(model="m", input=wish(f"{SLOWLY}{'a' * 64}\n{CALL}"), **TOOLS) as stream:
        deltas = [event for event in stream if event.type == "response.output_text.delta"]
        check(stream.get_final_response(), {"text": "a" * 64, "calls": [CALLED]})
    assert len(deltas) >= 2


def test_failed_stream_ends_with_failed_response():
    with endpoint_in_thread(LateFailingEngine()) as url, connect(url) as client:
        with client.responses.create(model="m", input=wish(SLOWLY + "a" * 64), stream=True) as stream:
            *_, last = stream
    assert find_unknown_members(last) == [] and last.type == "response.failed"
    assert last.response.error is not None and "was killed" in last.response.error.message


def test_previous_response_is_continued(client: openai.OpenAI):
    first = client.responses.create(model="m", input=wish(CALL), instructions="a", **TOOLS)
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(model="m", input=[result], previous_response_id=first.id, **TOOLS)
    assert second.previous_response_id == first.id and second.usage is not None and first.usage is not None
    added = second.usage.input_tokens - first.usage.input_tokens
    assert added > len(CALL)
    assert client.responses.retrieve(first.id) == first
    client.responses.delete(first.id)
    for call_with in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(model="m", input="x", previous_response_id=first.id),
    ):
        with pytest.raises(openai.APIStatusError, match=first.id) as caught:
            call_with()
        assert caught.value.status_code in (400, 404)


def test_unstored_response_cannot_be_continued(client: openai.OpenAI):
    first = client.responses.create(model="m", input=wish("hi"), store=False)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="m", input="x", previous_response_id=first.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


@pytest.mark.parametrize("limits", [{"max_responses": 2}, {"max_chars": 25}])
def test_oldest_responses_are_dropped(limits: dict[str, int]):
    store = ResponseStore(**limits)
    for number in range(3):
        store.add({"id": f"r{number}"}, [{"role": "user", "content": str(number) * 6}], 1)
    with pytest.raises(ApiError):
        store.get("r0")
    assert [store.get(f"r{number}") for number in (1, 2)] == [{"id": "r1"}, {"id": "r2"}]


def test_repeated_conversations_are_stored_once():
    store = ResponseStore(max_chars=1000)
    for number in range(50):
        messages = [{"role": "user", "content": f"{index:06}"} for index in range(number + 1)]
        store.add({"id": f"r{number}", "instructions": "be brief"}, messages, len(messages))
    first, last = store.get_messages("r0"), store.get_messages("r49")
    assert len(last) == 50 and last[0] is first[0]
    store.add({"id": "large", "tools": [{"description": "x" * 1000}]}, [], 0)
    with pytest.raises(ApiError):
        store.get("r49")


MALFORMED: list[tuple[dict[str, Any], int, str]] = [
    ({"input": []}, 400, "input"),
    ({"input": None}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"input": [{"role": "user"}]}, 400, "input[0].content"),
    ({"input": [{"role": "robot", "content": "x"}]}, 400, "input[0].role"),
    ({"input": [{"content": "x"}]}, 400, "input[0].role"),
    ({"input": [{"type": "function_call", "name": "x", "arguments": "{}"}]}, 400, "input[0].call_id"),
    ({"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, 400, "input[0].name"),
    ({"input": [{"type": "function_call_output", "call_id": "x"}]}, 400, "input[0].output"),
    ({"input": [{"type": "computer_call"}]}, 400, "input[0].type"),
    (
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
        400,
        "input[0].content[0].type",
    ),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, 400, "input[0].content[0].text"),
    ({"tools": [{"type": "web_search"}]}, 400, "tools[0].type"),
    ({"tools": [{"type": "function"}]}, 400, "tools[0].name"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({**TOOLS, "tool_choice": {"type": "function", "name": "other"}}, 400, "tool_choice"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, 400, "text.format.schema"),
    ({"text": {"verbosity": "low"}}, 400, "text.verbosity"),
    ({"background": True}, 400, "background"),
    ({"conversation": "conv_1"}, 400, "conversation"),
    ({"previous_response_id": "resp_1"}, 400, "previous_response_id"),
    ({"stream_options": {}}, 400, "stream_options"),
    ({"temprature": 1}, 400, "temprature"),
    ({"n": 2}, 400, "n"),
    ({"max_tokens": 5}, 400, "max_tokens"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
    ({"temperature": -1}, 400, "temperature"),
    ({"model": "other"}, 404, "model"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 1.5}, 400, "top_p"),
    ({"top_logprobs": 21}, 400, "top_logprobs"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"max_output_tokens": "5"}, 400, "max_output_tokens"),
    ({"stream": "yes"}, 400, "stream"),
    ({"store": 1}, 400, "store"),
    ({"instructions": 5}, 400, "instructions"),
    ({"tools": {}}, 400, "tools"),
    ({"tools": [{"type": "function", "name": "x", "parameters": "x"}]}, 400, "tools[0].parameters"),
    ({"text": {"format": {"type": "xml"}}}, 400, "text.format.type"),
    ({"messages": [{"role": "user", "content": "x"}]}, 400, "messages"),
]


@pytest.mark.parametrize(("change", "status", "param"), MALFORMED)
def test_malformed_request_is_rejected(client: openai.OpenAI, change: Any, status: int, param: str):
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/responses", body={"model": "m", "input": wish("hi"), **change}, cast_to=object)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (status, param, "invalid_request_error"), error
