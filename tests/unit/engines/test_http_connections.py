"""Clients that hold connections: how many, for how long, and what a run keeps whatever they do."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from skyrl_train import http_server
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.http_server import Room
from tests.support.http_calls import CHAT, TOKEN, ask, serve
from tests.support.slow_clients import dial, everything_from

SOON_S = 0.5
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def port_of(endpoint: HttpEndpoint) -> int:
    return int(endpoint.url.rpartition(":")[2])


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """400 descriptors more than are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 400, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.fault("F28")
@pytest.mark.defect("half-open-connections-took-every-descriptor")
def test_half_open_connections_leave_the_run_its_descriptors_and_end_by_themselves(
    few_descriptors: None, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(http_server, "HEAD_S", SOON_S)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        with ExitStack() as clients:
            held = []
            for index in range(200):
                held.append(clients.enter_context(closing(dial(endpoint.url, HEAD if index % 2 else b""))))
                await asyncio.sleep(0)
            with ExitStack() as files:  # of the run
                for _ in range(50):
                    files.enter_context(Path(os.devnull).open())
            answers = await asyncio.wait_for(asyncio.gather(*map(everything_from, held)), 20)
        refused = [answer for answer in answers if answer]
        assert 80 <= len(refused) <= 150
        assert all(b" 503 " in answer and b"Retry-After" in answer for answer in refused)
        assert (await ask(session, "/v1/chat/completions", CHAT))[0] == 200

    serve(test)


@pytest.mark.fault("F28")
@pytest.mark.defect("half-open-connections-took-every-descriptor")
def test_a_body_that_does_not_arrive_ends_its_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "TRANSFER_S", SOON_S)
    monkeypatch.setattr(http_server, "LINGER_S", SOON_S)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> bytes:
        head = HEAD + f"Authorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n".encode()
        with closing(dial(endpoint.url, head + b'{"model":')) as client:
            return await asyncio.wait_for(everything_from(client), 20)

    answer = serve(test)
    assert b" 408 " in answer and b"did not arrive within 0.5 s" in answer


@pytest.mark.defect("half-open-connections-took-every-descriptor")
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_nobody_reads_ends_its_connection(stream: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "TRANSFER_S", SOON_S / 10)
    body: Any = {"model": "m", "prompt": "x" * 20_000, "n": 100, "max_tokens": 4}

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        def connections() -> int:
            """Return the number of connections that the endpoint holds."""
            found = psutil.Process().net_connections("inet")
            return sum(one.laddr[1:] == (port,) and one.status == psutil.CONN_ESTABLISHED for one in found)

        port = port_of(endpoint)
        data = json.dumps(body | {"return_token_ids": True, "stream": stream}).encode()  # the answer is 8 MB
        head = HEAD + f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        with closing(dial(endpoint.url, head + data, receive_bytes=1 << 12)):
            begun = time.monotonic()
            while not connections():
                await asyncio.sleep(0.01)
            while connections():
                assert time.monotonic() - begun < 30
                await asyncio.sleep(0.1)

    serve(test)


def test_an_endpoint_listens_where_it_was_told_and_nowhere_else():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        found = [one.laddr for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
        assert [tuple(one) for one in found if one.port == port_of(endpoint)] == [("127.0.0.1", port_of(endpoint))]

    serve(test)


def test_a_client_waits_for_a_server_that_is_full_instead_of_giving_it_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "HEAD_S", SOON_S)
    monkeypatch.setattr(http_server, "room", lambda most: Room(connections=1, backlog=1))

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> int:
        connection = Connection(endpoint.url, TOKEN)
        await connection.open()
        try:
            with closing(dial(endpoint.url)) as idle:
                await asyncio.sleep(0.05)
                status, _ = await connection.once("GET", "/v1/models")
                assert await everything_from(idle) == b""
            return status
        finally:
            await connection.close()

    assert serve(test) == 200
