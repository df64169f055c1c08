"""The endpoint over a scripted engine: authentication, rejected requests, and error responses."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import pickle
import socket
import stat
from contextlib import closing
from typing import Any

import aiohttp
import pytest
from hypothesis import given, settings, strategies as st

from skyrl_train.config.prepare import prepare_config
from skyrl_train.engines.http.protocol import REMOTE_METHODS, Limits
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    UnsupportedParameter,
    WeightSyncError,
)
from skyrl_train.experiment.engines import check_endpoint
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.http_endpoint import CALL, CHAT, TOKEN, answers_with, ask, serve

ROUTES = [(call.verb, call.route) for call in REMOTE_METHODS.values()]
ROUTES += [
    ("GET", "/metrics"),
    ("GET", "/health"),
    ("GET", "/openapi.json"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/m"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
]


# -- authentication --------------------------------------------------------------------------------------------------


@pytest.mark.fault("F27")
def test_all_routes_require_token():
    invalid_headers = [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"Bearer {TOKEN.upper()}"},
        {"Authorization": "Bearer \xff"},
        {"X-Api-Key": TOKEN},
    ]

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        async with aiohttp.ClientSession(endpoint.url) as anonymous_session:
            for verb, route in [*ROUTES, ("GET", "/"), ("DELETE", "/generate"), ("POST", "/nowhere")]:
                for headers in invalid_headers:
                    async with anonymous_session.request(verb, route, headers=headers, json=CHAT) as response:
                        assert response.status == 401, (verb, route, headers)
                        assert (await response.json())["error"]["type"] == "authentication_error"

    engine = ScriptedEngine()
    serve(test, engine)
    assert engine.calls == []


async def read_status_line(endpoint: HttpEndpoint, head: str) -> bytes:
    """Send the head of a request and return the first line of the response."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.rpartition(":")[2]))
    writer.write(head.encode() + b"\r\n\r\n")
    try:
        return await reader.readline()
    finally:
        writer.close()


@pytest.mark.fault("F27")
@pytest.mark.parametrize("expected", ["100-continue", "bogus"])
def test_expect_header_is_handled_after_token(expected: str):
    routes = [*ROUTES, ("POST", "/nowhere"), ("POST", "/no%0Awhere"), ("DELETE", "/generate")]

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        for verb, route in routes:
            head = f"{verb} {route} HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: {expected}"
            assert b" 401 " in await read_status_line(endpoint, head), (verb, route)
        head = f"POST /score HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\nExpect: {expected}"
        first = await read_status_line(endpoint, f"{head}\r\nAuthorization: Bearer {TOKEN}")
        assert (b" 100 " if expected == "100-continue" else b" 400 ") in first

    serve(test)


@pytest.mark.fault("F27")
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "example.org", "localhost.example.org"])
def test_public_address_requires_token(host: str):
    with pytest.raises(ConfigError, match=r"SKYRL_API_KEY.*127\.0\.0\.1"):
        HttpEndpoint(ScriptedEngine(), None, model_name="m", host=host)
    HttpEndpoint(ScriptedEngine(), None, model_name="m", host=host, token=TOKEN)


