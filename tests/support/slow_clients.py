"""Clients that connect to a server of this machine and then do less than they should."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress


def open_connection(url: str, sent: bytes = b"", receive_bytes: int | None = None) -> socket.socket:
    """Connect to the server at `url` and send bytes; `receive_bytes`: the size of the receive buffer."""
    client = socket.socket()
    if receive_bytes is not None:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    client.connect(("127.0.0.1", int(url.rpartition(":")[2].partition("/")[0])))
    client.sendall(sent)
    client.setblocking(False)
    return client


async def read_until_closed(client: socket.socket) -> bytes:
    """Return the bytes received until the server ends the connection."""
    received = b""
    with suppress(ConnectionResetError):  # it was not read to its end
        while piece := await asyncio.get_running_loop().sock_recv(client, 1 << 16):
            received += piece
    return received
