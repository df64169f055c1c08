"""Messages, as Anthropic's SDK calls it and with its strict validation of every response and event."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

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

TOOL = {"name": "weather", "description": "tells it", "input_schema": PARAMETERS}
TOOLS: dict[str, Any] = {"tools": [TOOL]}
REST = ' {"city": "Bern"}}\n</tool_call>'
JSON_REST = '{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with endpoint_in_thread(ObedientEngine()) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with connect(url, auth_token=TOKEN) as client:
        yield client


def connect(url: str, **credentials: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, max_retries=0, _strict_response_validation=True, **credentials)  # type: ignore[arg-type]


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(content: str, *blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks, text(wish(content))] if blocks else wish(content)}


def used(*blocks: dict[str, Any], id: str | None = "toolu_1", **members: Any) -> dict[str, Any]:
    use = {"type": "tool_use", "id": id, "name": "weather", "input": {"city": "Bern"}, **members}
    return {"role": "assistant", "content": [*blocks, use]}


def result(content: Any = "sunny", id: str = "toolu_1", **members: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, **({"content": content} if content else {}), **members}


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": ""}

CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "text": ([user("hello")], {}, {"text": "hello"}),
    "blocks": ([{"role": "user", "content": [text(wish("hello"))]}], {}, {"text": "hello"}),
    "cached block": ([user("hi", {**text("x"), "cache_control": {"type": "ephemeral"}})], {}, {"text": "hi"}),
    "system": ([user("hi")], {"system": "be brief"}, {"text": "hi"}),
    "system blocks": ([user("hi")], {"system": [text("be"), text("brief")]}, {"text": "hi"}),
    "several turns": ([user("a"), {"role": "assistant", "content": "a"}, user("hi")], {}, {"text": "hi"}),
    "returned text": ([user("a"), {"role": "assistant", "content": [text("a")]}, user("hi")], {}, {"text": "hi"}),
    "returned thinking": (
        [user("a"), {"role": "assistant", "content": [THOUGHT, text("a")]}, user("hi")],
        {},
        {"text": "hi"},
    ),
    "redacted thinking": (
        [
            user("a"),
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}, text("a")]},
            user("hi"),
        ],
        {},
        {"text": "hi"},
    ),
    "unicode": ([user("é🙂\u2028x")], {}, {"text": "é🙂\u2028x"}),
    "empty": ([user("")], {}, {"text": ""}),
    "slow": ([user(f"{SLOWLY}hello world")], {}, {"text": "hello world"}),
    "slow call": (
        [user(f"{SLOWLY}<think>\nwell\n</think>\n\nOne moment.\n{CALL}")],
        TOOLS,
        {"thinking": "well", "text": "One moment.", "calls": [CALLED]},
    ),
    "max_tokens": ([user("hello")], {"max_tokens": 4}, {"text": "hell", "stop": "max_tokens"}),
    "stop_sequences": ([user("hello")], {"stop_sequences": ["ll"]}, {"text": "he", "stop": "stop_sequence"}),
    "unused stop": ([user("hello")], {"stop_sequences": ["zz"]}, {"text": "hello"}),
    "slow stop": (
        [user(f"{SLOWLY}hello world")],
        {"stop_sequences": ["o w"]},
        {"text": "hell", "stop": "stop_sequence"},
    ),
    "sampling": ([user("hi")], {"extra_body": {"temperature": 0.5, "top_p": 0.9, "top_k": 5}}, {"text": "hi"}),
    "prefill": ([user("hi"), {"role": "assistant", "content": "well, "}], {}, {"text": "hi"}),
    "no call": ([user("hi")], TOOLS, {"text": "hi"}),
    "call": ([user(CALL)], TOOLS, {"calls": [CALLED]}),
    "text and call": ([user(f"Let me look.\n{CALL}")], TOOLS, {"text": "Let me look.", "calls": [CALLED]}),
    "calls": ([user(f"{CALL}\n{OTHER_CALL}")], TOOLS, {"calls": [CALLED, ("weather", {"city": "Oslo"})]}),
    "one call": (
        [user(f"{CALL}\n{OTHER_CALL}")],
        {**TOOLS, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
        {"calls": [CALLED]},
    ),
    "null argument": ([user(CALL.replace('"Bern"', "null"))], TOOLS, {"calls": [("weather", {"city": None})]}),
    "auto": ([user(CALL)], {**TOOLS, "tool_choice": {"type": "auto"}}, {"calls": [CALLED]}),
    "none": ([user(CALL)], {**TOOLS, "tool_choice": {"type": "none"}}, {"text": CALL}),
    "any": ([user(JSON_REST)], {**TOOLS, "tool_choice": {"type": "any"}}, {"calls": [CALLED]}),
    "tool": ([user(REST)], {**TOOLS, "tool_choice": {"type": "tool", "name": "weather"}}, {"calls": [CALLED]}),
    "custom tool": ([user(CALL)], {"tools": [{**TOOL, "type": "custom"}]}, {"calls": [CALLED]}),
    "strict tool": ([user(CALL)], {"tools": [{**TOOL, "strict": True}]}, {"calls": [CALLED]}),
    "cached tool": ([user(CALL)], {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}}]}, {"calls": [CALLED]}),
    "malformed call": (
        [user("<tool_call>\n{]\n</tool_call>")],
        TOOLS,
        {"text": "<tool_call>\n{]\n</tool_call>"},
    ),
    "result": ([user("hi"), used(), {"role": "user", "content": [result()]}], TOOLS, {"text": "hi"}),
    "result and text": ([user("x"), used(), user("hi", result())], TOOLS, {"text": "hi"}),
    "result in blocks": ([user("x"), used(), user("hi", result([text("sunny")]))], TOOLS, {"text": "hi"}),
    "failed result": ([user("x"), used(), user("hi", result(is_error=True))], TOOLS, {"text": "hi"}),
    "empty result": ([user("x"), used(), user("hi", result(None))], TOOLS, {"text": "hi"}),
    "results": (
        [
            user("x"),
            used({"type": "tool_use", "id": "toolu_2", "name": "weather", "input": {}}),
            user("hi", result(), result(id="toolu_2")),
        ],
        TOOLS,
        {"text": "hi"},
    ),
    "text with call": ([user("x"), used(text("ok")), user("hi", result())], TOOLS, {"text": "hi"}),
    "thinking with call": ([user("x"), used(THOUGHT), user("hi", result())], TOOLS, {"text": "hi"}),
    "thinking": ([user("<think>\n41?\n</think>\n\n42")], {}, {"thinking": "41?", "text": "42"}),
    "only thinking": (
        [user("<think>\n41? And")],
        {"max_tokens": 9},
        {"thinking": "41? And", "stop": "max_tokens"},
    ),
    "thinking enabled": ([user("hi")], {"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"text": "hi"}),
    "thinking disabled": ([user("hi")], {"thinking": {"type": "disabled"}}, {"text": "hi"}),
    "effort": ([user("hi")], {"output_config": {"effort": "low"}}, {"text": "hi"}),
    "schema": (
        [user('{"a": 1}')],
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"text": '{"a": 1}'},
    ),
    "earlier schema": (
        [user('{"a": 1}')],
        {"extra_body": {"output_format": {"type": "json_schema", "schema": {"type": "object"}}}},
        {"text": '{"a": 1}'},
    ),
    "ignored": ([user("hi")], {"metadata": {"user_id": "me"}, "service_tier": "auto"}, {"text": "hi"}),
    "unknown": ([user("hi")], {"extra_body": {"some_new_parameter": 1}}, {"text": "hi"}),
}


@pytest.mark.parametrize("case", CASES)
def test_response_parses_strictly(client: anthropic.Anthropic, case: str):
    messages, options, expected = CASES[case]
    check(client.messages.create(**request(messages, options)), expected)


@pytest.mark.parametrize("case", CASES)
def test_stream_parses_strictly(client: anthropic.Anthropic, case: str):
    messages, options, expected = CASES[case]
    events = list(client.messages.create(stream=True, **request(messages, options)))
    assert [find_unknown_members(event) for event in events] == [[]] * len(events)
    kinds = [event.type for event in events]
    assert (kinds[0], kinds[-2:]) == ("message_start", ["message_delta", "message_stop"])
    with client.messages.stream(**request(messages, options)) as stream:
        for _ in stream:
            pass
        check(stream.get_final_message(), expected)


def request(messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 256, "messages": messages, **options}


def check(message: Any, expected: dict[str, Any]) -> None:
    assert find_unknown_members(message) == []
    blocks = [block.model_dump() for block in message.content]
    calls = [block for block in blocks if block["type"] == "tool_use"]
    assert "".join(block.get("text") or "" for block in blocks) == expected.get("text", "")
    assert "".join(block.get("thinking") or "" for block in blocks) == expected.get("thinking", "")
    assert [(call["name"], call["input"]) for call in calls] == expected.get("calls", [])
    assert message.stop_reason == expected.get("stop", "tool_use" if calls else "end_turn") and blocks
    assert (message.stop_sequence is not None) == (message.stop_reason == "stop_sequence")
    assert message.usage.input_tokens > 0 and message.usage.output_tokens > 0


def test_stream_arrives_in_parts(client: anthropic.Anthropic):
    with client.messages.stream(**request([user(SLOWLY + "a" * 64)], {})) as stream:
        texts = list(stream.text_stream)
    assert "".join(texts) == "a" * 64 and len(texts) >= 3


def test_failed_stream_raises_error():
    with endpoint_in_thread(LateFailingEngine()) as url, connect(url, auth_token=TOKEN) as client:
        with pytest.raises(anthropic.APIStatusError, match="was killed") as caught:
            list(client.messages.create(stream=True, **request([user(SLOWLY + "a" * 64)], {})))
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"


def test_count_tokens_matches_usage(client: anthropic.Anthropic):
    given: dict[str, Any] = {"model": "m", "messages": [user("hi")], "system": "be brief", "tools": [TOOL]}
    counted = client.messages.count_tokens(**given)
    message = client.messages.create(max_tokens=9, **given)
    assert find_unknown_members(counted) == [] and counted.input_tokens == message.usage.input_tokens


def test_models_parse_strictly(client: anthropic.Anthropic):
    (model,) = client.models.list()
    assert find_unknown_members(model) == [] == find_unknown_members(client.models.retrieve("m"))
    with pytest.raises(anthropic.NotFoundError, match="'m'"):
        client.models.retrieve("other")


def test_api_key_header_is_accepted(url: str):
    with connect(url, api_key=TOKEN) as client:
        headers: Any = {"X-Api-Key": TOKEN, "Authorization": anthropic.omit}
        response: Any = client.messages.create(**request([user("hi")], {}), extra_headers=headers)
        assert response.content[0].text == "hi"
    with connect(url, api_key="wrong") as client, pytest.raises(anthropic.AuthenticationError) as caught:
        client.messages.create(**request([user("hi")], {}))
    body: Any = caught.value.body
    assert body["error"]["type"] == "authentication_error"


def test_tool_runner_continues_without_threads(client: anthropic.Anthropic):
    calls: list[str] = []

    @anthropic.beta_tool
    def weather(city: str) -> str:
        """Tell the weather.

        Args:
            city: The city.
        """
        calls.append(city)
        return wish("sunny")

    runner = client.beta.messages.tool_runner(
        model="m", max_tokens=256, tools=[weather], messages=[{"role": "user", "content": wish(CALL)}]
    )
    message = runner.until_done()
    assert calls == ["Bern"] and message.content[0].type == "text"


MALFORMED: list[tuple[dict[str, Any], int, str]] = [
    ({"max_tokens": None}, 400, "max_tokens is missing."),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0].content[0].text"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        400,
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": used()["content"]}]}, 400, "messages[0].content[0].type"),
    ({"messages": [{"role": "assistant", "content": [result()]}]}, 400, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, 400, "messages[0].content[0].tool_use_id"),
    ({"messages": [user("x"), used(id=None)]}, 400, "messages[1].content[0].id"),
    ({"messages": [user("x"), used(input="x")]}, 400, "messages[1].content[0].input"),
    ({"messages": [user("x", result([{"type": "image"}]))]}, 400, "messages[0].content[0].content[0].type"),
    ({"system": [{"type": "image"}]}, 400, "system[0].type"),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, 400, "tools[0].type"),
    ({"tools": [{"input_schema": {}}]}, 400, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, 400, "tool_choice"),
    ({**TOOLS, "tool_choice": {"type": "tool"}}, 400, "tool_choice.name"),
    ({**TOOLS, "tool_choice": {"type": "tool", "name": "other"}}, 400, "tool_choice"),
    ({**TOOLS, "tool_choice": {"type": "some"}}, 400, "tool_choice.type"),
    ({"output_config": {"format": {"type": "json_schema"}}}, 400, "output_config.format.schema"),
    ({"output_format": {"type": "json_schema"}}, 400, "output_format.schema"),
    ({"mcp_servers": [{}]}, 400, "mcp_servers"),
    ({"stop_sequence": ["x"]}, 400, "stop_sequence is not a known member. Did you mean 'stop_sequences'?"),
    ({"temperature": -1}, 400, "temperature"),
    ({"logit_bias": {"5": 1}}, 400, "logit_bias is not supported"),
    ({"n": 2}, 400, "n is not supported"),
    ({"model": "other"}, 404, "model"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"top_k": -2}, 400, "top_k"),
    ({"max_tokens": "5"}, 400, "max_tokens"),
    ({"stream": "yes"}, 400, "stream"),
    ({"stop_sequences": "x"}, 400, "stop_sequences"),
    ({"stop_sequences": [5]}, 400, "stop_sequences"),
    ({"stop_sequences": [""]}, 400, "stop_sequences"),
    ({"system": 5}, 400, "system"),
    ({"tools": {}}, 400, "tools"),
    ({"tools": [{"name": "x", "input_schema": "x"}]}, 400, "tools[0].input_schema"),
    ({"thinking": 5}, 400, "thinking"),
    ({"max_completion_tokens": 5}, 400, "max_completion_tokens"),
]


@pytest.mark.parametrize(("change", "status", "message"), MALFORMED)
def test_malformed_request_is_rejected(client: anthropic.Anthropic, change: Any, status: int, message: str):
    with pytest.raises(anthropic.APIStatusError) as caught:
        client.post("/v1/messages", body=request([user("hi")], change), cast_to=object)
    body: Any = caught.value.body
    kind = {400: "invalid_request_error", 404: "not_found_error"}[status]
    assert (caught.value.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
    assert body["error"]["message"].startswith((message, f"request.{message}", f"{message}="))
