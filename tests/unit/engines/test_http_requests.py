"""The endpoint over a scripted engine or a client: how it handles accepted requests."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.protocol import REMOTE_METHODS, Limits
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.errors import (
    EngineError,
    EnginesLost,
)
from skyrl_train.experiment.engines import wait_until_all_dead
from skyrl_train.testing.scripted_engine import ALL_CAPABILITIES, ScriptedEngine
from tests.support.http_endpoint import CALL, CHAT, TOKEN, TOKENIZER, answers_with, ask, serve


def test_request_ended_by_deadline_is_error():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        status, answer = await ask(session, "/v1/chat/completions", CHAT)
        assert status == 503 and "0.1 s" in answer["error"]["message"]
        body = {"requests": [CALL["requests"][0] | {"deadline_s": 1000}]}
        status, answer = await ask(session, "/generate", body)
        assert (status, answer["result"][0]["stop_reason"]) == (200, "abort")

    serve(test, ScriptedEngine(delay_s=60), deadline_s=0.1)


def test_tokenization_failure_has_error_response():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        messages = {"messages": [{"role": "user", "content": "half: \ud800"}]}
        status, answer = await ask(session, "/v1/chat/completions", CHAT | messages)
        assert status == 400 and "surrogate" in answer["error"]["message"]
        assert (await ask(session, "/v1/chat/completions", CHAT))[0] == 200

    serve(test, deadline_s=5)


class SlowTokenizer:
    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        time.sleep(1)
        return {"input_ids": [5]}

    def get_vocab(self) -> dict[str, int]:
        return {"x": 5}


def test_tokenization_has_request_deadline():
    async def run() -> tuple[int, Any]:
        async with HttpEndpoint(
            ScriptedEngine(), SlowTokenizer(), model_name="m", token=TOKEN, deadline_s=0.1
        ) as endpoint:
            async with aiohttp.ClientSession(endpoint.url, headers={"Authorization": f"Bearer {TOKEN}"}) as session:
                return await ask(session, "/v1/completions", {"model": "m", "prompt": "x"})

    status, answer = asyncio.run(run())
    assert (status, answer["error"]["code"]) == (504, "DeadlineExceeded")


@pytest.mark.defect("oversized-prompts-rendered")
@pytest.mark.parametrize("prompt", [["x"] * 5, "x" * 11])
def test_oversized_texts_are_rejected_before_tokenization(prompt: Any):
    async def run() -> tuple[int, Any]:
        limits = Limits(prompt_tokens=10, requests=4)
        async with HttpEndpoint(
            ScriptedEngine(), SlowTokenizer(), model_name="m", token=TOKEN, deadline_s=0.1, limits=limits
        ) as endpoint:
            async with aiohttp.ClientSession(endpoint.url, headers={"Authorization": f"Bearer {TOKEN}"}) as session:
                return await ask(session, "/v1/completions", {"model": "m", "prompt": prompt})

    status, answer = asyncio.run(run())
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.defect("oversized-prompts-rendered")
@pytest.mark.parametrize("several", [False, True])
def test_chat_beyond_context_length_is_rejected_before_rendering(several: bool):
    max_token_chars = len("<|endoftext|>")

    def chat(characters: int) -> Any:
        characters -= len("user") * (1 + several)  # the text of roles counts, too
        contents = ["y", "x" * (characters - 1)] if several else ["x" * characters]
        return CHAT | {"messages": [{"role": "user", "content": content} for content in contents]}

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        messages = []
        for characters in (40 * max_token_chars, 40 * max_token_chars + 1):
            status, answer = await ask(session, "/v1/chat/completions", chat(characters))
            assert (status, answer["error"]["param"]) == (400, "messages")
            messages.append(answer["error"]["message"])
        assert "40 tokens, got" in messages[0]  # short enough to render, but too many tokens
        assert "characters (at most 40 tokens per prompt and 13 characters per token), got 521." in messages[1]

    engines = [
        ScriptedEngine(answers_with("hello"), name=name, capabilities=replace(ALL_CAPABILITIES, max_model_len=length))
        for name, length in (("short", 20), ("long", 40))
    ]
    serve(test, EngineClient(engines, deadline_s=10) if several else engines[1])


def test_disconnected_client_aborts_its_requests():
    engine = ScriptedEngine(delay_s=60)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        for path, body in (("/v1/chat/completions", CHAT), ("/generate", CALL)):
            with pytest.raises(asyncio.TimeoutError):
                await ask(session, path, body, timeout=aiohttp.ClientTimeout(total=1.5))
        for _ in range(1500):
            if engine.calls.count("abort") == 2:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(engine.calls)

    serve(test, engine)
    assert engine.calls.count("abort") == 2


def test_exit_ends_running_requests():
    engine = ScriptedEngine(delay_s=60)

    async def run() -> float:
        endpoint = await HttpEndpoint(engine, TOKENIZER, model_name="m", token=TOKEN, drain_s=0.2).__aenter__()
        headers = {"Authorization": f"Bearer {TOKEN}"}
        async with aiohttp.ClientSession(endpoint.url, headers=headers) as session:
            call = asyncio.ensure_future(ask(session, "/generate", CALL))
            while not engine.batches:
                await asyncio.sleep(0.01)
            start = time.monotonic()
            await endpoint.__aexit__(None, None, None)
            with pytest.raises(aiohttp.ClientError):
                await call
            return time.monotonic() - start

    assert asyncio.run(run()) < 30
    assert "abort" in engine.calls


def test_health_reflects_engines():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> tuple[int, Any]:
        return await ask(session, "/health")

    assert serve(test) == (200, {"status": "ok"})
    assert serve(test, ScriptedEngine(failures={"health": EngineError("gone")}))[0] == 503
    gone = EngineError("gone")
    dead = ScriptedEngine(failures={"generate": gone, "health": gone})

    async def kill_engine(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> tuple[int, Any]:
        assert (await ask(session, "/generate", CALL))[0] == 503
        return await ask(session, "/health")

    assert serve(kill_engine, EngineClient([dead], deadline_s=5))[0] == 503


def test_client_endpoint_lacks_single_engine_routes():
    client = EngineClient([ScriptedEngine(answers_with("a"), name=f"e{n}") for n in range(2)], deadline_s=5)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        assert (await ask(session, "/v1/chat/completions", CHAT))[0] == 200
        assert (await ask(session, "/pause", {"mode": "keep"}))[0] == 200
        assert len((await ask(session, "/engine_health"))[1]["result"]) == 2
        for path, body in (("/score", {"token_ids": [[1, 2]]}), ("/commit_weights", {"version": 1})):
            status, answer = await ask(session, path, body)
            assert (status, answer["error"]["code"]) == (501, "not_supported")

    serve(test, client)


def test_without_control_only_sampling_is_allowed():
    engine = ScriptedEngine(answers_with("x"))

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        for call in REMOTE_METHODS.values():
            if call.control:
                assert (await ask(session, call.route, {}))[0] == 404, call.route
        assert (await ask(session, "/generate", CALL))[0] == 200
        assert (await ask(session, "/v1/chat/completions", CHAT))[0] == 200

    serve(test, engine, control=False)
    assert engine.calls == ["generate", "generate"]


class AbortRecordingEngine(ScriptedEngine):
    """An engine that records the ids that it aborts."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.aborted: list[str] = []

    async def abort(self, request_ids: Any) -> None:
        self.aborted += request_ids
        await super().abort(request_ids)


