"""Calls that share messages, without Ray and without another process."""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.cluster.call_channel import CallChannel, CallServer, Mailbox, Message


class Subject:
    async def wait(self, seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    def echo(self, value: object) -> object:
        return value

    def exit(self) -> None:
        sys.exit("no such option")

    def fail_with_foreign_class(self) -> None:
        raise FailsElsewhere("the cause")


class FailsToUnpickle:
    def __reduce__(self) -> Any:
        return int, ("no number",)


class FailsElsewhere(Exception):
    """An exception that can be unpickled while its process packs it, but not by the caller."""

    unpickled = 0

    def __reduce__(self) -> Any:
        return FailsElsewhere.unpickle, self.args

    @staticmethod
    def unpickle(*args: object) -> FailsElsewhere:
        FailsElsewhere.unpickled += 1
        if FailsElsewhere.unpickled > 1:
            raise ImportError("no such module")
        return FailsElsewhere(*args)


def connect(abandon_collects: bool = False, sent: list[Message] | None = None) -> CallChannel:
    """Return a channel whose other end is in this process.

    Args:
        abandon_collects: Let collects continue after their cancellation.
        sent: List to which all messages are appended.
    """
    mailbox = Mailbox()
    messages = [] if sent is None else sent

    async def deliver(channel: str, message: Message) -> None:
        messages.append(message)
        mailbox.put(channel, message)

    server = CallServer(Subject(), deliver)

    async def submit(channel: str, message: Message) -> None:
        messages.append(message)
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


@pytest.mark.parametrize(
    ("make_value", "limit"),
    [(lambda: 0, 256), (lambda: bytes(1 << 20), 5), (lambda: np.zeros(1 << 20, np.uint8), 5)],
    ids=["small", "large content", "large buffers"],
)
def test_burst_is_divided_into_bounded_messages(make_value: Callable[[], object], limit: int):
    sent: list[Message] = []
    number = 4 * limit

    async def run() -> None:
        channel = connect(sent=sent)
        calls = (channel.call("echo", ((index, make_value()),), {}) for index in range(number))
        assert [index for index, _ in await asyncio.gather(*calls)] == list(range(number))

    asyncio.run(run())
    assert sum(len(message.numbers) for message in sent) == 2 * number
    assert max(len(message.numbers) for message in sent) <= limit


def test_other_tasks_run_between_messages_of_burst():
    async def run() -> int:
        channel = connect()
        turns = 0

        async def count_turns() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count_turns())
        await asyncio.gather(*(channel.call("echo", (index,), {}) for index in range(16 * 256)))
        counting.cancel()
        return turns

    assert asyncio.run(run()) >= 16


def test_large_collections_are_divided():
    async def run() -> list[int]:
        mailbox = Mailbox()
        for number in range(5):
            mailbox.put("channel", Message((number,), b"", (np.zeros(15 << 20, np.uint8),)))
        return [len(await mailbox.collect("channel")) for _ in range(3)]

    assert asyncio.run(run()) == [2, 2, 1]


LARGE = np.arange(100_000, dtype=np.float64)


@pytest.mark.parametrize(
    "array",
    [LARGE, LARGE.reshape(1000, 100).T, LARGE[::2], LARGE.astype(">f8"), LARGE[:5]],
    ids=["flat", "Fortran order", "strided", "big endian", "small"],
)
def test_arrays_arrive_unchanged_and_writable(array: np.ndarray):
    async def run() -> np.ndarray:
        result: np.ndarray = await connect().call("echo", (array,), {})
        return result

    result = asyncio.run(run())
    assert result.dtype == array.dtype and result.flags.writeable
    np.testing.assert_array_equal(result, array)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64])
def test_tensors_travel_beside_the_content(dtype: torch.dtype):
    tensor = (torch.arange(100_000) % 7).reshape(100, 1000).to(dtype)
    sent: list[Message] = []

    async def run() -> torch.Tensor:
        result: torch.Tensor = await connect(sent=sent).call("echo", (tensor,), {})
        return result

    result = asyncio.run(run())
    assert result.dtype == dtype and result.shape == tensor.shape
    assert torch.equal(result.view(torch.uint8), tensor.view(torch.uint8))
    assert all(len(message.content) < 1000 for message in sent)


@pytest.mark.parametrize("kind", ["gradient", "slice", "transposed", "parameter", "sparse"])
def test_other_tensors_arrive_unchanged(kind: str):
    tensor = torch.arange(100_000.0).reshape(100, 1000)
    changed: dict[str, torch.Tensor] = {
        "gradient": tensor.clone().requires_grad_(),
        "slice": tensor[:50],
        "transposed": tensor.T,
        "parameter": torch.nn.Parameter(tensor),
        "sparse": tensor.to_sparse(),
    }

    async def run() -> torch.Tensor:
        result: torch.Tensor = await connect().call("echo", (changed[kind],), {})
        return result

    result = asyncio.run(run())
    assert type(result) is type(changed[kind]) and result.requires_grad == changed[kind].requires_grad
    assert torch.equal(result.to_dense(), changed[kind].to_dense())


def test_error_of_unknown_class_keeps_its_text():
    async def run() -> None:
        with pytest.raises(RuntimeError, match=r"FailsElsewhere: the cause") as caught:
            await connect().call("fail_with_foreign_class", (), {})
        assert "in fail_with_foreign_class" in str(caught.value.__cause__)

    asyncio.run(run())


def test_exit_in_method_fails_only_its_call():
    async def run() -> None:
        channel = connect()
        waiting = channel.call("wait", (0.05,), {})
        with pytest.raises(RuntimeError, match="SystemExit: no such option"):
            await channel.call("exit", (), {})
        assert await waiting == 0.05

    asyncio.run(run())
