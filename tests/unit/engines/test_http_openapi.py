"""The endpoint's OpenAPI document is valid, complete, and consistent with its requests and responses."""

from __future__ import annotations

from typing import Any

import aiohttp
import jsonschema
import pytest
from aiohttp import web
from openapi_spec_validator import validate

from skyrl_train.engines.http.dialects.chat_completions import ChatCompletionResponse
from skyrl_train.engines.http.json_body import MAX_MEMBERS
from skyrl_train.engines.http.openai_protocol import CompletionResponse, ErrorResponse
from skyrl_train.engines.http.openapi import build_openapi_document
from skyrl_train.engines.http.protocol import Limits
from skyrl_train.engines.http.server import HttpEndpoint
from tests.support.http_endpoint import CALL, CHAT, ask, serve


@pytest.mark.parametrize("control", [True, False])
def test_document_is_valid_and_has_every_route(control: bool, monkeypatch: pytest.MonkeyPatch):
    apps: list[web.Application] = []

    class Runner(web.AppRunner):
        def __init__(self, app: web.Application, **options: Any):
            apps.append(app)
            super().__init__(app, **options)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> Any:
        return (await ask(session, "/openapi.json"))[1]

    monkeypatch.setattr(web, "AppRunner", Runner)
    document = serve(test, control=control)
    validate(document)
    routes = {
        (route.method, route.resource.canonical) for app in apps for route in app.router.routes() if route.resource
    }
    served = {route for route in routes if route[0] not in ("HEAD", "*")}
    assert served == {
        (verb.upper(), path) for path, verbs in document["paths"].items() for verb in verbs if verb != "parameters"
    }
    assert ("/abort" in document["paths"]) == control


def _check(kind: str, value: Any) -> None:
    document = build_openapi_document(Limits(), text=True, control=True)
    jsonschema.validate(value, {"$ref": f"#/components/schemas/{kind}", **document})


GOOD = [
    ("ChatCompletionRequest", CHAT),
    (
        "ChatCompletionRequest",
        CHAT | {"temperature": None, "tools": [], "user": "me", "stop": ["a"], "seed": 3, "top_p": 1},
    ),
    (
        "CompletionRequest",
        {"model": "m", "prompt": [[1], [2, 3]], "logprobs": 0, "stop": "x", "frequency_penalty": 0.0},
    ),
    ("CompletionRequest", {"model": "m", "prompt": "x", "echo": True, "add_special_tokens": False}),
    ("Generate", CALL),
]
BAD = [
    ("ChatCompletionRequest", CHAT | {"temperature": "1"}),
    ("ChatCompletionRequest", CHAT | {"n": 1000}),
    ("ChatCompletionRequest", CHAT | {"echo": True}),
    ("ChatCompletionRequest", CHAT | {"top_logprobs": "1"}),
    ("CompletionRequest", {"model": "m", "prompt": "x", "top_logprobs": 1}),
    ("ChatCompletionRequest", CHAT | {"tools": [{"function": {"name": "x"}}]}),
    ("ChatCompletionRequest", CHAT | {"messages": [{"role": "robot", "content": "x"}]}),
    ("ChatCompletionRequest", {"model": "m"}),
    ("CompletionRequest", {"model": "m", "prompt": 5}),
    ("CompletionRequest", {"model": "m", "prompt": "x", "messages": []}),
    ("Generate", {"requests": [CALL["requests"][0] | {"extra": 1}]}),
]
ROUTE = {
    "ChatCompletionRequest": "/v1/chat/completions",
    "CompletionRequest": "/v1/completions",
    "Generate": "/generate",
}


def test_request_schemas_match_accepted_bodies():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> list[tuple[int, Any]]:
        return [await ask(session, ROUTE[kind], body) for kind, body in [*GOOD, *BAD]]

    responses = serve(test)
    assert [status for status, _ in responses] == [200] * len(GOOD) + [400] * len(BAD)
    for kind, body in GOOD:
        _check(kind, body)
    for kind, body in BAD:
        with pytest.raises(jsonschema.ValidationError):
            _check(kind, body)
    for _, response in responses[len(GOOD) :]:
        ErrorResponse.model_validate(response)


