"""Restarts of dead engines: they get current weights before requests, and their number is limited."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import ClusterLost, EngineError, EnginesLost, InsufficientResources, WorkerDied
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.trainer.publisher import WeightPublisher
from tests.support.publishers import publisher_of


class KillableEngine(ScriptedEngine):
    """An engine that dies at its first request, unless it is alive."""

    def __init__(self, name: str, is_alive: bool = False):
        super().__init__(name=name)
        self.is_alive = is_alive
        self.synced = False

    async def generate(self, requests: Any) -> Any:
        if not self.is_alive:
            raise EngineError(f"{self.name} was killed")
        assert self.synced, "request before the current weights"
        return await super().generate(requests)

    async def health(self) -> Any:
        if not self.is_alive:
            raise EngineError(f"{self.name} was killed")
        return await super().health()


async def mark_synced(engine: KillableEngine) -> None:
    engine.synced = True


def publisher_with_engines(
    engines: list[KillableEngine],
    max_restarts: int,
    may_start: asyncio.Event | None = None,
    started: list[str] | None = None,
    pause_mode: str | None = None,
) -> tuple[EngineClient, WeightPublisher]:
    """Return a client and publisher. Engines start once `may_start` is set; `started` receives their names."""
    client = EngineClient(engines, deadline_s=5)

    async def start(name: str, wait_for_node: bool) -> KillableEngine:
        if started is not None:
            started.append(name)
        if may_start is not None:
            await may_start.wait()
        return KillableEngine(name, is_alive=True)

    return client, publisher_of(client, start, mark_synced, max_engine_restarts=max_restarts, pause_mode=pause_mode)


def request(name: str) -> SampleRequest:
    return SampleRequest(name, to_token_array((1, 2, 3)), SamplingParams(max_tokens=4), 0)


@pytest.mark.fault("F29")
def test_requests_wait_for_a_restarted_engine():
    client, publisher = publisher_with_engines([KillableEngine("a"), KillableEngine("b")], max_restarts=4)
    answers = asyncio.run(client.generate([request("r1"), request("r2")]))
    assert [answer.request_id for answer in answers] == ["r1", "r2"]
    assert client.dead_engines == {}
    assert publisher.restarts == 2


@pytest.mark.fault("F29")
def test_used_up_restarts_name_the_first_cause():
    client, _ = publisher_with_engines([KillableEngine("a")], max_restarts=0)
    with pytest.raises(EnginesLost, match=r"a died \(EngineError: a was killed\), and all 0 restarts that generator\."):
        asyncio.run(client.generate([request("r1")]))


@pytest.mark.fault("F29")
def test_failed_restarts_count_against_the_limit():
    client = EngineClient([KillableEngine("a")], deadline_s=5)
    started: list[KillableEngine] = []

    async def start(name: str, wait_for_node: bool) -> KillableEngine:
        started.append(KillableEngine(name, is_alive=True))
        return started[-1]

    async def sync(engine: KillableEngine) -> None:
        if len(started) < 3:
            raise EngineError("the transfer was interrupted")
        engine.synced = True

    publisher = publisher_of(client, start, sync, max_engine_restarts=3)
    (answer,) = asyncio.run(client.generate([request("r1")]))
    assert answer.request_id == "r1"
    assert publisher.restarts == 3
    assert [engine.closed for engine in started] == [True, True, False]


@pytest.mark.defect("C7-engine-restart-not-logged")
def test_restart_logs_engine_cause_and_count(caplog: pytest.LogCaptureFixture):
    client, _ = publisher_with_engines([KillableEngine("a")], max_restarts=4)
    asyncio.run(client.generate([request("r1")]))
    (line,) = [record.message for record in caplog.records if record.name == "skyrl_train.trainer.publisher"]
    assert re.fullmatch(
        r"a died \(EngineError: a was killed\) and was restarted with the current weights in \d+\.\d s "
        r"\(restart 1 of at most 4, see generator\.max_engine_restarts\)\.",
        line,
    )


@pytest.mark.defect("C2-engines-restart-on-dead-node")
def test_lost_cluster_ends_restarts():
    started: list[str] = []

    async def start(name: str, wait_for_node: bool) -> KillableEngine:
        started.append(name)
        raise ClusterLost("a node of this run died.")

    async def never(engine: KillableEngine) -> None:
        raise AssertionError("there is no engine")

    client = EngineClient([KillableEngine("a")], deadline_s=5)
    publisher_of(client, start, never, max_engine_restarts=3)
    with pytest.raises(EnginesLost, match=r"a was killed.*cannot be restarted: a node of this run died"):
        asyncio.run(client.generate([request("r1")]))
    assert started == ["a"]


@pytest.mark.defect("engine-restarts-without-trainer-rank")
def test_restart_is_not_repeated_without_responsive_ranks():
    started: list[str] = []

    async def start(name: str, wait_for_node: bool) -> KillableEngine:
        started.append(name)
        return KillableEngine(name, is_alive=True)

    async def sync(engine: KillableEngine) -> None:
        raise WorkerDied("rank 0 died during connect_weights")

    client = EngineClient([KillableEngine("a")], deadline_s=5)
    publisher_of(client, start, sync, max_engine_restarts=3)
    with pytest.raises(EnginesLost, match="a rank of the trainer does not respond: rank 0 died"):
        asyncio.run(client.generate([request("r1")]))
    assert started == ["a"]


@pytest.mark.fault("F29")
def test_canceled_request_does_not_cancel_restart():
    may_start = asyncio.Event()
    client, publisher = publisher_with_engines([KillableEngine("a")], 1, may_start)

    async def run() -> None:
        for name in ("r1", "r2"):
            canceled = asyncio.ensure_future(client.generate([request(name)]))
            await asyncio.sleep(0.02)
            canceled.cancel()
            await asyncio.gather(canceled, return_exceptions=True)
        may_start.set()
        await client.generate([request("r3")])

    asyncio.run(run())
    assert publisher.restarts == 1


@pytest.mark.fault("F31")
def test_engine_does_not_join_during_a_sync():
    survivor, may_start, may_load = KillableEngine("b", is_alive=True), asyncio.Event(), asyncio.Event()
    client = EngineClient([KillableEngine("a"), survivor], deadline_s=5)
    order: list[str] = []

    async def start(name: str, wait_for_node: bool) -> KillableEngine:
        await may_start.wait()
        order.append(f"{name} starts")
        return KillableEngine(name, is_alive=True)

    async def sync(engine: KillableEngine) -> None:
        await may_load.wait()
        await mark_synced(engine)
        order.append(f"{engine.name} has weights")

    publisher = publisher_of(client, start, sync, max_engine_restarts=1, pause_mode="keep")

    async def run() -> None:
        await client.health()  # marks the dead engine
        client.start_restart()
        publishing = asyncio.ensure_future(publisher.publish(1))
        await asyncio.sleep(0.02)
        may_start.set()
        await asyncio.sleep(0.02)
        assert (order, list(client.dead_engines)) == (["a starts"], ["a"])
        may_load.set()
        await publishing
        await client.wait_for_restart()

    asyncio.run(run())
    assert order == ["a starts", "b has weights", "a has weights"]
    assert (client.dead_engines, publisher.restarts) == ({}, 1)


def test_live_engines_are_not_restarted():
    alive = KillableEngine("a", is_alive=True)
    alive.synced = True
    client, publisher = publisher_with_engines([alive, KillableEngine("b")], max_restarts=1)

    async def run() -> None:
        await client.generate([request("r1"), request("r2")])
        assert list(client.dead_engines) == ["b"]
        await publisher.restart_dead_engines()

    asyncio.run(run())
    assert client.engines[0] is alive
    assert len(client.engines) == 2
    assert publisher.restarts == 1


@pytest.mark.defect("sync-waits-for-engine-restart")
def test_sync_does_not_wait_for_starting_engines():
    second, survivor, may_start = (
        KillableEngine("b", is_alive=True),
        KillableEngine("c", is_alive=True),
        asyncio.Event(),
    )
    second.synced = survivor.synced = True
    started: list[str] = []
    client, publisher = publisher_with_engines(
        [KillableEngine("a"), second, survivor], 4, may_start, started, pause_mode="keep"
    )

    async def run() -> None:
        await client.generate([request("r1")])  # goes to a first, and then to another engine
        second.is_alive = False
        await client.generate([request("r2"), request("r3")])  # one of them goes to b
        assert started == ["a"] and list(client.dead_engines) == ["a", "b"]
        async with asyncio.timeout(1):
            await publisher.publish(1)
        assert client.engines == [survivor]
        may_start.set()
        async with asyncio.timeout(5):
            while client.dead_engines:
                await asyncio.sleep(0.01)

    asyncio.run(run())
    assert started == ["a", "b"]


@pytest.mark.defect("sync-waits-for-engine-restart")
def test_next_sync_raises_failed_background_restart():
    async def run() -> None:
        other = KillableEngine("b", is_alive=True)
        other.synced = True
        client, _ = publisher_with_engines([KillableEngine("a"), other], max_restarts=0, pause_mode="keep")
        client.start_restart()
        await client.generate([request("r1"), request("r2")])
        await asyncio.sleep(0.02)
        with pytest.raises(EnginesLost, match="a died"):
            client.start_restart()

    asyncio.run(run())


@pytest.mark.parametrize("immediately", [True, False])
def test_dead_engine_restarts_immediately_in_async_runs(immediately: bool):
    async def run() -> tuple[dict[str, str], int]:
        other = KillableEngine("b", is_alive=True)
        other.synced = True
        mode = "keep" if immediately else None
        client, publisher = publisher_with_engines([KillableEngine("a"), other], max_restarts=4, pause_mode=mode)
        await client.generate([request("r1"), request("r2")])
        await asyncio.sleep(0.05)
        return client.dead_engines, publisher.restarts

    dead, restarts = asyncio.run(run())
    assert (list(dead), restarts) == (([], 1) if immediately else (["a"], 0))


@pytest.mark.defect("rollouts-wait-for-all-restarts")
def test_first_restarted_engine_serves_while_others_start():
    async def run() -> None:
        client = EngineClient([KillableEngine("a"), KillableEngine("b")], deadline_s=5)
        others_may_start = asyncio.Event()

        async def start(name: str, wait_for_node: bool) -> KillableEngine:
            if name == "b":
                await others_may_start.wait()
            return KillableEngine(name, is_alive=True)

        publisher_of(client, start, mark_synced, max_engine_restarts=4, pause_mode="keep")
        assert await client.health() == []
        async with asyncio.timeout(2):
            (completion,) = await client.generate([request("r1")])
        assert len(completion.token_ids) and list(client.dead_engines) == ["b"]
        others_may_start.set()
        async with asyncio.timeout(2):
            while client.dead_engines:
                await asyncio.sleep(0.01)

    asyncio.run(run())


@pytest.mark.parametrize("others", [True, False])
def test_engine_without_node_is_retried_later(others: bool, caplog: pytest.LogCaptureFixture):
    has_node = False

    async def start(name: str, wait_for_node: bool) -> KillableEngine:
        if not has_node:
            raise InsufficientResources("the others have no room.")
        return KillableEngine(name, is_alive=True)

    client = EngineClient(
        [KillableEngine("a"), *([KillableEngine("b", is_alive=True)] if others else [])], deadline_s=5
    )
    publisher = publisher_of(client, start, mark_synced, max_engine_restarts=1)

    async def run() -> None:
        nonlocal has_node
        await client.health() if others else None
        if not others:
            with pytest.raises(EnginesLost, match=r"no engine is left, and it cannot be restarted: the others have"):
                await client.generate([request("r1")])
            return
        for _ in range(3):
            await publisher.restart_dead_engines()
        assert (list(client.dead_engines), publisher.restarts) == (["a"], 0), "it uses up no restart"
        publisher.restarts = 1  # other engines have used up all restarts
        await publisher.restart_dead_engines()
        assert list(client.dead_engines) == ["a"], "it remains stopped"
        publisher.restarts = 0
        has_node = True
        await publisher.restart_dead_engines()
        assert (client.dead_engines, publisher.restarts) == ({}, 1)

    asyncio.run(run())
    if others:
        stopped, restarted = [
            record.message for record in caplog.records if record.name == "skyrl_train.trainer.publisher"
        ]
        assert "a was killed) and remains stopped: the others have no room." in stopped
        assert "was restarted" in restarted


@pytest.mark.defect("engines-of-lost-node-restart-serially")
def test_only_one_engine_waits_for_a_node():
    attempts: list[tuple[str, bool]] = []
    with_node = {"d"}

    async def start(name: str, wait_for_node: bool) -> KillableEngine:
        attempts.append((name, wait_for_node))
        if name not in with_node:
            raise InsufficientResources("the others have no room.")
        return KillableEngine(name, is_alive=True)

    last = KillableEngine("d", is_alive=True)
    client = EngineClient([KillableEngine("a"), KillableEngine("b"), KillableEngine("c"), last], deadline_s=5)
    publisher = publisher_of(client, start, mark_synced, max_engine_restarts=9)

    async def run() -> None:
        await client.health()
        await publisher.restart_dead_engines()
        assert attempts == [("a", True), ("b", False), ("c", False)]
        attempts.clear()
        last.is_alive = False
        await client.health()
        await publisher.restart_dead_engines()
        assert (attempts[0], list(client.dead_engines)) == (("d", True), ["a", "b", "c"])
        attempts.clear()
        with_node.update("abc")
        await publisher.restart_dead_engines()
        assert client.dead_engines == {}

    asyncio.run(run())
