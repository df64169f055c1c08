"""A server's seats, pauses that wait for the requests in them, and commits that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.data.arrays import token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.http.native import NativeEngine, _NativeRequest
from skyrl_train.engines.lifecycle import MEMORY_TAGS, EngineState, Lifecycle

SEATS = 2


@pytest.mark.defect("seats-taken-by-requests-that-ended")
@pytest.mark.parametrize("ticks", range(8))
@pytest.mark.parametrize("end", ["abort", "cancel"])
def test_a_request_that_ends_as_it_gets_a_seat_leaves_it(ticks: int, end: str):
    """`ticks`: turns of the event loop between its start and its end, of which one is the turn in question."""
    server: Any = SimpleNamespace(connection=SimpleNamespace(name="native"), max_model_len=64)

    async def run() -> None:
        engine = NativeEngine(server, model="m", dtype="float32", device="cpu", folder="f", max_num_seqs=SEATS)
        for number in range(SEATS + 1):
            entry = _NativeRequest(SampleRequest(f"r{number}", token_array((1, 2)), SamplingParams(max_tokens=4), 0))
            running = asyncio.ensure_future(engine._run(entry))
            for _ in range(ticks):
                await asyncio.sleep(0)
            if end == "cancel":
                running.cancel()
            else:
                entry.ended.set()
            with suppress(asyncio.CancelledError):
                assert (await running).stop_reason == "abort"
        async with asyncio.timeout(1):
            for _ in range(SEATS):
                await engine._seats.acquire()

    asyncio.run(run())


@pytest.mark.parametrize(
    "change",
    [
        lambda lifecycle: None,
        Lifecycle.pause,
        lambda lifecycle: lifecycle.sleep(MEMORY_TAGS),
        Lifecycle.invalidate_weights,
        Lifecycle.close,
    ],
    ids=["nothing", "pause", "sleep", "weights", "close"],
)
def test_pause_wait_ends_with_the_last_request_whatever_happens_to_the_engine_meanwhile(
    change: Callable[[Lifecycle], object],
):
    server: Any = SimpleNamespace(connection=SimpleNamespace(name="native"), max_model_len=64)

    async def run() -> None:
        engine = NativeEngine(server, model="m", dtype="float32", device="cpu", folder="f")
        engine._checks = SimpleNamespace(pause=lambda mode: None)  # type: ignore[assignment]
        entry = _NativeRequest(SampleRequest("r", token_array((1, 2)), SamplingParams(max_tokens=4), 0))
        engine._entries["r"] = entry
        entry.flight = asyncio.ensure_future(asyncio.sleep(0, None))  # type: ignore[arg-type]
        pausing = asyncio.ensure_future(engine.pause("wait"))
        await asyncio.sleep(0.01)
        assert not pausing.done()
        change(engine.lifecycle)
        engine._landed(entry)
        async with asyncio.timeout(1):
            await pausing

    asyncio.run(run())


def test_a_commit_whose_caller_is_gone_holds_requests_to_its_end():
    server: Any = SimpleNamespace(connection=SimpleNamespace(name="native"), max_model_len=64)
    may_load = threading.Event()

    class Receiver:
        torn, version = False, 0

        def commit(self, version: int) -> None:
            self.torn = True
            may_load.wait(5)
            self.torn, self.version = False, version

    async def run() -> None:
        engine = NativeEngine(server, model="m", dtype="float32", device="cpu", folder="f")
        receiver: Any = Receiver()
        engine._receiver = receiver
        engine._settle()
        committing = asyncio.ensure_future(engine.commit_weights(1))
        await asyncio.sleep(0.02)
        committing.cancel()
        with suppress(asyncio.CancelledError):
            await committing
        await asyncio.sleep(0.02)
        assert not engine._open.is_set()
        may_load.set()
        async with asyncio.timeout(1):
            await engine._open.wait()
        assert (engine.lifecycle.state, receiver.version) == (EngineState.RUNNING, 1)

    asyncio.run(run())
