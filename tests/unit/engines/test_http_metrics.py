"""What a scraper reads of the endpoint."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from skyrl_train.engines.base import EngineHealth, SampleRequest
from skyrl_train.engines.http import server
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.errors import EngineError
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.http_endpoint import CALL, CHAT, answers_with, ask, serve

CHATS = "/v1/chat/completions"
Series = dict[tuple[str, ...], float]


async def scraped(session: aiohttp.ClientSession) -> Series:
    """(name, values of labels) -> value, without the times at which series began."""
    async with session.get("/metrics") as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_requests_are_counted_by_route_and_status_and_tokens_both_ways():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        assert (await scraped(session))["skyrl_http_prompt_tokens_total",] == 0
        status, answer = await ask(session, CHATS, CHAT | {"n": 3})
        assert status == 200
        assert (await ask(session, "/generate", CALL))[0] == 200
        assert (await ask(session, CHATS, CHAT | {"temperature": -1}))[0] == 400
        for path in ("/nowhere/1", "/nowhere/2"):
            assert (await ask(session, path))[0] == 404
        async with aiohttp.ClientSession(endpoint.url) as stranger:
            assert (await ask(stranger, CHATS, CHAT))[0] == 401
        found, usage = await scraped(session), answer["usage"]
        counted = {key[1:]: value for key, value in found.items() if key[0] == "skyrl_http_requests_total"}
        assert counted == {
            (CHATS, "200"): 1,
            (CHATS, "400"): 1,
            (CHATS, "401"): 1,
            ("/generate", "200"): 1,
            ("unknown", "404"): 2,
            ("/metrics", "200"): 1,
        }
        assert found["skyrl_http_prompt_tokens_total",] == usage["prompt_tokens"] + 2
        assert found["skyrl_http_completion_tokens_total",] == usage["completion_tokens"] + 4
        assert found["skyrl_http_request_seconds_count", CHATS] == 3
        assert found["skyrl_http_request_seconds_bucket", "600.0", CHATS] == 3
        assert 0 < found["skyrl_http_request_seconds_sum", CHATS] < 60
        assert found["skyrl_http_requests_in_progress", CHATS] == 0

    serve(test, ScriptedEngine(answers_with("hello")))


def test_requests_in_progress_and_disconnected_clients_are_counted():
    engine = ScriptedEngine(answers_with("hello"), delay_s=600)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        call = asyncio.ensure_future(ask(session, CHATS, CHAT))
        while not engine.batches:
            await asyncio.sleep(0.01)
        found = await scraped(session)
        assert found["skyrl_http_requests_in_progress", CHATS] == 1
        assert found["skyrl_http_requests_under_way", CHATS] == 1, "the deprecated name"
        assert found["skyrl_engine_requests", "running"] == 1
        assert found["skyrl_engine_requests", "waiting"] == 0
        call.cancel()
        while not (found := await scraped(session)).get(("skyrl_http_requests_total", CHATS, "499")):
            await asyncio.sleep(0.01)
        assert found["skyrl_http_requests_in_progress", CHATS] == 0

    serve(test, engine)


class Waiting(ScriptedEngine):
    """An engine where requests wait; a health check takes as long as it is told."""

    health_s = 0.0

    async def health(self) -> EngineHealth:
        await asyncio.sleep(self.health_s)
        self._note("health")
        return EngineHealth(self.name, 0, running=2, queued=5)


def test_requests_that_wait_in_engines_are_shown_where_engines_tell(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "METRICS_TIMEOUT_S", 0.2)
    engine = Waiting()

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        found = await scraped(session)
        assert (found["skyrl_engine_requests", "running"], found["skyrl_engine_requests", "waiting"]) == (2, 5)
        engine.failures["health"] = EngineError("gone")
        assert not [key for key in await scraped(session) if key[0] == "skyrl_engine_requests"]
        del engine.failures["health"]
        engine.health_s = 600.0
        assert not [key for key in await scraped(session) if key[0] == "skyrl_engine_requests"]

    serve(test, engine)


def test_two_endpoints_of_a_process_count_for_themselves():
    def quick(request: SampleRequest) -> list[int]:
        return [7]

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        async with HttpEndpoint(ScriptedEngine(), None, model_name="m", token=endpoint.token) as other:
            async with aiohttp.ClientSession(other.url, headers=session.headers) as elsewhere:
                assert (await ask(session, "/generate", CALL))[0] == 200
                assert (await scraped(session))["skyrl_http_completion_tokens_total",] == 1
                assert (await scraped(elsewhere))["skyrl_http_completion_tokens_total",] == 0

    serve(test, ScriptedEngine(quick))
