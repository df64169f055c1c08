"""One request to a server that the configuration names (a retriever, a judge): JSON in both directions, a deadline."""

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
"""Maximum bytes of an answer."""
MIN_RETRY_DELAY_S = 0.25
MAX_RETRY_DELAY_S = 4.0


class RequestFailed(Exception):
    """The server gave no usable answer, for reasons that the model did not cause."""


async def post_json(url: str, body: Any, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
    """POST `body` and return the parsed answer. Raises NoAnswer after `timeout` seconds or for a refusal (4xx).

    Retries at growing intervals while the server is unreachable or fails itself (5xx, 429).
    """
    reason = "nothing came back"
    pause = MIN_RETRY_DELAY_S
    try:
        async with asyncio.timeout(timeout), aiohttp.ClientSession(trust_env=False, headers=headers) as session:
            while True:
                try:
                    async with session.post(url, json=body, allow_redirects=False) as response:
                        status, answer = response.status, await _read(response)
                    if status < 500 and status != 429:
                        return _parsed(url, status, answer)
                    reason = f"status {status}"
                except aiohttp.ClientError as error:
                    reason = f"{type(error).__name__}: {str(error)[:200]}"
                log.warning("%s: %s; asking again", url, reason)
                await asyncio.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_DELAY_S)
    except TimeoutError as error:
        raise RequestFailed(f"{url} did not answer within {timeout:g} s; last: {reason}") from error


async def _read(response: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > MAX_RESPONSE_BYTES:
            raise RequestFailed(f"{response.url} answered with more than {MAX_RESPONSE_BYTES} bytes")
    return bytes(body)


def _parsed(url: str, status: int, answer: bytes) -> Any:
    try:
        if status == 200:
            return json.loads(answer)
    except (ValueError, RecursionError):
        pass
    shown = redact(answer.decode(errors="replace"))  # a server that refuses a key may repeat it
    raise RequestFailed(f"{url} answered with status {status} and {shown[:200]!r}")
