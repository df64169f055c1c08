"""A server's seats, of which requests that end while they get one leave none taken."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.data.arrays import token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.http.native import NativeEngine, _NativeRequest

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
