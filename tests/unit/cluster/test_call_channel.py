"""Calls that share messages, without Ray and without another process."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from skyrl_train.cluster.call_channel import CallChannel, CallServer, Mailbox, Message


class Subject:
    async def wait(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def echo(self, value: object) -> object:
        return value


class FailsToUnpickle:
    def __reduce__(self) -> Any:
        return int, ("no number",)


def connect(abandon_collects: bool = False) -> CallChannel:
    """Return a channel whose other end is in this process. Its collects may continue after their cancellation."""
    mailbox = Mailbox()
    server = CallServer(Subject(), mailbox.put)

    async def submit(channel: str, message: Message) -> None:
        server.receive(channel, message)

    async def collect(channel: str) -> tuple[Sequence[Message], Sequence[Any]]:
        collecting = asyncio.ensure_future(mailbox.collect(channel))
        return await (asyncio.shield(collecting) if abandon_collects else collecting), []

    return CallChannel(submit, collect)


@pytest.mark.parametrize("value", [FailsToUnpickle(), "result"])
def test_unreadable_message_spares_running_calls(value: object, monkeypatch: pytest.MonkeyPatch):
    if value == "result":
        monkeypatch.setattr(Subject, "echo", lambda self, value: FailsToUnpickle())

    async def run() -> None:
        channel = connect()
        running = channel.call("wait", (0.05,), {})
        await asyncio.sleep(0.01)
        with pytest.raises(ValueError, match="no number"):
            await asyncio.wait_for(channel.call("echo", (value,), {}), 5)
        assert await running == 0.05
        assert await channel.call("wait", (0,), {}) == 0

    asyncio.run(run())


def test_cancelled_collector_takes_no_results():
    async def run() -> None:
        channel = connect(abandon_collects=True)
        first = channel.call("wait", (0.05,), {})
        await asyncio.sleep(0.01)
        assert channel._collecting is not None
        channel._collecting.cancel()  # as asyncio.run does to all tasks at its end
        await asyncio.sleep(0)
        second = channel.call("wait", (0.1,), {})
        assert await asyncio.wait_for(asyncio.gather(first, second), 5) == [0.05, 0.1]

    asyncio.run(run())


def test_idle_channel_does_not_keep_event_loop():
    channels: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CallChannel] = weakref.WeakKeyDictionary()

    async def run() -> None:
        channel = channels[asyncio.get_running_loop()] = connect()
        assert await channel.call("echo", (os.getpid(),), {}) == os.getpid()

    asyncio.run(run())
    gc.collect()
    assert not channels
