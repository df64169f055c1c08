"""The endpoint's metrics for Prometheus."""

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


async def scrape(session: aiohttp.ClientSession) -> Series:
    """Return the value of each series by name and label values, without the creation times."""
    async with session.get("/metrics") as response:
        assert response.status == 200 and response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


def test_requests_and_tokens_are_counted():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        assert (await scrape(session))["skyrl_http_prompt_tokens_total",] == 0
        status, answer = await ask(session, CHATS, CHAT | {"n": 3})
        assert status == 200
        assert (await ask(session, "/generate", CALL))[0] == 200
        assert (await ask(session, CHATS, CHAT | {"temperature": -1}))[0] == 400
        for path in ("/nowhere/1", "/nowhere/2"):
            assert (await ask(session, path))[0] == 404
        async with aiohttp.ClientSession(endpoint.url) as stranger:
            assert (await ask(stranger, CHATS, CHAT))[0] == 401
        series, usage = await scrape(session), answer["usage"]
        counted = {key[1:]: value for key, value in series.items() if key[0] == "skyrl_http_requests_total"}
        assert counted == {
            (CHATS, "200"): 1,
            (CHATS, "400"): 1,
            (CHATS, "401"): 1,
            ("/generate", "200"): 1,
            ("unknown", "404"): 2,
            ("/metrics", "200"): 1,
        }
        assert series["skyrl_http_prompt_tokens_total",] == usage["prompt_tokens"] + 2
        assert series["skyrl_http_completion_tokens_total",] == usage["completion_tokens"] + 4
        assert series["skyrl_http_request_seconds_count", CHATS] == 3
        assert series["skyrl_http_request_seconds_bucket", "600.0", CHATS] == 3
        assert 0 < series["skyrl_http_request_seconds_sum", CHATS] < 60
        assert series["skyrl_http_requests_in_progress", CHATS] == 0

    serve(test, ScriptedEngine(answers_with("hello")))


def test_requests_in_progress_and_disconnected_clients_are_counted():
    engine = ScriptedEngine(answers_with("hello"), delay_s=600)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        call = asyncio.ensure_future(ask(session, CHATS, CHAT))
        while not engine.batches:
            await asyncio.sleep(0.01)
        series = await scrape(session)
        assert series["skyrl_http_requests_in_progress", CHATS] == 1
        assert series["skyrl_http_requests_under_way", CHATS] == 1, "the deprecated name"
        assert series["skyrl_engine_requests", "running"] == 1
        assert series["skyrl_engine_requests", "waiting"] == 0
        call.cancel()
        while not (series := await scrape(session)).get(("skyrl_http_requests_total", CHATS, "499")):
            await asyncio.sleep(0.01)
        assert series["skyrl_http_requests_in_progress", CHATS] == 0

    serve(test, engine)


class QueueingEngine(ScriptedEngine):
    """An engine with queued requests and a slow health check."""

    health_s = 0.0

    async def health(self) -> EngineHealth:
        await asyncio.sleep(self.health_s)
        self._note("health")
        return EngineHealth(self.name, 0, running=2, queued=5)


def test_queued_requests_are_shown_if_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(server, "METRICS_TIMEOUT_S", 0.2)
    engine = QueueingEngine()

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        series = await scrape(session)
        assert (series["skyrl_engine_requests", "running"], series["skyrl_engine_requests", "waiting"]) == (2, 5)
        engine.failures["health"] = EngineError("gone")
        assert not [key for key in await scrape(session) if key[0] == "skyrl_engine_requests"]
        del engine.failures["health"]
        engine.health_s = 600.0
        assert not [key for key in await scrape(session) if key[0] == "skyrl_engine_requests"]

    serve(test, engine)


def test_two_endpoints_in_process_count_separately():
    def quick(request: SampleRequest) -> list[int]:
        return [7]

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        async with HttpEndpoint(ScriptedEngine(), None, model_name="m", token=endpoint.token) as other:
            async with aiohttp.ClientSession(other.url, headers=session.headers) as other_session:
                assert (await ask(session, "/generate", CALL))[0] == 200
                assert (await scrape(session))["skyrl_http_completion_tokens_total",] == 1
                assert (await scrape(other_session))["skyrl_http_completion_tokens_total",] == 0

    serve(test, ScriptedEngine(quick))