def test_sampling_only_ids_cannot_collide():
    engine = AbortRecordingEngine(delay_s=60)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        for _ in range(2):
            with pytest.raises(asyncio.TimeoutError):
                await ask(session, "/generate", CALL, timeout=aiohttp.ClientTimeout(total=1.5))
        while len(engine.aborted) < 2:
            await asyncio.sleep(0.01)

    serve(test, engine, control=False)
    sent_ids = [batch[0].request_id for batch in engine.batches]
    assert sorted(sent_ids) == sorted(engine.aborted) and len({"r", *sent_ids}) == 3
    engine = AbortRecordingEngine(delay_s=60)
    serve(test, engine)
    assert engine.aborted == ["r", "r"]


def test_sampling_only_keeps_ids_and_sessions():
    engine = ScriptedEngine(answers_with("x"))

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        body = {
            "requests": [
                CALL["requests"][0] | {"session": "s", "group": "g"},
                CALL["requests"][0] | {"request_id": "t"},
            ]
        }
        for _ in range(2):
            status, answer = await ask(session, "/generate", body)
            assert status == 200 and [completion["request_id"] for completion in answer["result"]] == ["r", "t"]

    serve(test, engine, control=False)
    (first, other), (second, _) = engine.batches
    assert first.session == second.session != "s"
    assert len({first.group, second.group, "g"}) == 3
    assert (other.session, other.group) == ("", "")


def test_requests_wait_during_sleep_and_weight_sync():
    engine = ScriptedEngine(answers_with("x"))
    client = EngineClient([engine], deadline_s=30)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        await client.sleep()
        call = asyncio.ensure_future(ask(session, "/v1/chat/completions", CHAT))
        await asyncio.sleep(0.1)
        await client.wake_up(["weights"])
        async with client.hold_requests():
            await client.wake_up(["kv_cache"])
            await asyncio.sleep(0.1)
            assert not call.done() and engine.batches == []
        assert (await call)[0] == 200

    serve(test, client)
    assert client.dead_engines == {}


def test_engine_that_rejects_before_sleep_stays_alive():
    request_arrived, may_continue = asyncio.Event(), asyncio.Event()

    class SlowRejectingEngine(ScriptedEngine):
        async def generate(self, requests: Any) -> Any:
            request_arrived.set()
            await may_continue.wait()
            return await super().generate(requests)

    client = EngineClient([SlowRejectingEngine(answers_with("x"))], deadline_s=30)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        call = asyncio.ensure_future(ask(session, "/v1/chat/completions", CHAT))
        await request_arrived.wait()
        await client.sleep()
        may_continue.set()
        await asyncio.sleep(0.1)
        assert not call.done() and client.dead_engines == {}
        await client.wake_up()
        assert (await call)[0] == 200

    serve(test, client)


def test_server_exits_with_causes_of_engine_deaths():
    engines = [ScriptedEngine(name=f"e{n}") for n in range(2)]

    async def run() -> None:
        watch = asyncio.ensure_future(wait_until_all_dead(EngineClient(engines, deadline_s=5), poll_interval_s=0.01))
        for engine in engines:
            await asyncio.sleep(0.1)
            assert not watch.done()
            engine.failures["health"] = EngineError(f"{engine.name} was killed")
        with pytest.raises(EnginesLost, match=r"e0 was killed.*e1 was killed"):
            await asyncio.wait_for(watch, 5)

    asyncio.run(run())