@pytest.mark.parametrize("stream", [False, True])
def test_media_types_of_completions_are_described(stream: bool):
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> str:
        async with session.post("/v1/chat/completions", json=CHAT | {"stream": stream}) as response:
            return response.content_type

    operation = build_openapi_document(Limits(), text=True, control=True)["paths"]["/v1/chat/completions"]["post"]
    assert serve(test) in operation["responses"]["200"]["content"]


@pytest.mark.parametrize(
    ("count", "message"),
    [(1000, "x0 is not a known member."), (MAX_MEMBERS + 1, f"The body holds an object of {MAX_MEMBERS + 1} members")],
)
def test_many_unknown_members_are_one_error(count: int, message: str):
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> tuple[int, Any]:
        text = {"model": "m", "prompt": "x", "none": None} | {f"x{n}": n for n in range(count - 3)}
        return await ask(session, "/v1/completions", text)

    status, response = serve(test)
    assert status == 400 and message in response["error"]["message"]


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True, "n": 2}])
def test_response_schemas_match_responses(more: Any):
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> tuple[Any, Any]:
        chat = await ask(session, "/v1/chat/completions", CHAT | {"logprobs": bool(more)} | more)
        text = {"model": "m", "prompt": "x", "logprobs": 0 if more else None, "echo": bool(more)} | more
        return chat[1], (await ask(session, "/v1/completions", text))[1]

    chat, text = serve(test)
    for kind, response in ((ChatCompletionResponse, chat), (CompletionResponse, text)):
        kind.model_validate(response)
        _check(kind.__name__, response)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("chat", {"temprature": 1}, "temprature is not a known member. Did you mean 'temperature'?"),
        ("text", {"qwertz": 1}, "qwertz is not a known member. See /openapi.json for the known members."),
        ("chat", {"temperature": "1"}, 'temperature must be a finite number, got "1".'),
        ("chat", {"n": True}, "n must be an integer, got true."),
        ("chat", {"n": 1.5}, "n must be an integer, got 1.5."),
        ("chat", {"stream": "yes"}, 'stream must be true or false, got "yes".'),
        ("chat", {"stop": 5}, "stop must be a string or a list, got 5."),
        ("chat", {"stop": {}}, "stop must be a string or a list, got an object."),
        ("chat", {"stop": ["a", 5]}, "stop[1] must be a string, got 5."),
        ("chat", {"messages": "hi"}, 'messages must be a list, got "hi".'),
        ("chat", {"messages": ["hi"]}, 'messages[0] must be an object, got "hi".'),
        (
            "chat",
            {"messages": [{"role": "robot", "content": "x"}]},
            "messages[0].role must be one of 'system', 'developer', 'user', 'assistant' or 'tool', got \"robot\".",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages[0].content[0].text is missing.",
        ),
        (
            "chat",
            {"messages": [{"role": "user", "content": {"type": "text", "text": "x"}}]},
            "messages[0].content must be a string or a list, got an object.",
        ),
        ("chat", {"messages": None}, "messages is missing."),
        ("chat", {"tools": [1]}, "tools[0] must be an object, got 1."),
        ("text", {"tools": [1]}, "tools is not supported; leave it out (null or [] has no effect)."),
        ("chat", {"audio": {}}, "audio is not supported; leave it out (null has no effect)."),
        ("text", {"prompt": 5}, "prompt must be a string or a list, got 5."),
        ("text", {"prompt": {}}, "prompt must be a string or a list, got an object."),
        ("text", {"prompt": [1, "a"]}, 'prompt[1] must be an integer, got "a".'),
        ("text", {"prompt": [[1], [2, None]]}, "prompt[1][1] must be an integer, got null."),
        ("text", {"\ud800": 1}, "The body must be valid Unicode"),
        ("text", {"prompt": "\ud800"}, "prompt is not valid Unicode: it holds half of a surrogate pair."),
    ],
)
def test_invalid_body_error_names_member_and_allowed_values(path: str, body: Any, message: str):
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> tuple[int, Any]:
        if path == "chat":
            return await ask(session, "/v1/chat/completions", CHAT | body)
        return await ask(session, "/v1/completions", {"model": "m", "prompt": "x"} | body)

    status, response = serve(test)
    assert status == 400 and message in response["error"]["message"]
