"""An engine has a bounded number of calls; the others wait in the client, and none is lost there."""

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


class Gated(ScriptedEngine):
    """An engine of which each call ends when it is told to, in the order in which they came."""

    def __init__(self, name: str):
        super().__init__(name=name)
        self.open: list[asyncio.Future[str]] = []
        self.most = 0

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        gate: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.open.append(gate)
        self.most = max(self.most, len(self.open))
        self.batches.append(list(requests))
        try:
            reason = await gate
        finally:
            self.open.remove(gate)
        tokens, logprobs = np.ones(1, np.int32), -np.ones(1, np.float32)
        return [Completion(one.request_id, tokens, logprobs, logprobs, reason, []) for one in requests]

    def end(self, calls: int = 1, error: Exception | None = None, reason: str = "stop") -> None:
        for gate in self.open[:calls]:
            gate.set_exception(error) if error else gate.set_result(reason)

    @property
    def served(self) -> list[str]:
        return [one.request_id for batch in self.batches for one in batch]


Sent = dict[str, asyncio.Task[list[Completion]]]


def send(client: EngineClient, names: str, session: str = "", group: str = "") -> Sent:
    """A call of one request for each letter."""

    async def call(name: str) -> list[Completion]:
        request = SampleRequest(name, to_token_array((1, 2)), SamplingParams(4), 0, session=session, group=group)
        return await client.generate([request])

    return {name: asyncio.ensure_future(call(name)) for name in names}


async def settle() -> None:
    for _ in range(60):
        await asyncio.sleep(0)


def play(work: Callable[..., Awaitable[None]], engines: int = 2, most: int = 2) -> list[Gated]:
    made = [Gated(f"e{index}") for index in range(engines)]

    async def run() -> None:
        async with asyncio.timeout(20):
            await work(EngineClient(made, deadline_s=30, max_calls=most), *made)

    asyncio.run(run())
    return made


async def ended(calls: Sent, *engines: Gated) -> None:
    while not all(call.done() for call in calls.values()):
        for engine in engines:
            engine.end(9)
        await settle()
    for name, call in calls.items():
        assert call.result()[0].request_id == name


def test_waiting_calls_get_capacity_in_arrival_order():
    async def work(client: EngineClient, slow: Gated, fast: Gated) -> None:
        calls = send(client, "abcdefgh")
        await settle()
        assert (slow.served, fast.served) == (["a", "c"], ["b", "d"])
        assert (await client.metrics())["engines/queued"] == 4
        fast.end()
        await settle()
        fast.end(2)
        await settle()
        assert (slow.served, fast.served) == (["a", "c"], ["b", "d", "e", "f", "g"])
        await ended(calls, slow, fast)

    slow, fast = play(work)
    assert (slow.most, fast.most) == (2, 2)


@pytest.mark.parametrize("kind", ["session", "group"])
def test_session_and_group_wait_for_sticky_engine(kind: str):
    async def work(client: EngineClient, home: Gated, other: Gated) -> None:
        first = send(client, "a", **{kind: "s"})
        await settle()
        await ended(first, home)
        calls = send(client, "bcd", **{kind: "s"}) | send(client, "x")
        await settle()
        assert (home.served, other.served) == (["a", "b", "c"], ["x"])
        await ended(calls, home, other)

    home, _ = play(work)
    assert home.served == ["a", "b", "c", "d"]


def test_added_and_retired_engines_reroute_waiting_calls():
    async def work(client: EngineClient, old: Gated) -> None:
        calls = send(client, "a", session="s")
        await settle()
        calls |= send(client, "bc", session="s") | send(client, "d")
        await settle()
        assert old.served == ["a"]
        client.add("new", new := Gated("new"))
        await settle()
        assert new.served == ["d"], "the others wait for their engine"
        client.retire("e0")
        await settle()
        new.end()
        await settle()
        assert new.served == ["d", "b"]
        client.unretire("e0")
        await ended(calls, old, new)

    play(work, engines=1, most=1)


