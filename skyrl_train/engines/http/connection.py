"""HTTP to one engine server: deadlines, attempts, and errors that name the engine. Used for every kind of server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar
from urllib.parse import urlsplit

import aiohttp

from skyrl_train.errors import ConfigError, DeadlineExceeded, EngineError, SkyRLError

log = logging.getLogger(__name__)

ATTEMPTS = 3
"""Of a call whose connection broke, where repeating it is safe."""
_BACKOFF_S = 0.2
"""Before the second attempt; twice as long before each one after."""
_CONNECT_S = 10.0
"""For a TCP connection."""
_NOT_SENT = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""The server has not seen the call: every call can be repeated."""
_BROKEN = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)

T = TypeVar("T")


class Connection:
    """To be opened on the loop that it is used on, and closed."""

    def __init__(self, url: str, token: str, name: str = ""):
        """Raises ConfigError for what is no address."""
        self.url = _checked_url(url)
        self.name = name or self.url
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
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

    async def once(
        self, verb: str, route: str, body: bytes = b"", params: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """One exchange: status and body of the answer.

        Raises EngineError for what is no HTTP; aiohttp's errors of a broken connection, which `attempts` and
        `until_there` understand, come as they are.
        """
        if self._session is None:
            raise EngineError(f"Engine {self.name!r} is closed or was never connected.")
        # A redirect would carry the token to another server.
        send = self._session.request(verb, self.url + route, data=body or None, params=params, allow_redirects=False)
        try:
            async with send as response:
                return response.status, await response.read()
        except aiohttp.ClientError as error:
            if isinstance(error, _BROKEN):
                raise
            raise EngineError(f"Engine {self.name!r} at {self.url} does not speak HTTP: {error}") from error

    async def attempts(self, what: str, attempt: Callable[[int], Awaitable[T]], *, repeatable: bool) -> T:
        """`attempt(0)`, then 1 and 2 where the connection broke and repeating is safe. Raises EngineError when lost."""
        for number in range(ATTEMPTS):
            try:
                return await attempt(number)
            except _BROKEN as error:
                safe = repeatable or isinstance(error, _NOT_SENT)
                if number == ATTEMPTS - 1 or not safe:
                    raise EngineError(
                        f"Engine {self.name!r} at {self.url} was lost during {what} "
                        f"(attempt {number + 1}): {type(error).__name__}: {error}"
                    ) from error
                log.warning("Engine %r: %s broke off (%s); trying again.", self.name, what, error)
                await asyncio.sleep(_BACKOFF_S * 2**number)
        raise AssertionError("unreachable")

    async def within(self, what: str, seconds: float, work: Awaitable[T]) -> T:
        """Raises DeadlineExceeded naming engine and `what`."""
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await work
        except TimeoutError as error:
            if deadline.expired() and not isinstance(error, SkyRLError):
                raise DeadlineExceeded(f"engine {self.name!r}: {what}", seconds) from error
            raise

    async def until_there(self, probe: Callable[[], Awaitable[T | None]], deadline_s: float) -> T:
        """Call `probe` until a server answers it and it returns something. Raises DeadlineExceeded."""
        last: Exception | None = None
        try:
            async with asyncio.timeout(deadline_s) as deadline:
                while True:
                    try:
                        found = await probe()
                        if found is not None:
                            return found
                    except _BROKEN as error:
                        last = error
                    await asyncio.sleep(_BACKOFF_S)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            what = f"connecting to engine {self.name!r} at {self.url}" + (f" (last: {last})" if last else "")
            raise DeadlineExceeded(what, deadline_s) from error


def _checked_url(url: str) -> str:
    """With its scheme and without a slash at the end; "host:port" is http."""
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    try:
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        good = False
    if not good or parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the address of an engine: give host:port or http(s)://host:port.")
    return full.rstrip("/")
