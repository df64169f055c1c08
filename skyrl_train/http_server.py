"""HTTP servers of this package: how many connections they hold, for how long, and under which names they are asked.

The endpoint of engines, `skyrl-train watch` and a run's /metrics listen through `HttpServer`, so that a client which
holds connections, sends half a header or does not read its answer costs none of them, nor the run, its descriptors.
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
"""How long a connection may be without a whole request header, new or between two requests."""
LINGER_TIMEOUT_S = 2.0
"""How long a refused body is still read and dropped, so that its sender gets to read the refusal."""
TRANSFER_TIMEOUT_S_PER_MIB = 60.0
"""How long each MiB begun of a body or an answer may take: a client that is slower than that is not there any more."""
MAX_CONNECTIONS = 4096
_MAX_BACKLOG = 128
"""The most connections that the event loop accepts before it runs anything else."""
_ACCEPT_S = 0.01
_protocol_log = logging.getLogger(f"{__name__}.protocol")
# Malformed requests are reported only to the client: a log would contain parts of them, tokens included.
_protocol_log.addFilter(lambda record: not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError)))


@dataclass(frozen=True)
class ConnectionLimits:
    """At most half of the descriptors that were free: accepted connections are closed up to four bursts later."""

    connections: int
    backlog: int


def connection_limits(max_connections: int = MAX_CONNECTIONS) -> ConnectionLimits:
    """Return the room for connections in this process as it is now, from its soft limit of descriptors (RLIMIT_NOFILE).

    `most`: the most connections, however many descriptors are free.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = 4 * max_connections if limit == resource.RLIM_INFINITY else limit - psutil.Process().num_fds()
    connections = max(1, min(max_connections, free // 4))
    return ConnectionLimits(connections, backlog=max(1, min(_MAX_BACKLOG, connections // 4)))


class HttpServer:
    """A web application that listens within the limits of this module. Belongs to the event loop that runs `listen`.

    Its middleware sends answers with `send`, which ends the connection of a client that does not read them.

    Example:
        server = HttpServer(app, drain_s=1.0)
        await server.listen("127.0.0.1", 8000)
        ...
        await server.close()
    """

    def __init__(self, app: web.Application, *, drain_s: float, max_connections: int = MAX_CONNECTIONS):
        """`drain_s`: how long `close` waits for running requests. `most`: the most connections at the same time."""
        self._app, self._drain_s, self._max_connections = app, drain_s, max_connections
        self.runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._is_closing = False

    async def listen(self, host: str, port: int) -> None:
        """Listen at a host and a port; 0: any free one. Raises OSError if that cannot be."""
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
        server, admitted = self.runner.server, connection_limits(self._max_connections)
        assert server is not None
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                lambda: _ConnectionGate(server, 0 if self._is_closing else admitted.connections),
                host,
                port,
                backlog=admitted.backlog,
            )
        except OSError:
            await self.runner.cleanup()
            raise

    async def close(self) -> None:
        """Stop listening, and end all connections."""
        assert self.runner is not None and self._listener is not None
        self._is_closing = True
        # asyncio leaks connections that it has accepted and not begun when it stops listening
        await asyncio.sleep(_ACCEPT_S)
        self._listener.close()
        await self.runner.cleanup()

    @property
    def url(self) -> str:
        """The address, e.g. http://127.0.0.1:8000, with the port that was taken."""
        assert self._listener is not None
        return socket_url(self._listener.sockets[0])


class _ConnectionGate(asyncio.Protocol):
    """Hands a new connection to the server, or answers 503 with Retry-After if it has `most` of them.

    With `most` 0 it ends the connection.
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
            transport.write(_full(self._max_connections))
            transport.close()


def _full(max_connections: int) -> bytes:
    text = f"This server has {max_connections} connections, which is all that it may have; try again."
    body = json.dumps(error_body(503, text, "too_many_connections")).encode()
    head = "HTTP/1.1 503 Service Unavailable", "Retry-After: 1", "Connection: close", "Content-Type: application/json"
    return "\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body


def error_body(
    status: int, message: str, code: str, param: str | None = None, detail: list[Any] | None = None
) -> dict[str, Any]:
    """An error in OpenAI's format; `detail`: the data that an exception needs besides its message."""
    kind = {401: "authentication_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    error: dict[str, Any] = {"message": message, "type": kind, "param": param, "code": code}
    return {"error": error | ({"detail": detail} if detail else {})}


def transfer_timeout_s(size: int) -> float:
    """Return the seconds that this many bytes may take in either direction."""
    return TRANSFER_TIMEOUT_S_PER_MIB * (1 + size // (1 << 20))


async def send(request: web.Request, response: web.StreamResponse) -> None:
    """Send an answer, or end the connection if the client does not take it in time."""
    size = len(response.body) if isinstance(response, web.Response) and isinstance(response.body, bytes) else 0
    async with write_deadline(request, size):
        await response.prepare(request)
        await response.write_eof()


@asynccontextmanager
async def write_deadline(request: web.Request, size: int) -> AsyncIterator[None]:
    """End the connection if the client does not take what is written inside in time; one that has gone is no error."""
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
    """True if a header Host names this machine itself, at any port: a tunnel may begin at another one.

    Other names may be those of another site, whose owner lets them lead to this machine (DNS rebinding).
    """
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
