"""An endpoint for the duration of a test, and calls to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from skyrl_train.engines.base import SampleRequest
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

TOKEN = "a-secret-of-this-test"
TOKENIZER = byte_tokenizer()
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CALL = {"requests": [{"request_id": "r", "token_ids": [5, 6], "sampling": {"max_tokens": 4}, "seed": 1}]}

Test = Callable[[HttpEndpoint, aiohttp.ClientSession], Awaitable[Any]]


def ids_of(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def answers_with(text: str) -> Callable[[SampleRequest], list[int]]:
    """The response of a ScriptedEngine: always this text and the end of the turn."""
    return lambda request: [*ids_of(text), TOKENIZER.eos_token_id]


def serve(
    test: Test, engine: Any = None, *, token: str | None = TOKEN, tokenizer: Any = TOKENIZER, **options: Any
) -> Any:
    """Run `test(endpoint, session)` against an endpoint that serves model "m"; the session sends the token."""

    async def run() -> Any:
        served = engine if engine is not None else ScriptedEngine(answers_with("hello"))
        async with HttpEndpoint(served, tokenizer, model_name="m", token=token, **options) as endpoint:
            headers = {"Authorization": f"Bearer {endpoint.token}"}
            async with aiohttp.ClientSession(endpoint.url, headers=headers) as session:
                return await asyncio.wait_for(test(endpoint, session), 60)

    return asyncio.run(run())


async def ask(session: aiohttp.ClientSession, path: str, body: Any = None, **options: Any) -> tuple[int, Any]:
    """Return the status and parsed body of a POST, or of a GET without a body."""
    verb = "GET" if body is None and not options else "POST"
    if body is not None:
        options["json"] = body
    async with session.request(verb, path, **options) as response:
        return response.status, await response.json()
