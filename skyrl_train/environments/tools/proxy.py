"""Proxy through which a browser reaches the network; it checks every connection with the URL policy."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from skyrl_train.environments.tools.url_policy import HOST_PORT, Target, UrlNotAllowed, UrlPolicy

MAX_HEADER_BYTES = 2**16
CONNECT_TIMEOUT_S = 15.0
DENIED_HEADER = "x-refused"
"""HTTP header that marks the proxy's own error responses."""
HOP_BY_HOP = ("connection", "proxy-", "keep-alive", "host", "upgrade")


class FilteringProxy:
    """An HTTP proxy on 127.0.0.1 that connects only to addresses that a URL policy allows.

    Every request has its own connection, so that no request reaches a host that was checked for another request. The
    proxy cannot read the content of https: it checks only the host's name and its addresses. The attribute `port` is
    the proxy's port inside the `async with` block.

    Args:
        url_policy: Policy that must allow every destination.
        max_bytes: Maximum bytes to transfer in both directions, over all connections together.

    Example:
        async with FilteringProxy(UrlPolicy(["wikipedia.org"])) as proxy:
            ...  # chromium --proxy-server=http://127.0.0.1:{proxy.port} --proxy-bypass-list=<-loopback>
    """

    def __init__(self, url_policy: UrlPolicy, max_bytes: int = 64 * 2**20):
        self.url_policy = url_policy
        self.bytes_left = max_bytes
        self.port = 0
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> FilteringProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=MAX_HEADER_BYTES)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # the proxy is closing; asyncio would log the error otherwise
        finally:
            self._serving.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, _, rest = head[0].partition(" ")
        destination, _, _ = rest.rpartition(" ")
        try:
            target = self._target(method, destination)
            server_reader, server_writer = await _connect(await self.url_policy.resolve(target), target)
        except UrlNotAllowed as error:
            await _answer(writer, 403, f"Refused: {error}")
            return
        except (OSError, TimeoutError) as error:
            await _answer(writer, 502, f"{destination[:200]} could not be reached: {type(error).__name__}")
            return
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                head = []
            else:
                path = destination[len(target.scheme) + 3 :]
                path = path[path.find("/") :] if "/" in path else "/"
                server_writer.write(_request(f"{method} {path} HTTP/1.1", head[1:-2], target))
            await self._relay(reader, writer, server_reader, server_writer, rewrite=method != "CONNECT")
        finally:
            server_writer.close()

    def _target(self, method: str, destination: str) -> Target:
        if method != "CONNECT":
            return self.url_policy.check_url(destination)
        parts = HOST_PORT.fullmatch(destination.lower())
        if parts is None:
            raise UrlNotAllowed(f"{destination!r:.200} is no host and port")
        return self.url_policy.check_host("https", parts["host"], int(parts["port"]))

    async def _relay(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        server_reader: asyncio.StreamReader,
        server_writer: asyncio.StreamWriter,
        rewrite: bool,
    ) -> None:
        """Relay data in both directions until the server has sent everything."""
        upload = asyncio.create_task(self._pump(reader, server_writer))
        try:
            if rewrite:
                answer = (await server_reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                lines = [line for line in answer[1:-2] if not line.lower().startswith(("connection", "keep-alive"))]
                writer.write("\r\n".join([answer[0], *lines, "Connection: close", "", ""]).encode("latin-1"))
            await self._pump(server_reader, writer)
        finally:
            upload.cancel()
            await asyncio.gather(upload, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while (data := await source.read(2**16)) and self.bytes_left > 0:
            self.bytes_left -= len(data)
            sink.write(data)
            await sink.drain()


async def _connect(addresses: Sequence[str], target: Target) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    for number, address in enumerate(addresses, 1):
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                return await asyncio.open_connection(address, target.port, limit=MAX_HEADER_BYTES)
        except (OSError, TimeoutError):
            if number == len(addresses):
                raise
    raise AssertionError("the URL policy returns at least one address")


def _request(first: str, headers: Sequence[str], target: Target) -> bytes:
    forwarded = [line for line in headers if not line.lower().startswith(HOP_BY_HOP)]
    return "\r\n".join([first, f"Host: {target.host}:{target.port}", *forwarded, "Connection: close", "", ""]).encode(
        "latin-1"
    )


async def _answer(writer: asyncio.StreamWriter, status: int, text: str) -> None:
    body = text.encode(errors="replace")
    head = f"HTTP/1.1 {status} Refused\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
    writer.write(f"{head}{DENIED_HEADER}: 1\r\nConnection: close\r\n\r\n".encode() + body)
    await writer.drain()
