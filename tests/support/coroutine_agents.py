"""Agents of the tests of coroutines. `row["do"]` says how one behaves."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from typing import Any

from skyrl_train import AgentSession


async def run(session: AgentSession, row: dict[str, Any]) -> Any:
    match row["do"]:
        case "return":
            await asyncio.sleep(0.05)
            return {"reward": row["value"], "url": session.base_url}
        case "raise":
            raise ValueError("a mistake")
        case "block":
            time.sleep(60)
        case "exit":
            os._exit(3)
        case "wait":
            await asyncio.sleep(60)
        case "stubborn":
            while True:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(60)


def not_a_coroutine(session: AgentSession, row: dict[str, Any]) -> float:
    return 0.0


async def ask(session: AgentSession, row: dict[str, Any]) -> Any:
    """Call the model `row["calls"]` times, and return `row["returned"]`."""
    import aiohttp

    messages = list(row["prompt"])
    async with aiohttp.ClientSession(raise_for_status=True) as client:
        for _ in range(row.get("calls", 1)):
            body = {"model": session.model, "messages": messages}
            async with client.post(f"{session.base_url}/chat/completions", json=body) as response:
                answer = await response.json()
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
            messages.append({"role": "user", "content": "Again?"})
    return row.get("returned")
