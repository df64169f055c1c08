"""HTTP servers with limits on connections and on slow clients.

The endpoint of engines, `skyrl-train watch` and a run's /metrics listen through `HttpServer`. Clients that hold
connections, send half a header or do not read their responses then cannot use up the descriptors of the process.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import resource
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import psutil
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from skyrl_train.listeners import socket_url

HEADER_TIMEOUT_S = 30.0
"""Seconds that a connection may take to send a complete request header, when it is new and between requests."""
LINGER_TIMEOUT_S = 2.0
"""Seconds for which the body of a rejected request is still read and dropped, so that its sender can read the
response.
"""
TRANSFER_TIMEOUT_S_PER_MIB = 60.0
"""Seconds that each started MiB of a body may take in either direction. A slower client counts as disconnected."""
MAX_CONNECTIONS = 4096
"""Default for the connections of a server."""
_MAX_BACKLOG = 128
"""Connections that the event loop accepts at most before it runs anything else."""
_ACCEPT_S = 0.01
_protocol_log = logging.getLogger(f"{__name__}.protocol")
# Malformed requests are reported only to the client: the log would contain parts of them, even tokens.
_protocol_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits that use at most half of the free descriptors: connections are accepted up to four backlogs before they
    are closed.
    """

    connections: int
    """Maximum number of connections."""
    backlog: int
    """Size of the kernel's queue of new connections."""


def connection_limits(max_connections: int = MAX_CONNECTIONS) -> ConnectionLimits:
    """Return the limits for the descriptors that are free in this process now (RLIMIT_NOFILE).

    Args:
        max_connections: Upper limit of the connections.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = 4 * max_connections if limit == resource.RLIM_INFINITY else limit - psutil.Process().num_fds()
    connections = max(1, min(max_connections, free // 4))
    return ConnectionLimits(connections, backlog=max(1, min(_MAX_BACKLOG, connections // 4)))


class HttpServer:
    """A web server that runs an aiohttp application within the limits of this module.

    It belongs to the event loop that runs `listen`. Middleware of the application sends responses with `send`, which
    closes the connection of a client that does not read them.

    Example:
        server = HttpServer(app, drain_s=1.0)
        await server.listen("127.0.0.1", 8000)
        ...
        await server.close()
    """

    def __init__(self, app: web.Application, *, drain_s: float, max_connections: int = MAX_CONNECTIONS):
        """Create a server that does not listen yet.

        Args:
            app: Application to serve.
            drain_s: Seconds that `close` waits for running requests.
            max_connections: Upper limit of simultaneous connections.
        """
        self._app, self._drain_s, self._max_connections = app, drain_s, max_connections
        self.runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._is_closing = False

    async def listen(self, host: str, port: int) -> None:
        """Start to listen at a host and a port; port 0 means any free port.

        Raises:
            OSError: The address cannot be used.
        """
        self.runner = web.AppRunner(
            self._app,
            access_log=None,
            logger=_protocol_log,
            handler_cancellation=True,
            auto_decompress=False,
            keepalive_timeout=HEADER_TIMEOUT_S,
            lingering_time=LINGER_TIMEOUT_S,
            shutdown_timeout=max(self._drain_s, 0.01),  # 0 would be forever
        )
        await self.runner.setup()
        server, limits = self.runner.server, connection_limits(self._max_connections)
        assert server is not None
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: _ConnectionGate(server, 0 if self._is_closing else limits.connections),
                host,
                port,
                backlog=limits.backlog,
            )
        except OSError:
            await self.runner.cleanup()
            raise

    async def close(self) -> None:
        """Stop listening, wait up to `drain_s` seconds for running requests, and close all connections."""
        assert self.runner is not None and self._listener is not None
        self._is_closing = True
        # When asyncio stops listening, it leaks connections that it has accepted but not started.
        await asyncio.sleep(_ACCEPT_S)
        self._listener.close()
        await self.runner.cleanup()

    @property
    def url(self) -> str:
        """URL with the actual port, e.g. http://127.0.0.1:8000."""
        assert self._listener is not None
        return socket_url(self._listener.sockets[0])


class _ConnectionGate(asyncio.Protocol):
    """A protocol that passes a new connection to the server, or responds 503 with Retry-After if the server is full.

    With `max_connections` 0 it aborts the connection.
    """

    def __init__(self, server: web.Server, max_connections: int):
        self._server, self._max_connections = server, max_connections

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if not self._max_connections:
            transport.abort()
        elif len(self._server.connections) < self._max_connections:
            handler: Any = self._server()
            transport.set_protocol(handler)
            handler.connection_made(transport)
        else:
            transport.write(_server_full_response(self._max_connections))
            transport.close()


def _server_full_response(max_connections: int) -> bytes:
    text = f"This server has reached its limit of {max_connections} connections. Try again later."
    body = json.dumps(error_body(503, text, "too_many_connections")).encode()
    head = "HTTP/1.1 503 Service Unavailable", "Retry-After: 1", "Connection: close", "Content-Type: application/json"
    return "\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body


def error_body(
    status: int, message: str, code: str, param: str | None = None, detail: list[Any] | None = None
) -> dict[str, Any]:
    """Return the JSON body of an error in OpenAI's format.

    Args:
        status: HTTP status, from which the error's type follows.
        message: Explanation for people.
        code: Machine-readable code of the error.
        param: Name of the invalid request parameter; None if the error is not about a parameter.
        detail: Data that an exception needs besides its message; None leaves it out.
    """
    kind = {401: "authentication_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": error | ({"detail": detail} if detail else {})}


def transfer_timeout_s(size: int) -> float:
    """Return the seconds that a body of `size` bytes may take in either direction."""
    return TRANSFER_TIMEOUT_S_PER_MIB * (1 + size // (1 << 20))


async def send(request: web.Request, response: web.StreamResponse) -> None:
    """Send a response, or abort the connection if the client does not read it in time."""
    size = len(response.body) if isinstance(response, web.Response) and isinstance(response.body, bytes) else 0
    async with write_deadline(request, size):
        await response.prepare(request)
        await response.write_eof()


@asynccontextmanager
async def write_deadline(request: web.Request, size: int) -> AsyncIterator[None]:
    """Abort the connection if the client does not read in time what the block writes.

    A client that has disconnected is no error.

    Args:
        request: Request of the client.
        size: Bytes that the block writes, from which the time limit follows.
    """
    transport = request.transport
    if transport is not None:
        transport.set_write_buffer_limits(0)  # a write then ends when the kernel has all of it
    try:
        async with asyncio.timeout(transfer_timeout_s(size)):
            yield
    except ConnectionError:
        pass
    except TimeoutError:
        if transport is not None:
            transport.abort()


def is_loopback_name(host: str) -> bool:
    """Return True if a Host header names this machine itself, at any port, because a tunnel may use another one.

    Other names may belong to a website whose owner lets them resolve to this machine (DNS rebinding).
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
