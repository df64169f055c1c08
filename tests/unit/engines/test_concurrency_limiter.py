"""The client limits the concurrent calls of each engine. Other calls wait in the client, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import BatchedEngineClient, EngineClient
from skyrl_train.errors import EngineError
from skyrl_train.testing.scripted_engine import ScriptedEngine


class GatedEngine(ScriptedEngine):
    """An engine whose calls end when the test calls `end`, in order of arrival."""

    def __init__(self, name: str):
        super().__init__(name=name)
        self.open: list[asyncio.Future[str]] = []
        self.max_open = 0

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.open.append(gate)
        self.max_open = max(self.max_open, len(self.open))
        self.batches.append(list(requests))
        try:
            reason = await gate
        finally:
            self.open.remove(gate)
        tokens, logprobs = np.ones(1, np.int32), -np.ones(1, np.float32)
        return [Completion(request.request_id, tokens, logprobs, logprobs, reason, []) for request in requests]

    def end(self, calls: int = 1, error: Exception | None = None, reason: str = "stop") -> None:
        for gate in self.open[:calls]:
            gate.set_exception(error) if error else gate.set_result(reason)

    @property
    def request_ids(self) -> list[str]:
        return [request.request_id for batch in self.batches for request in batch]


Calls = dict[str, asyncio.Task[list[Completion]]]


def send(client: EngineClient, names: str, session: str = "", group: str = "") -> Calls:
    """Start one call with one request for each letter of `names`."""

    async def call(name: str) -> list[Completion]:
        request = SampleRequest(name, to_token_array((1, 2)), SamplingParams(4), 0, session=session, group=group)
        return await client.generate([request])

    return {name: asyncio.ensure_future(call(name)) for name in names}


async def run_event_loop() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def run_with_client(work: Callable[..., Awaitable[None]], engines: int = 2, max_calls: int = 2) -> list[GatedEngine]:
    gated_engines = [GatedEngine(f"e{index}") for index in range(engines)]

    async def run() -> None:
        async with asyncio.timeout(20):
            await work(EngineClient(gated_engines, deadline_s=30, max_calls=max_calls), *gated_engines)

    asyncio.run(run())
    return gated_engines


async def finish_all(calls: Calls, *engines: GatedEngine) -> None:
    while not all(call.done() for call in calls.values()):
        for engine in engines:
            engine.end(9)
        await run_event_loop()
    for name, call in calls.items():
        assert call.result()[0].request_id == name


def test_waiting_calls_get_capacity_in_arrival_order():
    async def work(client: EngineClient, slow: GatedEngine, fast: GatedEngine) -> None:
        calls = send(client, "abcdefgh")
        await run_event_loop()
        assert (slow.request_ids, fast.request_ids) == (["a", "c"], ["b", "d"])
        assert (await client.metrics())["engines/queued"] == 4
        fast.end()
        await run_event_loop()
        fast.end(2)
        await run_event_loop()
        assert (slow.request_ids, fast.request_ids) == (["a", "c"], ["b", "d", "e", "f", "g"])
        await finish_all(calls, slow, fast)

    slow, fast = run_with_client(work)
    assert (slow.max_open, fast.max_open) == (2, 2)


@pytest.mark.parametrize("kind", ["session", "group"])
def test_session_and_group_wait_for_sticky_engine(kind: str):
    async def work(client: EngineClient, sticky: GatedEngine, other: GatedEngine) -> None:
        first = send(client, "a", **{kind: "s"})
        await run_event_loop()
        await finish_all(first, sticky)
        calls = send(client, "bcd", **{kind: "s"}) | send(client, "x")
        await run_event_loop()
        assert (sticky.request_ids, other.request_ids) == (["a", "b", "c"], ["x"])
        await finish_all(calls, sticky, other)

    sticky, _ = run_with_client(work)
    assert sticky.request_ids == ["a", "b", "c", "d"]


def test_added_and_retired_engines_reroute_waiting_calls():
    async def work(client: EngineClient, old: GatedEngine) -> None:
        calls = send(client, "a", session="s")
        await run_event_loop()
        calls |= send(client, "bc", session="s") | send(client, "d")
        await run_event_loop()
        assert old.request_ids == ["a"]
        client.add("new", new := GatedEngine("new"))
        await run_event_loop()
        assert new.request_ids == ["d"], "the calls of the session wait for their engine"
        client.retire("e0")
        await run_event_loop()
        new.end()
        await run_event_loop()
        assert new.request_ids == ["d", "b"]
        client.unretire("e0")
        await finish_all(calls, old, new)

    run_with_client(work, engines=1, max_calls=1)


@pytest.mark.parametrize("restarts", [True, False])
def test_calls_waiting_for_dead_engine_move_on(restarts: bool):
    async def work(client: EngineClient, dying: GatedEngine, other: GatedEngine) -> None:
        replacement = GatedEngine("e0")

        async def restart() -> None:
            client.replace("e0", replacement)

        client.restart_dead_engines = restart if restarts else None
        calls = send(client, "a", session="s") | send(client, "b")
        await run_event_loop()
        calls |= send(client, "cd", session="s") | send(client, "efg")
        await run_event_loop()
        dying.failures["health"] = other.failures["health"] = EngineError("gone")
        dying.end(1, EngineError("gone"))
        await run_event_loop()
        assert other.request_ids == ["b", "a"], "running requests are resent immediately, and waiting ones wait"
        other.end(2, EngineError("gone"))
        await run_event_loop()
        if restarts:
            failed_call = calls.pop("a")
            await finish_all(calls, replacement)
            assert sorted(replacement.request_ids) == list("bcdefg")
            assert replacement.max_open == 2, "the request of the last engine, and one that waited"
            with pytest.raises(EngineError, match="gone"):  # lost twice
                await failed_call
        else:
            results = await asyncio.gather(*calls.values(), return_exceptions=True)
            assert all(isinstance(result, EngineError) for result in results)

    run_with_client(work, max_calls=1)


@pytest.mark.parametrize("ticks", range(6))
def test_call_cancelled_while_waiting_uses_no_capacity(ticks: int):
    async def work(client: EngineClient, engine: GatedEngine) -> None:
        calls = send(client, "a")
        await run_event_loop()
        calls |= send(client, "bc")
        await run_event_loop()
        engine.end()
        for _ in range(ticks):
            await asyncio.sleep(0)
        cancelled = calls.pop("b")
        cancelled.cancel()
        await asyncio.wait([cancelled])
        await finish_all(calls | send(client, "de"), engine)

    (engine,) = run_with_client(work, engines=1, max_calls=1)
    assert engine.max_open == 1 and engine.request_ids[-3:] == ["c", "d", "e"]


def test_request_aborted_while_waiting_needs_no_engine():
    async def work(client: EngineClient, engine: GatedEngine) -> None:
        calls = send(client, "a")
        await run_event_loop()
        calls |= send(client, "bc")
        await run_event_loop()
        await client.abort(["b"])
        (completion,) = await calls.pop("b")
        assert (completion.request_id, completion.stop_reason, len(completion.token_ids)) == ("b", "abort", 0)
        await finish_all(calls, engine)

    (engine,) = run_with_client(work, engines=1, max_calls=1)
    assert engine.request_ids == ["a", "c"]


def test_no_request_is_sent_during_weight_sync():
    async def work(client: EngineClient, engine: GatedEngine) -> None:
        calls = send(client, "ab")
        await run_event_loop()
        async with client.hold_requests():
            engine.end()
            await run_event_loop()
            assert engine.request_ids == ["a"]
        await finish_all(calls, engine)

    run_with_client(work, engines=1, max_calls=1)


def test_call_ended_by_pause_precedes_later_calls():
    async def work(client: EngineClient, engine: GatedEngine) -> None:
        calls = send(client, "ab")
        await run_event_loop()
        async with client.pause_requests("abort"):
            engine.end(reason="abort")
            await run_event_loop()
        await run_event_loop()
        assert engine.request_ids == ["a", "a"]
        await finish_all(calls, engine)

    run_with_client(work, engines=1, max_calls=1)


def test_reservation_wins_over_newer_group_routing():
    async def work(client: EngineClient, *engines: GatedEngine) -> None:
        calls = send(client, "abc")
        await run_event_loop()
        calls |= send(client, "xyz", group="g")  # the group has no sticky engine yet
        await run_event_loop()
        for engine in engines:
            engine.end()
        await run_event_loop()
        assert [engine.max_open for engine in engines] == [1, 1, 1]
        assert all(len(engine.open) == 1 for engine in engines)
        await finish_all(calls, *engines)

    run_with_client(work, engines=3, max_calls=1)


def test_call_without_available_engine_raises():
    async def work(client: EngineClient, engine: GatedEngine) -> None:
        async def noop() -> None:
            pass

        client.restart_dead_engines = noop
        client.retire("e0")
        with pytest.raises(EngineError, match="No inference engine is left"):
            await send(client, "a")["a"]

    run_with_client(work, engines=1, max_calls=1)


def test_batched_call_ignores_the_limit():
    async def work(client: EngineClient, engine: GatedEngine) -> None:
        batched: Any = BatchedEngineClient(client)

        async def episode(name: str) -> None:
            async with batched.episode():
                await batched.generate([SampleRequest(name, to_token_array((1,)), SamplingParams(4), 0, group=name)])

        running_call = send(client, "x")
        await run_event_loop()
        for names in ("abc", "d"):
            episodes = [asyncio.ensure_future(episode(name)) for name in names]
            await run_event_loop()
            engine.open[1].set_result("stop")  # the first call is still running
            await asyncio.gather(*episodes)
        assert [len(batch) for batch in engine.batches] == [1, 3, 1]
        await finish_all(running_call, engine)

    run_with_client(work, engines=1, max_calls=1)
