"""How many connections the endpoint holds at once: descriptors are a process's, and its run needs them too."""

from __future__ import annotations

import asyncio
import json
import resource
from dataclasses import dataclass
from typing import Any

import psutil
from aiohttp import web

from skyrl_train.engines.http.wire import error_body

_MOST = 4096
_BURST = 128
"""The most connections that the event loop accepts before it runs anything else."""


@dataclass(frozen=True)
class Room:
    """At most half of the descriptors that were free: accepted connections are closed up to four bursts later."""

    connections: int
    backlog: int


def room() -> Room:
    """The room for connections in this process as it is now, from its soft limit of descriptors (RLIMIT_NOFILE)."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = 4 * _MOST if limit == resource.RLIM_INFINITY else limit - psutil.Process().num_fds()
    connections = max(1, min(_MOST, free // 4))
    return Room(connections, backlog=max(1, min(_BURST, connections // 4)))


class Admission(asyncio.Protocol):
    """Hands a new connection to the server, or answers 503 with Retry-After if it has `most` of them."""

    def __init__(self, server: web.Server, most: int):
        self._server, self._most = server, most

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        if len(self._server.connections) < self._most:
            handler: Any = self._server()
            transport.set_protocol(handler)
            handler.connection_made(transport)
        else:
            transport.write(_full(self._most))
            transport.close()


def _full(most: int) -> bytes:
    text = f"This server has {most} connections, which is all that it may have; try again."
    body = json.dumps(error_body(503, text, "too_many_connections")).encode()
    head = "HTTP/1.1 503 Service Unavailable", "Retry-After: 1", "Connection: close", "Content-Type: application/json"
    return "\r\n".join((*head, f"Content-Length: {len(body)}", "", "")).encode() + body