@pytest.mark.fault("F27")
def test_run_on_public_address_requires_token(monkeypatch: pytest.MonkeyPatch):
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    keys = ["generator.enable_http_endpoint=true", "generator.http_endpoint_host=0.0.0.0"]
    public = prepare_config([*keys, f"generator.http_endpoint_port={port}"]).config
    monkeypatch.delenv("SKYRL_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"http_endpoint_host='0\.0\.0\.0'.*SKYRL_API_KEY"):
        check_endpoint(public)
    monkeypatch.setenv("SKYRL_API_KEY", TOKEN)
    check_endpoint(public)


@pytest.mark.parametrize("token", ["", "two words", "line\nbreak", "é"])
def test_invalid_token_is_rejected_and_not_shown(token: str):
    with pytest.raises(ConfigError, match="SKYRL_API_KEY") as caught:
        HttpEndpoint(ScriptedEngine(), None, model_name="m", token=token)
    assert not token or token not in str(caught.value)


def test_generated_token_is_in_private_temporary_file():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> Any:
        assert endpoint.token_file is not None
        assert stat.S_IMODE(endpoint.token_file.stat().st_mode) == 0o600
        assert endpoint.token_file.read_text() == endpoint.token and len(endpoint.token) >= 32
        assert (await ask(session, "/health"))[0] == 200
        return endpoint.token_file

    assert not serve(test, token=None).exists()


def test_token_is_not_logged(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.DEBUG)
    broken = ScriptedEngine(failures={"generate": RuntimeError("a bug")})

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        assert (await ask(session, "/generate", CALL))[0] == 500
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.rpartition(":")[2]))
        writer.write(f"GET /health HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\x00\r\n\r\n".encode())
        assert b" 400 " in await reader.readline()
        writer.close()

    serve(test, broken)
    assert "a bug" in caplog.text and TOKEN not in caplog.text


def test_port_in_use_is_reported():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        port = int(endpoint.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="http_endpoint_port"):
            await HttpEndpoint(ScriptedEngine(), None, model_name="m", port=port).__aenter__()

    serve(test)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_port_in_use_is_rejected_before_engines_start(host: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SKYRL_API_KEY", TOKEN)
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        keys = [f"generator.http_endpoint_port={port}", f"generator.http_endpoint_host={host}"]
        cfg = prepare_config(["generator.enable_http_endpoint=true", *keys]).config
        with pytest.raises(ConfigError, match=rf"{port}.*http_endpoint_port"):
            check_endpoint(cfg)
    check_endpoint(cfg)


# -- rejected requests -----------------------------------------------------------------------------------------------


@pytest.mark.fault("F28")
@pytest.mark.parametrize("length", [b"Content-Length: 1073741824", b"Transfer-Encoding: chunked"])
def test_gigabyte_body_is_rejected_early(length: bytes):
    num_sent = 0

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> bytes:
        nonlocal num_sent
        reader, writer = await asyncio.open_connection("127.0.0.1", int(endpoint.url.rpartition(":")[2]))
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(head + f"Authorization: Bearer {TOKEN}\r\n".encode() + length + b"\r\n\r\n")
        answer = asyncio.ensure_future(reader.readline())
        piece = b" " * (1 << 16)
        while not answer.done() and num_sent < 1 << 30:
            writer.write(b"10000\r\n" + piece + b"\r\n" if b"chunked" in length else piece)
            num_sent += len(piece)
            await writer.drain()
            await asyncio.sleep(0)
        writer.close()
        assert (await ask(session, "/v1/chat/completions", CHAT))[0] == 200
        return await answer

    assert b" 413 " in serve(test)
    assert num_sent < 64 << 20


@pytest.mark.fault("F28")
def test_sampling_only_body_limit_is_one_mebibyte():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> int:
        data = io.BytesIO(json.dumps(CALL).encode() + b" " * (1 << 20))
        return (await ask(session, "/generate", data=data, headers={"Content-Type": "application/json"}))[0]

    assert serve(test) == 200
    assert serve(test, control=False) == 413


@pytest.mark.fault("F28")
def test_event_loop_runs_while_large_body_is_checked():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> int:
        many = [CALL["requests"][0] | {"request_id": f"r{n}"} for n in range(8000)]
        many[-1]["seed"] = -1
        call = asyncio.ensure_future(ask(session, "/generate", {"requests": many}))
        turns = 0
        while not call.done():
            await asyncio.sleep(0.01)
            turns += 1
        assert (await call)[0] == 400
        return turns

    assert serve(test, limits=Limits(requests=8000)) > 5


@pytest.mark.fault("F28")
@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"n": 1000000000}', "n"),
        (b'{"n": 0}', "n"),
        (b'{"n": 1.5}', "n"),
        (b'{"temperature": NaN}', None),
        (b'{"temperature": Infinity}', None),
        (b'{"temperature": 1e999}', None),
        (b'{"temperature": -1}', "temperature"),
        (b'{"temperature": "1"}', "temperature"),
        (b'{"top_p": 0}', "top_p"),
        (b'{"max_tokens": 1000000000}', "max_tokens"),
        (b'{"max_tokens": 1e3}', "max_tokens"),
        (b'{"max_tokens": 5, "max_completion_tokens": 6}', "max_completion_tokens"),
        (b'{"stop": ["a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a","a"]}', "stop"),
        (b'{"stop": [""]}', "stop"),
        (b'{"seed": 99999999999999999999}', "seed"),
        (b'{"messages": "hi"}', "messages"),
        (b'{"messages": []}', "messages"),
        (b'{"messages": [{"role": "robot", "content": "x"}]}', "messages[0].role"),
        (b'{"messages": [{"role": "user"}]}', "messages[0].content"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image", "text": "x"}]}]}',
            "messages[0].content[0].type",
        ),
        (b'{"messages": [{"role": "assistant", "content": "", "tool_calls": [1]}]}', "messages[0].tool_calls[0]"),
        (b'{"tools": [{"type": "function"}]}', "tools[0].function"),
        (b'{"top_logprobs": 5}', "top_logprobs"),
        (b'{"frequency_penalty": 0.5}', "frequency_penalty"),
        (b'{"logit_bias": {"5": 1}}', "logit_bias"),
        (b'{"response_format": {"type": "json"}}', "response_format.type"),
        (b'{"stream_options": {"include_usage": true}}', "stream_options"),
        (b'{"temprature": 1}', "temprature"),
        (b'{"chat_template_kwargs": {"chat_template": "x"}}', "chat_template_kwargs"),
        (b"[]", None),
        (b'"x"', None),
        (b"{", None),
        (b'{"a": ' * 5000, None),
        (b"\xff\xfe", None),
        (pickle.dumps(CHAT), None),
    ],
)
def test_invalid_chat_is_400_and_names_parameter(body: bytes, param: str | None):
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        merged = body
        if param is not None:
            merged = json.dumps(CHAT | json.loads(body)).encode()
        headers = {"Content-Type": "application/json"}
        status, answer = await ask(session, "/v1/chat/completions", data=merged, headers=headers)
        assert (status, answer["error"]["param"]) == (400, param), answer
        assert answer["error"]["type"] == "invalid_request_error"
        assert (await ask(session, "/v1/chat/completions", CHAT))[0] == 200

    engine = ScriptedEngine(answers_with("hello"))
    serve(test, engine)
    assert engine.calls == ["generate"]