@pytest.mark.parametrize("revives", [True, False])
def test_calls_waiting_for_dead_engine_move_on(revives: bool):
    async def work(client: EngineClient, one: Gated, other: Gated) -> None:
        again = Gated("e0")

        async def revive() -> None:
            client.replace("e0", again)

        client.restart_dead_engines = revive if revives else None
        calls = send(client, "a", session="s") | send(client, "b")
        await settle()
        calls |= send(client, "cd", session="s") | send(client, "efg")
        await settle()
        one.failures["health"] = other.failures["health"] = EngineError("gone")
        one.end(1, EngineError("gone"))
        await settle()
        assert other.served == ["b", "a"], "what an engine had is sent at once, what waited for it waits"
        other.end(2, EngineError("gone"))
        await settle()
        if revives:
            lost = calls.pop("a")
            await ended(calls, again)
            assert sorted(again.served) == list("bcdefg")
            assert again.most == 2, "what the last engine had, and one that waited"
            with pytest.raises(EngineError, match="gone"):  # a second time
                await lost
        else:
            results = await asyncio.gather(*calls.values(), return_exceptions=True)
            assert all(isinstance(one, EngineError) for one in results)

    play(work, most=1)


@pytest.mark.parametrize("ticks", range(6))
def test_call_cancelled_while_waiting_uses_no_capacity(ticks: int):
    async def work(client: EngineClient, engine: Gated) -> None:
        calls = send(client, "a")
        await settle()
        calls |= send(client, "bc")
        await settle()
        engine.end()
        for _ in range(ticks):
            await asyncio.sleep(0)
        cut = calls.pop("b")
        cut.cancel()
        await asyncio.wait([cut])
        await ended(calls | send(client, "de"), engine)

    (engine,) = play(work, engines=1, most=1)
    assert engine.most == 1 and engine.served[-3:] == ["c", "d", "e"]


def test_request_aborted_while_waiting_needs_no_engine():
    async def work(client: EngineClient, engine: Gated) -> None:
        calls = send(client, "a")
        await settle()
        calls |= send(client, "bc")
        await settle()
        await client.abort(["b"])
        (completion,) = await calls.pop("b")
        assert (completion.request_id, completion.stop_reason, len(completion.token_ids)) == ("b", "abort", 0)
        await ended(calls, engine)

    (engine,) = play(work, engines=1, most=1)
    assert engine.served == ["a", "c"]


def test_no_request_is_sent_during_weight_sync():
    async def work(client: EngineClient, engine: Gated) -> None:
        calls = send(client, "ab")
        await settle()
        async with client.hold_requests():
            engine.end()
            await settle()
            assert engine.served == ["a"]
        await ended(calls, engine)

    play(work, engines=1, most=1)


def test_call_ended_by_pause_precedes_later_calls():
    async def work(client: EngineClient, engine: Gated) -> None:
        calls = send(client, "ab")
        await settle()
        async with client.pause_requests("abort"):
            engine.end(reason="abort")
            await settle()
        await settle()
        assert engine.served == ["a", "a"]
        await ended(calls, engine)

    play(work, engines=1, most=1)


def test_reservation_wins_over_newer_group_routing():
    async def work(client: EngineClient, *engines: Gated) -> None:
        calls = send(client, "abc")
        await settle()
        calls |= send(client, "xyz", group="g")  # none of them has a home yet
        await settle()
        for engine in engines:
            engine.end()
        await settle()
        assert [engine.most for engine in engines] == [1, 1, 1]
        assert all(len(engine.open) == 1 for engine in engines)
        await ended(calls, *engines)

    play(work, engines=3, most=1)


def test_call_without_available_engine_raises():
    async def work(client: EngineClient, engine: Gated) -> None:
        async def nothing() -> None:
            pass

        client.restart_dead_engines = nothing
        client.retire("e0")
        with pytest.raises(EngineError, match="no inference engine left"):
            await send(client, "a")["a"]

    play(work, engines=1, most=1)


def test_batched_call_ignores_the_limit():
    async def work(client: EngineClient, engine: Gated) -> None:
        lockstep: Any = BatchedEngineClient(client)

        async def episode(name: str) -> None:
            async with lockstep.episode():
                await lockstep.generate([SampleRequest(name, to_token_array((1,)), SamplingParams(4), 0, group=name)])

        busy = send(client, "x")
        await settle()
        for names in ("abc", "d"):
            episodes = [asyncio.ensure_future(episode(name)) for name in names]
            await settle()
            engine.open[1].set_result("stop")  # the first one is still under way
            await asyncio.gather(*episodes)
        assert [len(batch) for batch in engine.batches] == [1, 3, 1]
        await ended(busy, engine)

    play(work, engines=1, most=1)
