"""Limits on connections: their number, their duration, and the descriptors that remain for the run."""

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
from skyrl_train.http_server import ConnectionLimits
from tests.support.http_endpoint import CHAT, TOKEN, ask, serve
from tests.support.slow_clients import open_connection, read_until_closed

TIMEOUT_S = 0.5
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def port_of(endpoint: HttpEndpoint) -> int:
    return int(endpoint.url.rpartition(":")[2])


@pytest.fixture
def few_descriptors() -> Iterator[None]:
    """Limit the process to 400 descriptors more than are open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + 400, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.fault("F28")
@pytest.mark.defect("half-open-connections-exhaust-descriptors")
def test_half_open_connections_are_limited_and_closed(few_descriptors: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", TIMEOUT_S)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        with ExitStack() as clients:
            sockets = []
            for index in range(200):
                sockets.append(
                    clients.enter_context(closing(open_connection(endpoint.url, HEAD if index % 2 else b"")))
                )
                await asyncio.sleep(0)
            with ExitStack() as files:  # files that the run opens
                for _ in range(50):
                    files.enter_context(Path(os.devnull).open())
            responses = await asyncio.wait_for(asyncio.gather(*map(read_until_closed, sockets)), 20)
        refused = [response for response in responses if response]
        assert 80 <= len(refused) <= 150
        assert all(b" 503 " in response and b"Retry-After" in response for response in refused)
        assert (await ask(session, "/v1/chat/completions", CHAT))[0] == 200

    serve(test)


@pytest.mark.fault("F28")
@pytest.mark.defect("half-open-connections-exhaust-descriptors")
def test_incomplete_body_closes_connection(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "TRANSFER_TIMEOUT_S_PER_MIB", TIMEOUT_S)
    monkeypatch.setattr(http_server, "LINGER_TIMEOUT_S", TIMEOUT_S)

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> bytes:
        head = HEAD + f"Authorization: Bearer {TOKEN}\r\nContent-Length: 100\r\n\r\n".encode()
        with closing(open_connection(endpoint.url, head + b'{"model":')) as client:
            return await asyncio.wait_for(read_until_closed(client), 20)

    response = serve(test)
    assert b" 408 " in response and b"did not arrive within 0.5 s" in response


@pytest.mark.defect("half-open-connections-exhaust-descriptors")
@pytest.mark.parametrize("stream", [False, True])
def test_unread_response_closes_connection(stream: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "TRANSFER_TIMEOUT_S_PER_MIB", TIMEOUT_S / 10)
    body: Any = {"model": "m", "prompt": "x" * 20_000, "n": 100, "max_tokens": 4}

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        def connections() -> int:
            """Return the number of connections of the endpoint."""
            sockets = psutil.Process().net_connections("inet")
            return sum(s.laddr[1:] == (port,) and s.status == psutil.CONN_ESTABLISHED for s in sockets)

        port = port_of(endpoint)
        data = json.dumps(body | {"return_token_ids": True, "stream": stream}).encode()  # the response has 8 MB
        head = HEAD + f"Authorization: Bearer {TOKEN}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        with closing(open_connection(endpoint.url, head + data, receive_bytes=1 << 12)):
            started_at = time.monotonic()
            while not connections():
                await asyncio.sleep(0.01)
            while connections():
                assert time.monotonic() - started_at < 30
                await asyncio.sleep(0.1)

    serve(test)


def test_endpoint_listens_only_on_its_host():
    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> None:
        listening = [s.laddr for s in psutil.Process().net_connections("inet") if s.status == psutil.CONN_LISTEN]
        assert [tuple(address) for address in listening if address.port == port_of(endpoint)] == [
            ("127.0.0.1", port_of(endpoint))
        ]

    serve(test)


def test_client_waits_for_server_without_free_connections(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(http_server, "HEADER_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(
        http_server, "connection_limits", lambda max_descriptors: ConnectionLimits(connections=1, backlog=1)
    )

    async def test(endpoint: HttpEndpoint, session: aiohttp.ClientSession) -> int:
        connection = Connection(endpoint.url, TOKEN)
        await connection.open()
        try:
            with closing(open_connection(endpoint.url)) as idle:
                await asyncio.sleep(0.05)
                status, _ = await connection.request("GET", "/v1/models")
                assert await read_until_closed(idle) == b""
            return status
        finally:
            await connection.close()

    assert serve(test) == 200