@pytest.mark.fault("F28")
def test_only_json_is_accepted():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        good = json.dumps(CALL).encode()
        for content_type in ("application/octet-stream", "application/x-pickle", "text/plain", "multipart/form-data"):
            status, answer = await ask(session, "/generate", data=good, headers={"Content-Type": content_type})
            assert (status, answer["error"]["code"]) == (415, "unsupported_media_type")
        headers = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
        assert (await ask(session, "/generate", data=good, headers=headers))[0] == 415
        headers = {"Content-Type": "application/json; charset=utf-8"}
        assert (await ask(session, "/generate", data=good, headers=headers))[0] == 200

    serve(test)


@pytest.mark.parametrize(
    ("options", "path", "body", "param"),
    [
        ({"requests": 2}, "/generate", {"requests": CALL["requests"] * 3}, "requests"),
        ({"prompt_tokens": 3}, "/v1/completions", {"model": "m", "prompt": "four"}, "prompt"),
        ({"prompt_tokens": 3}, "/v1/chat/completions", CHAT, "messages"),
        ({"prompt_tokens": 3}, "/score", {"token_ids": [[1, 2, 3, 4]]}, "token_ids[0]"),
        ({"samples": 2}, "/v1/chat/completions", CHAT | {"n": 3}, "n"),
        ({"requests": 4}, "/v1/completions", {"model": "m", "prompt": ["a", "b", "c"], "n": 2}, "prompt"),
        ({"prompt_tokens_in_all": 5}, "/v1/completions", {"model": "m", "prompt": ["ab", "c"], "n": 2}, "prompt"),
        ({"prompt_tokens_in_all": 99}, "/v1/chat/completions", CHAT | {"n": 99}, "messages"),
        ({"max_tokens": 7}, "/v1/chat/completions", CHAT | {"max_tokens": 8}, "max_tokens"),
        ({"stop_chars": 2}, "/v1/chat/completions", CHAT | {"stop": "abc"}, "stop"),
        ({"requests": 1}, "/abort", {"request_ids": ["a", "b"]}, "request_ids"),
    ],
)
def test_every_limit_is_enforced(options: dict[str, int], path: str, body: Any, param: str):
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        status, answer = await ask(session, path, body)
        assert (status, answer["error"]["param"]) == (400, param), answer

    serve(test, limits=Limits(**options), default_max_tokens=4)


