"""HTTP to an engine server of any kind: deadlines, repeated attempts, and errors that name the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp
from aiohttp import hdrs

from skyrl_train.aio import deadline
from skyrl_train.errors import ConfigError, DeadlineExceeded, EngineError

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""How often a call is sent at most if its connection breaks and repeating it is safe."""
_BACKOFF_S = 0.2
"""Wait before the second attempt; it doubles for every further attempt."""
_RETRY_AFTER_S = 1.0
"""Wait where a server says "503, Retry-After": it has all connections that it may have, and did not read the call."""
_CONNECT_S = 10.0
"""Timeout of a TCP connection."""
_NOT_SENT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""After these errors the server has not seen the call, so any call can be repeated."""
_CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)

T = TypeVar("T")


class Connection:
    """Connections to one server. Open it on the event loop that uses it, and close it."""

    def __init__(self, url: str, token: str, name: str = ""):
        """Raises ConfigError for an invalid address."""
        self.url = _checked_url(url)
        self.name = name or self.url
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Make the session on the current event loop; nothing is sent yet."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        )

    async def close(self) -> None:
        """Closing twice is harmless."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self, verb: str, route: str, body: bytes = b"", params: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request; returns status and body of the answer. Waits for a server that says to come again later.

        Raises EngineError for an answer that is not HTTP. aiohttp's errors of a broken connection are raised as they
        are, for `attempts` and `until_there`.
        """
        if self._session is None:
            raise EngineError(f"Engine {self.name!r} is closed or was never connected.")
        try:
            while True:
                # A redirect would carry the token to another server.
                async with self._session.request(
                    verb, self.url + route, data=body or None, params=params, allow_redirects=False
                ) as response:
                    answer = response.status, await response.read()
                if not (response.status == 503 and hdrs.RETRY_AFTER in response.headers):
                    return answer
                await asyncio.sleep(_RETRY_AFTER_S)
        except aiohttp.ClientError as error:
            if isinstance(error, _CONNECTION_ERRORS):
                raise
            raise EngineError(f"Engine {self.name!r} at {self.url} does not speak HTTP: {error}") from error

    async def retry(self, what: str, attempt: Callable[[int], Awaitable[T]], *, repeatable: bool) -> T:
        """Run `attempt(0)`; if the connection breaks and repeating is safe, also `attempt(1)` and `attempt(2)`.

        Raises EngineError if none of them succeeds.
        """
        for number in range(MAX_ATTEMPTS):
            try:
                return await attempt(number)
            except _CONNECTION_ERRORS as error:
                safe = repeatable or isinstance(error, _NOT_SENT_ERRORS)
                if number == MAX_ATTEMPTS - 1 or not safe:
                    raise EngineError(
                        f"Engine {self.name!r} at {self.url} was lost during {what} "
                        f"(attempt {number + 1}): {type(error).__name__}: {error}"
                    ) from error
                log.warning("Engine %r: %s broke off (%s); trying again.", self.name, what, error)
                await asyncio.sleep(_BACKOFF_S * 2**number)
        raise AssertionError("unreachable")

    async def with_timeout(self, what: str, seconds: float, work: Awaitable[T]) -> T:
        """Await `work` for at most `seconds`. Raises DeadlineExceeded naming engine and `what`."""
        async with deadline(f"engine {self.name!r}: {what}", seconds):
            return await work

    async def wait_until_ready(self, probe: Callable[[], Awaitable[T | None]], deadline_s: float) -> T:
        """Call `probe` until a server answers and the result is not None. Raises DeadlineExceeded."""
        last: Exception | None = None
        try:
            async with asyncio.timeout(deadline_s) as limit:
                while True:
                    try:
                        found = await probe()
                        if found is not None:
                            return found
                    except _CONNECTION_ERRORS as error:
                        last = error
                    await asyncio.sleep(_BACKOFF_S)
        except TimeoutError as error:
            if not limit.expired():
                raise
            what = f"connecting to engine {self.name!r} at {self.url}" + (f" (last: {last})" if last else "")
            raise DeadlineExceeded(what, deadline_s) from error


def _checked_url(url: str) -> str:
    """The URL with its scheme, without a final slash; "host:port" means http."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the address of an engine: give host:port or http(s)://host:port.")
    return full.rstrip("/")
