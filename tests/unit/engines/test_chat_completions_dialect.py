"""Chat Completions, as OpenAI's SDK calls it and with its strict validation of every response and chunk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import openai
import pytest

from skyrl_train.data.token_arrays import Tokens
from skyrl_train.data.tool_formats import AnswerStream
from skyrl_train.engines.http.dialects.base import SentAnswer
from skyrl_train.testing.scripted_engine import ALL_CAPABILITIES, ScriptedEngine
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
from tests.support.tool_templates import FAMILIES

EXTENSIONS = frozenset(("reasoning_content", "token_ids", "weight_versions", "prompt_token_ids"))
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "tells it", "parameters": PARAMETERS},
}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}
BARE = {"type": "function", "function": {"name": "now"}}
NAMED = {"type": "function", "function": {"name": "weather"}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True}}
REST = ' {"city": "Bern"}}\n</tool_call>'
"""Rest of a call whose beginning a named tool_choice forces."""
JSON_REST = '{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with endpoint_in_thread(ObedientEngine()) as url, connect(url) as client:
        yield client


def connect(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=TOKEN, max_retries=0, _strict_response_validation=True)


def user(text: str, **members: Any) -> dict[str, Any]:
    return {"role": "user", "content": wish(text), **members}


def calling(arguments: str = '{"city": "Bern"}', **members: Any) -> dict[str, Any]:
    function = {"name": "weather", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call], **members}


def result(content: Any = "sunny") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "call_1", "content": content}


CASES: dict[str, tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]] = {
    "text": ([user("hello")], {}, {"content": "hello"}),
    "several turns": ([user("a"), {"role": "assistant", "content": "a"}, user("b")], {}, {"content": "b"}),
    "system": ([{"role": "system", "content": "be brief"}, user("hi")], {}, {"content": "hi"}),
    "developer": ([{"role": "developer", "content": "be brief"}, user("hi")], {}, {"content": "hi"}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": wish("hi")}]}], {}, {"content": "hi"}),
    "name": ([user("hi", name="ann")], {}, {"content": "hi"}),
    "unicode": ([user("é🙂\u2028x")], {}, {"content": "é🙂\u2028x"}),
    "empty": ([user("")], {}, {"content": ""}),
    "several samples": ([user("hi")], {"n": 3}, {"content": "hi", "n": 3}),
    "seed": ([user("hi")], {"seed": 5}, {"content": "hi"}),
    "sampling": ([user("hi")], {"temperature": 0.5, "top_p": 0.9}, {"content": "hi"}),
    "greedy": ([user("hi")], {"temperature": 0}, {"content": "hi"}),
    "max_tokens": ([user("hello")], {"max_tokens": 4}, {"content": "hell", "finish": "length"}),
    "max_completion_tokens": ([user("hello")], {"max_completion_tokens": 2}, {"content": "he", "finish": "length"}),
    "stop": ([user("hello")], {"stop": "ll"}, {"content": "he"}),
    "stops": ([user("hello")], {"stop": ["zz", "o"]}, {"content": "hell"}),
    "slow": ([user(f"{SLOWLY}hello world")], {}, {"content": "hello world"}),
    "slow samples": ([user(f"{SLOWLY}hello")], {"n": 2}, {"content": "hello", "n": 2}),
    "slow stop": ([user(f"{SLOWLY}hello world")], {"stop": ["o w"]}, {"content": "hell"}),
    "slow continued": (
        [user(f"{SLOWLY}hm\n</think>\n\n hi "), {"role": "assistant", "content": "<think>\n"}],
        {"extra_body": {"continue_final_message": True}},
        {"content": "hm\n</think>\n\n hi "},
    ),
    "slow schema": (
        [user(f'{SLOWLY}{{"a": "<think>b</think> c"}}')],
        {"response_format": SCHEMA},
        {"content": '{"a": "<think>b</think> c"}'},
    ),
    "slow call": (
        [user(f"{SLOWLY}<think>\nwell\n</think>\n\nOne moment.\n{CALL}")],
        {"tools": [TOOL]},
        {"content": "One moment.", "reasoning": "well", "calls": [CALLED]},
    ),
    "logprobs": ([user("hi")], {"logprobs": True}, {"content": "hi", "logprobs": 3}),
    "logprobs of call": ([user(CALL)], {"tools": [TOOL], "logprobs": True}, {"calls": [CALLED], "logprobs": 1}),
    "no call": ([user("hi")], {"tools": [TOOL]}, {"content": "hi"}),
    "call": ([user(CALL)], {"tools": [TOOL]}, {"calls": [CALLED]}),
    "call of auto": ([user(CALL)], {"tools": [TOOL], "tool_choice": "auto"}, {"calls": [CALLED]}),
    "text and call": (
        [user(f"Let me look.\n{CALL}")],
        {"tools": [TOOL]},
        {"content": "Let me look.", "calls": [CALLED]},
    ),
    "calls": ([user(f"{CALL}\n{OTHER_CALL}")], {"tools": [TOOL]}, {"calls": [CALLED, ("weather", {"city": "Oslo"})]}),
    "one call": (
        [user(f"{CALL}\n{OTHER_CALL}")],
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"calls": [CALLED]},
    ),
    "null argument": (
        [user(CALL.replace('"Bern"', "null"))],
        {"tools": [TOOL]},
        {"calls": [("weather", {"city": None})]},
    ),
    "tool_choice none": ([user(CALL)], {"tools": [TOOL], "tool_choice": "none"}, {"content": CALL}),
    "required": ([user(JSON_REST)], {"tools": [TOOL], "tool_choice": "required"}, {"calls": [CALLED]}),
    "named": ([user(REST)], {"tools": [TOOL], "tool_choice": NAMED}, {"calls": [CALLED]}),
    "strict": ([user(CALL)], {"tools": [STRICT]}, {"calls": [CALLED]}),
    "no parameters": ([user("hi")], {"tools": [BARE]}, {"content": "hi"}),
    "malformed call": (
        [user("<tool_call>\n{]\n</tool_call>")],
        {"tools": [TOOL]},
        {"content": "<tool_call>\n{]\n</tool_call>"},
    ),
    "call without tools": ([user(CALL)], {}, {"content": CALL}),
    "history of call": ([user("x"), calling(), result(), user("hi")], {"tools": [TOOL]}, {"content": "hi"}),
    "result last": ([user("hi"), calling(), result()], {"tools": [TOOL]}, {"content": "hi"}),
    "spaced arguments": ([user("hi"), calling('{"city"  :"Bern"}'), result()], {"tools": [TOOL]}, {"content": "hi"}),
    "text with call": ([user("hi"), calling(content="ok"), result()], {"tools": [TOOL]}, {"content": "hi"}),
    "result in parts": (
        [user("hi"), calling(), result([{"type": "text", "text": "sun"}])],
        {"tools": [TOOL]},
        {"content": "hi"},
    ),
    "returned message": (
        [user("hi"), calling(refusal=None, annotations=[], audio=None, function_call=None, custom=1), result()],
        {"tools": [TOOL]},
        {"content": "hi"},
    ),
    "reasoning": ([user("<think>\n41?\n</think>\n\n42")], {}, {"content": "42", "reasoning": "41?"}),
    "only reasoning": (
        [user("<think>\n41? And")],
        {"max_tokens": 9},
        {"content": "", "reasoning": "41? And", "finish": "length"},
    ),
    "reasoning and call": (
        [user(f"<think>\nhm\n</think>\n\n{CALL}")],
        {"tools": [TOOL]},
        {"reasoning": "hm", "calls": [CALLED]},
    ),
    "returned reasoning": (
        [user("x"), {"role": "assistant", "content": "y", "reasoning_content": "z"}, user("hi")],
        {},
        {"content": "hi"},
    ),
    "text format": ([user("hi")], {"response_format": {"type": "text"}}, {"content": "hi"}),
    "JSON": ([user('{"a": 1}')], {"response_format": {"type": "json_object"}}, {"content": '{"a": 1}'}),
    "schema": ([user('{"a": 1}')], {"response_format": SCHEMA}, {"content": '{"a": 1}'}),
    "top_logprobs": ([user("hi")], {"logprobs": True, "top_logprobs": 2}, {"content": "hi", "logprobs": 3, "top": 2}),
    "ignored": (
        [user("hi")],
        {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k"},
        {"content": "hi"},
    ),
    "no effect": (
        [user("hi")],
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "modalities": ["text"]},
        {"content": "hi"},
    ),
    "effort": ([user("hi")], {"reasoning_effort": "low"}, {"content": "hi"}),
    "unknown": ([user("hi")], {"extra_body": {"some_new_parameter": 1}}, {"content": "hi"}),
    "template": ([user("hi")], {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}, {"content": "hi"}),
    "extensions": ([user("hi")], {"extra_body": {"top_k": 5, "min_p": 0.1, "min_tokens": 1}}, {"content": "hi"}),
    "token ids": ([user("hi")], {"extra_body": {"return_token_ids": True}}, {"content": "hi"}),
    "continued": (
        [user("hi"), {"role": "assistant", "content": "<think>"}],
        {"extra_body": {"continue_final_message": True}},
        {"content": "hi"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_response_parses_strictly(client: openai.OpenAI, case: str):
    messages, options, expected = CASES[case]
    response: Any = client.chat.completions.create(**request(messages, options))
    assert find_unknown_members(response, EXTENSIONS) == []
    assert len(response.choices) == expected.get("n", 1)
    for choice in response.choices:
        message = choice.message
        calls = [(c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls or ()]
        check(message.content, getattr(message, "reasoning_content", ""), calls, choice.finish_reason, expected)
        assert all(call.id and call.type == "function" for call in message.tool_calls or ())
        if "logprobs" in expected:
            tokens = choice.logprobs.content
            assert len(tokens) >= expected["logprobs"]
            assert {len(token.top_logprobs) for token in tokens} == {expected.get("top", 0)}
    assert response.usage is not None and response.usage.completion_tokens > 0


@pytest.mark.parametrize("case", CASES)
def test_stream_parses_strictly(client: openai.OpenAI, case: str):
    messages, options, expected = CASES[case]
    options = {**options, "stream": True, "stream_options": {"include_usage": True}}
    chunks: list[Any] = list(client.chat.completions.create(**request(messages, options)))
    assert [find_unknown_members(chunk, EXTENSIONS) for chunk in chunks] == [[]] * len(chunks)
    for index in range(expected.get("n", 1)):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        deltas = [choice.delta for choice in choices]
        parts = [part for delta in deltas for part in delta.tool_calls or ()]
        assert [part.index for part in parts] == list(range(len(parts))) and all(part.id for part in parts)
        calls = [(part.function.name, json.loads(part.function.arguments or "")) for part in parts if part.function]
        reasoning = "".join(getattr(delta, "reasoning_content", "") for delta in deltas)
        finish = [choice.finish_reason for choice in choices if choice.finish_reason]
        assert [delta.role for delta in deltas if delta.role] == ["assistant"] and len(finish) == 1
        check("".join(delta.content or "" for delta in deltas), reasoning, calls, finish[0], expected)
    assert chunks[-1].choices == [] and chunks[-1].usage is not None


def request(messages: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "messages": messages, **options}


def check(content: str | None, reasoning: str, calls: Any, finish: str, expected: dict[str, Any]) -> None:
    assert (content or "") == expected.get("content", "")
    assert (reasoning, calls) == (expected.get("reasoning", ""), expected.get("calls", []))
    assert finish == expected.get("finish", "tool_calls" if calls else "stop")


def test_stream_arrives_in_parts(client: openai.OpenAI):
    stream: Any = client.chat.completions.create(**request([user(SLOWLY + "a" * 64)], {"stream": True}))
    texts = [chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(texts) == "a" * 64 and len(texts) >= 3


@pytest.mark.parametrize("text", [SLOWLY + "a" * 64, "a"])
def test_failed_stream_raises_error(text: str):
    with endpoint_in_thread(LateFailingEngine()) as url, connect(url) as client:
        with pytest.raises(openai.APIError, match="was killed") as caught:
            list(client.chat.completions.create(**request([user(text)], {"stream": True})))
    assert isinstance(caught.value, openai.APIStatusError) == (text == "a")  # the status is sent with the first chunk


class RestartedEngine(ObedientEngine):
    """An engine whose first tokens of an answer are lost."""

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        return {id: tokens + 1 for id, tokens in (await super().partial_tokens(request_ids)).items()}


def test_restarted_stream_raises_error():
    with endpoint_in_thread(RestartedEngine()) as url, connect(url) as client:
        with pytest.raises(openai.APIError, match="sampled again from its start"):
            list(client.chat.completions.create(**request([user(SLOWLY + "a" * 64)], {"stream": True})))


def test_json_is_content_in_opened_reasoning():
    tokenizer = FAMILIES["hermes"].tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "assistant\\n' }}{% endif", "assistant\\n<think>\\n' }}{% endif"
    )
    with endpoint_in_thread(ObedientEngine(), tokenizer) as url, connect(url) as client:
        reasoned, plain = (
            client.chat.completions.create(**request([user('{"a": 1}')], options)).choices[0].message.content
            for options in ({}, {"response_format": SCHEMA})
        )
    assert (reasoned, plain) == ("", '{"a": 1}')


def test_late_reasoning_does_not_hide_answer():
    sent, stream = SentAnswer(), AnswerStream(None)
    texts: dict[str, str] = {}
    for text, is_complete in (("41? Or", False), ("41? Or\n</think>\n\n4", False), ("41? Or\n</think>\n\n42", True)):
        stream.update(text, is_complete=is_complete)
        for delta in sent.advance(stream.answer()):
            texts[delta.kind] = texts.get(delta.kind, "") + delta.text
    assert texts == {"content": "41? Or42"}


def test_ignored_parameters_are_listed(client: openai.OpenAI):
    options = {"extra_body": {"some_new_parameter": 1, "user": "me"}}
    raw = client.chat.completions.with_raw_response.create(**request([user("hi")], options))
    assert raw.headers["x-ignored-parameters"] == "some_new_parameter"


def test_models_parse_strictly(client: openai.OpenAI):
    (model,) = client.models.list()
    assert find_unknown_members(model) == [] == find_unknown_members(client.models.retrieve("m"))
    with pytest.raises(openai.NotFoundError, match="'m'"):
        client.models.retrieve("other")


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_unsupported_feature_names_engine_and_parameter(options: dict[str, Any], param: str):
    lacking = replace(ALL_CAPABILITIES, json_schema=False, max_top_logprobs=0)
    with endpoint_in_thread(ScriptedEngine(name="plain", capabilities=lacking)) as url, connect(url) as client:
        with pytest.raises(openai.BadRequestError, match="'plain'") as caught:
            client.chat.completions.create(**request([user("hi")], options))
    assert caught.value.param == param


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
MALFORMED: list[tuple[dict[str, Any], int, str | None]] = [
    ({"messages": []}, 400, "messages"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages[0].content[0].type"),
    ({"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "assistant", "content": None}]}, 400, "messages[0].content"),
    ({"messages": [{"role": "function", "content": "x"}]}, 400, "messages[0].role"),
    (
        {"messages": [user("x"), calling(tool_calls=[{"id": "a", "type": "custom"}])]},
        400,
        "messages[1].tool_calls[0].type",
    ),
    (
        {"messages": [user("x"), calling(tool_calls=[{"id": "a", "function": {}}])]},
        400,
        "messages[1].tool_calls[0].function.name",
    ),
    ({"messages": [user("x", tool_calls=calling()["tool_calls"])]}, 400, "messages[0].tool_calls"),
    ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, 400, "tools[0].type"),
    ({"tools": {}}, 400, "tools"),
    ({"tools": [TOOL], "tool_choice": "sometimes"}, 400, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, 400, "tool_choice"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"response_format": {"type": "json_schema"}}, 400, "response_format.json_schema"),
    ({"response_format": {"type": "xml"}}, 400, "response_format.type"),
    ({"tools": [TOOL], "response_format": {"type": "json_object"}}, 400, "response_format"),
    ({"top_logprobs": 2}, 400, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, 400, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"x": "y" * 20000}}, 400, "chat_template_kwargs"),
    ({"guided_json": {}}, 400, "guided_json"),
    ({"skip_special_tokens": False}, 400, "skip_special_tokens"),
    ({"max_tokns": 5}, 400, "max_tokns"),
    ({"frequency_penalty": 0.5}, 400, "frequency_penalty"),
    ({"audio": {"voice": "x"}}, 400, "audio"),
    ({"system": "be brief"}, 400, "system"),
    ({"max_output_tokens": 5}, 400, "max_output_tokens"),
    ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ({"model": "other"}, 404, "model"),
    ({"model": 5}, 400, "model"),
    ({"temperature": "hot"}, 400, "temperature"),
    ({"temperature": 0.001}, 400, "temperature"),
    ({"top_p": 0}, 400, "top_p"),
    ({"n": 0}, 400, "n"),
    ({"stop": 5}, 400, "stop"),
    ({"seed": "x"}, 400, "seed"),
    ({"stream": "yes"}, 400, "stream"),
    ({"max_tokens": 0}, 400, "max_tokens"),
    ({"max_completion_tokens": 0}, 400, "max_completion_tokens"),
    ({"min_p": 2}, 400, "min_p"),
    ({"stop_token_ids": "x"}, 400, "stop_token_ids"),
]


@pytest.mark.parametrize(("change", "status", "param"), MALFORMED)
def test_malformed_request_is_rejected(client: openai.OpenAI, change: Any, status: int, param: str | None):
    body = request([user("hi")], change)
    with pytest.raises(openai.APIStatusError) as caught:
        client.post("/chat/completions", body=body, cast_to=object)
    error = caught.value
    assert (error.status_code, error.param, error.type) == (status, param, "invalid_request_error"), error