def test_unknown_routes_and_verbs_have_error_bodies():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        status, answer = await ask(session, "/v1/embeddings", {})
        assert (status, answer["error"]["code"]) == (404, "not_found")
        status, answer = await ask(session, "/generate")
        assert (status, answer["error"]["code"]) == (405, "method_not_allowed")
        status, answer = await ask(session, "/v1/chat/completions", CHAT | {"model": "another"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found") and "'m'" in answer["error"]["message"]

    serve(test)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UnsupportedParameter("engine x does not support top_k"), 400),
        (WeightSyncError("model.w is stale"), 409),
        (EngineError("engine x is partially loaded"), 503),
        (DeadlineExceeded("engine x.generate", 3), 504),
    ],
)
def test_engine_errors_reach_client_with_name(error: Exception, status: int):
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        for path, body in (("/v1/chat/completions", CHAT), ("/generate", CALL)):
            received, answer = await ask(session, path, body)
            assert (received, answer["error"]["code"]) == (status, type(error).__name__)
            assert str(error) in answer["error"]["message"]

    serve(test, ScriptedEngine(failures={"generate": error}))


def test_unexpected_exception_is_500_without_details():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        status, answer = await ask(session, "/generate", CALL)
        assert status == 500 and "private" not in json.dumps(answer)

    serve(test, ScriptedEngine(failures={"generate": KeyError("private")}))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "m", "prompt": "x"},
    "/generate": CALL,
    "/score": {"token_ids": [[1, 2]]},
    "/wake_up": {"tags": ["weights"]},
    "/connect_weights": {"route": "ipc", "address": "", "rank": 1, "world_size": 2, "timeout_s": 5},
    "/begin_weights": {"manifest": {"version": 1, "tensors": [{"name": "w", "shape": [2], "dtype": "float32"}]}},
    "/commit_weights": {"version": 1},
}


@pytest.mark.fault("F28")
def test_no_json_crashes_the_server():
    statuses: set[int] = set()

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        loop = asyncio.get_running_loop()

        async def post(route: str, body: str) -> int:
            async with session.post(route, data=body, headers={"Content-Type": "application/json"}) as response:
                return response.status

        @settings(max_examples=300)
        @given(st.sampled_from(sorted(GOOD)), st.data())
        def send(route: str, data: st.DataObject) -> None:
            name = data.draw(st.sampled_from([*GOOD[route], "stream", "stop", "seed", "n"]))
            body = data.draw(JSON | st.just(GOOD[route]) | JSON.map(lambda value: GOOD[route] | {name: value}))
            statuses.add(asyncio.run_coroutine_threadsafe(post(route, json.dumps(body)), loop).result(20))

        await asyncio.to_thread(send)

    serve(test, ScriptedEngine(answers_with("x")))
    assert {200, 400} <= statuses <= {200, 400, 404, 409}  # 404: unknown model; 409: unknown weight route
