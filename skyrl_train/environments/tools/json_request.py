"""A JSON request, with retries and a deadline, to a server that the configuration names (a retriever or a judge)."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp

from skyrl_train.config.redaction import redact

log = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = 8 * 2**20
"""Maximum size of a response, in bytes."""
MIN_RETRY_DELAY_S = 0.25
MAX_RETRY_DELAY_S = 4.0


class RequestFailed(Exception):
    """An error of a request to a server: no usable response, for a reason that the model did not cause."""


async def post_json(url: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
    """POST `body` as JSON and return the parsed JSON of the response.

    Retry with growing delays while the server is unreachable, busy (429) or failing (5xx). Redirects are not followed,
    and proxies of the environment are ignored.

    Args:
        url: URL of the server.
        body: Value that JSON can represent.
        timeout: Maximum seconds for all attempts together.
        headers: HTTP headers to add; None to add none.

    Raises:
        RequestFailed: The time is over, the server responded with another status than 200, or the response is not JSON
            or has more than `MAX_RESPONSE_BYTES` bytes.
    """
    reason = "no response"
    delay = MIN_RETRY_DELAY_S
    try:
        async with asyncio.timeout(timeout), aiohttp.ClientSession(trust_env=False, headers=headers) as session:
            while True:
                try:
                    async with session.post(url, json=body, allow_redirects=False) as response:
                        status, data = response.status, await _read(response)
                    if status < 500 and status != 429:
                        return _parsed(url, status, data)
                    reason = f"status {status}"
                except aiohttp.ClientError as error:
                    reason = f"{type(error).__name__}: {str(error)[:200]}"
                log.warning("%s: %s; retrying", url, reason)
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_DELAY_S)
    except TimeoutError as error:
        raise RequestFailed(f"{url} did not answer within {timeout:g} s; last: {reason}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            raise RequestFailed(f"{response.url} answered with more than {MAX_RESPONSE_BYTES} bytes")
    return bytes(body)


def _parsed(url: str, status: int, data: bytes) -> Any:
    try:
        if status == 200:
            return json.loads(data)
    except (ValueError, RecursionError):
        pass
    shown = redact(data.decode(errors="replace"))  # a server that refuses a key may repeat it
    raise RequestFailed(f"{url} answered with status {status} and {shown[:200]!r}")
