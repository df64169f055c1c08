"""HTTP connections to an engine server of any kind, with deadlines, retries, and errors that name the engine."""

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
"""Maximum number of attempts of a call whose connection breaks, if repeating the call is safe."""
_BACKOFF_S = 0.2
"""Seconds before the second attempt; doubled for every further attempt."""
_RETRY_AFTER_S = 1.0
"""Seconds before a call is sent again after "503, Retry-After": the server has no free connection and did not read
it."""
_CONNECT_TIMEOUT_S = 10.0
"""Timeout for opening a TCP connection."""
_NOT_SENT_ERRORS = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)
"""Errors after which the server has not seen the call, so that every call can be repeated."""
_CONNECTION_ERRORS = (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError)

T = TypeVar("T")


class Connection:
    """A pool of HTTP connections to one server. Open it on the event loop that uses it, and close it."""

    def __init__(self, url: str, token: str, name: str = ""):
        """Create a closed pool.

        Args:
            url: host:port or http(s)://host:port.
            token: Bearer token sent with every request.
            name: Name of the engine in error messages; the URL by default.

        Raises:
            ConfigError: `url` is not an address of this form.
        """
        self.url = _checked_url(url)
        self.name = name or self.url
        self._headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        """Create the session on the current event loop, without sending anything."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT_S),
        )

    async def close(self) -> None:
        """Close the connections. A second call does nothing."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def request(
        self, verb: str, route: str, body: bytes = b"", params: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request and return status and body of the response. Send it again after "503, Retry-After".

        Args:
            verb: HTTP method.
            route: Path of the URL.
            body: JSON to send.
            params: Query parameters; None to send none.

        Raises:
            EngineError: The pool is not open, or the response is not HTTP.
            aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, ConnectionError: The connection broke. `retry`
                and `wait_until_ready` handle these errors.
        """
        if self._session is None:
            raise EngineError(f"Engine {self.name!r} is closed or was never connected. Connect a new engine.")
        try:
            while True:
                # A redirect would carry the token to another server.
                async with self._session.request(
                    verb, self.url + route, data=body or None, params=params, allow_redirects=False
                ) as response:
                    result = response.status, await response.read()
                if not (response.status == 503 and hdrs.RETRY_AFTER in response.headers):
                    return result
                await asyncio.sleep(_RETRY_AFTER_S)
        except aiohttp.ClientError as error:
            if isinstance(error, _CONNECTION_ERRORS):
                raise
            raise EngineError(
                f"Engine {self.name!r} at {self.url} does not speak HTTP: {error}. Check that the URL is an engine's."
            ) from error

    async def retry(self, what: str, attempt: Callable[[int], Awaitable[T]], *, repeatable: bool) -> T:
        """Run `attempt(0)`. While the connection breaks and repeating is safe, also run `attempt(1)` and `attempt(2)`.

        Args:
            what: Name of the call, for messages.
            attempt: Coroutine function that sends the call; its argument is the number of the attempt.
            repeatable: True if the call may be repeated although the server may have received it.

        Returns:
            The result of the first attempt that succeeds.

        Raises:
            EngineError: The connection broke in the last attempt, or in one that must not be repeated.
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
                log.warning("Engine %r: the connection broke during %s (%s); retrying.", self.name, what, error)
                await asyncio.sleep(_BACKOFF_S * 2**number)
        raise AssertionError("unreachable")

    async def with_timeout(self, what: str, seconds: float, work: Awaitable[T]) -> T:
        """Return the result of `work`.

        Raises:
            DeadlineExceeded: `work` took longer than `seconds`. The message names the engine and `what`.
        """
        async with deadline(f"engine {self.name!r}: {what}", seconds):
            return await work

    async def wait_until_ready(self, probe: Callable[[], Awaitable[T | None]], deadline_s: float) -> T:
        """Call `probe` repeatedly until the server responds and the result is not None; return that result.

        Raises:
            DeadlineExceeded: No result after `deadline_s`. The message includes the last connection error.
            Exception: `probe` raised an error that is not a connection error.
        """
        last_error: Exception | None = None
        try:
            async with asyncio.timeout(deadline_s) as limit:
                while True:
                    try:
                        result = await probe()
                        if result is not None:
                            return result
                    except _CONNECTION_ERRORS as error:
                        last_error = error
                    await asyncio.sleep(_BACKOFF_S)
        except TimeoutError as error:
            if not limit.expired():
                raise
            cause = f" (last error: {last_error})" if last_error else ""
            what = f"connecting to engine {self.name!r} at {self.url}{cause}"
            raise DeadlineExceeded(what, deadline_s) from error


def _checked_url(url: str) -> str:
    """Return the URL with its scheme and without a final slash; "host:port" stands for http.

    Raises:
        ConfigError: The URL has another form, or contains credentials, a query or a fragment.
    """
    full = url if "://" in url else f"http://{url}"
    parts = urlsplit(full)
    try:
        is_valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(f"{url!r} is not the address of an engine: use host:port or http(s)://host:port.")
    return full.rstrip("/")
