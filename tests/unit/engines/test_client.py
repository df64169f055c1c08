"""EngineClient: routing of requests, handling of dead engines, and calls to all engines."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines import client as client_module
from skyrl_train.engines.base import EngineHealth, SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import DeadlineExceeded, EngineError, UnsupportedParameter, WorkerDied
from skyrl_train.testing.scripted_engine import ALL_CAPABILITIES, ScriptedEngine


def _request(name: str, group: str = "", session: str = "", **more: Any) -> SampleRequest:
    return SampleRequest(
        name, to_token_array((1, 2, 3)), SamplingParams(max_tokens=4), 0, session=session, group=group, **more
    )


def _engines(count: int = 2, **options: Any) -> list[ScriptedEngine]:
    return [ScriptedEngine(name=f"e{index}", **options) for index in range(count)]


def _request_ids(engine: ScriptedEngine) -> list[str]:
    return [request.request_id for batch in engine.batches for request in batch]


def test_one_call_per_engine_and_completions_in_order():
    engines = _engines(2)
    client = EngineClient(engines, deadline_s=5)
    requests = [_request(f"r{n}", group=f"g{n // 2}") for n in range(8)]
    completions = asyncio.run(client.generate(requests))
    assert [c.request_id for c in completions] == [r.request_id for r in requests]
    assert [len(engine.batches) for engine in engines] == [1, 1]
    assert _request_ids(engines[0]) == ["r0", "r1", "r4", "r5"]
    assert _request_ids(engines[1]) == ["r2", "r3", "r6", "r7"]


def test_split_depends_only_on_requests():
    requests = [_request(f"r{n}", group=f"g{n // 3}", session=f"s{n}") for n in range(20)]
    splits = []
    for delays in ([0.0, 0.0, 0.0], [0.02, 0.0, 0.01]):
        engines = [ScriptedEngine(name=f"e{index}", delay_s=delay) for index, delay in enumerate(delays)]
        asyncio.run(EngineClient(engines, deadline_s=5).generate(requests))
        splits.append([_request_ids(engine) for engine in engines])
    assert splits[0] == splits[1]
    assert sorted(map(len, splits[0])) == [6, 6, 8]


def test_session_stays_on_engine_with_its_history():
    engines = _engines(3)

    async def run():
        client = EngineClient(engines, deadline_s=5)
        for turn in range(3):
            await client.generate([_request(f"{name}{turn}", session=name) for name in ("a", "b", "c")])

    asyncio.run(run())
    assert [_request_ids(engine) for engine in engines] == [
        [f"{name}{t}" for t in range(3)] for name in ("a", "b", "c")
    ]


@pytest.mark.defect("many-conversations-lose-sticky-routing")
@pytest.mark.parametrize("at_once", [True, False])
def test_routing_entry_lasts_until_conversation_ends(monkeypatch: pytest.MonkeyPatch, at_once: bool):
    """Like ConversationGenerator, send the first turns of all groups together or by group, and later turns singly."""
    monkeypatch.setattr(client_module, "MAX_STICKY", 4)
    engines, random_source = _engines(3, delay_s=0.001), random.Random(0)
    client = EngineClient(engines, deadline_s=5)
    names = [[f"{group}.{sample}" for sample in range(8)] for group in range(20)]

    async def turn(number: int, sessions: list[str]) -> None:
        requests = [_request(f"{name} {number}", session=name, group=name.partition(".")[0]) for name in sessions]
        await client.generate(requests)

    async def continue_conversation(name: str) -> None:
        async with client.episode():
            await asyncio.sleep(random_source.random() / 100)
            await turn(1, [name])

    async def run() -> None:
        flat = [name for group in names for name in group]
        await asyncio.gather(*(turn(0, group) for group in ([flat] if at_once else names)))
        await asyncio.gather(*map(continue_conversation, flat))
        for number in range(1300):  # more than the capacity of the routing table
            await client.generate([_request("other", session=f"other {number}")])
        for group in names:  # their entries are gone, so the idle engines take turns
            await turn(2, group[:1])

    asyncio.run(run())
    for engine in engines:
        turns = [name.split() for name in _request_ids(engine) if name != "other"]
        assert {name for name, number in turns if number == "0"} == {name for name, number in turns if number == "1"}
    engine_of = {name: index for index, engine in enumerate(engines) for name in _request_ids(engine)}
    resumed = [engine_of[f"{group[0]} 2"] for group in names]
    assert sorted(resumed[:3]) == [0, 1, 2]
    assert resumed == [resumed[number % 3] for number in range(20)], "entries of finished conversations are kept"
    assert resumed != [engine_of[f"{group[0]} 1"] for group in names]


@pytest.mark.parametrize("max_calls", [None, 4])
def test_idle_engines_take_turns(max_calls: int | None):
    """Agents often wait for their tools, so that no engine has load when the next session starts."""
    engines = _engines(3)
    client = EngineClient(engines, deadline_s=5, max_calls=max_calls)

    async def run() -> None:
        for session in "abcd":
            await client.generate([_request(f"{session}1", session=session)])
        for session in "dcba":
            await client.generate([_request(f"{session}2", session=session)])

    asyncio.run(run())
    assert [_request_ids(engine) for engine in engines] == [["a1", "d1", "d2", "a2"], ["b1", "b2"], ["c1", "c2"]]


def test_unrouted_request_goes_to_least_loaded_engine():
    engines = _engines(2, delay_s=lambda request: 2.0 if request.request_id == "long" else 0.0)

    async def run():
        client = EngineClient(engines, deadline_s=5)
        long = asyncio.ensure_future(client.generate([_request("long")]))
        await asyncio.sleep(0.3)
        for name in ("x", "y"):
            await client.generate([_request(name)])
        await long
        await client.generate([_request("z")])

    asyncio.run(run())
    assert _request_ids(engines[0]) == ["long", "z"]
    assert _request_ids(engines[1]) == ["x", "y"]


@pytest.mark.fault("F29")
@pytest.mark.parametrize("death", [EngineError("e0 died"), WorkerDied("e0 was killed"), ConnectionError("reset")])
def test_requests_of_dead_engine_are_retried_once(death):
    engines = _engines(2)
    engines[0].failures |= {"generate": death, "health": death}

    async def run():
        client = EngineClient(engines, deadline_s=5)
        completions = await client.generate([_request(f"r{n}", session=f"s{n}") for n in range(4)])
        await client.generate([_request("later", session="s0")])
        return completions, client.dead_engines, client.engines

    completions, dead, alive = asyncio.run(run())
    assert [c.request_id for c in completions] == ["r0", "r1", "r2", "r3"]
    assert _request_ids(engines[1]) == ["r1", "r3", "r0", "r2", "later"]
    assert list(dead) == ["e0"]
    assert str(death) in dead["e0"]
    assert alive == [engines[1]]


@pytest.mark.fault("F29")
def test_hanging_engine_is_abandoned_after_request_deadline(monkeypatch):
    monkeypatch.setattr("skyrl_train.engines.client.HEALTH_TIMEOUT_S", 1.0)
    hanging, healthy = _engines(2)
    hanging.abort = hanging.generate = _never  # type: ignore[method-assign,assignment]

    async def run():
        client = EngineClient([hanging, healthy], deadline_s=1.0)
        completions = await client.generate([replace(_request(f"r{n}"), deadline_s=1.0) for n in range(2)])
        dead = client.dead_engines
        await client.close()
        return completions, dead

    completions, dead = asyncio.run(run())
    assert [c.stop_reason for c in completions] == ["stop", "stop"]
    assert "e0.generate did not finish within 2 s" in dead["e0"]


async def _never(*_: Any) -> Any:
    await asyncio.Event().wait()


def test_error_names_all_engines_if_none_is_left():
    engines = _engines(2, failures=dict.fromkeys(("generate", "health"), EngineError("out of memory")))
    client = EngineClient(engines, deadline_s=5)
    for _ in range(2):
        with pytest.raises(EngineError) as caught:
            asyncio.run(client.generate([_request("a"), _request("b")]))
        assert "e0: EngineError: out of memory" in str(caught.value)
        assert "e1: EngineError: out of memory" in str(caught.value)


def test_replacement_engine_gets_requests():
    engines = _engines(1, failures=dict.fromkeys(("generate", "health"), EngineError("gone")))
    client = EngineClient(engines, deadline_s=5)
    with pytest.raises(EngineError):
        asyncio.run(client.generate([_request("a")]))
    replacement = ScriptedEngine(name="e0")
    client.replace("e0", replacement)
    asyncio.run(client.generate([_request("b")]))
    assert _request_ids(replacement) == ["b"]
    assert client.dead_engines == {}


def test_partial_tokens_come_from_the_engines_with_requests():
    engines = [ScriptedEngine(lambda request: range(100), name=f"e{n}", delay_s=0.3) for n in range(2)]

    async def run():
        client = EngineClient(engines, deadline_s=30)
        call = asyncio.ensure_future(client.generate([_request(name) for name in "abc"]))
        await asyncio.sleep(0.1)
        first = await client.partial_tokens(["a", "b", "unknown"])
        engines[0].failures["partial_tokens"] = EngineError("no")
        second = await client.partial_tokens(["a", "b", "c"])
        await call
        return first, second, await client.partial_tokens(["a", "b", "c"])

    first, second, last = asyncio.run(run())
    assert first.keys() == {"a", "b"} and last == {}
    assert second.keys() == set(_request_ids(engines[1]))


def test_partial_tokens_skip_an_engine_that_does_not_answer(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.engines.client.PARTIAL_TOKENS_TIMEOUT_S", 0.05)
    engines = [ScriptedEngine(name=f"e{n}", delay_s=0.5) for n in range(2)]
    engines[0].partial_tokens = _never  # type: ignore[method-assign,assignment]

    async def run():
        client = EngineClient(engines, deadline_s=30)
        call = asyncio.ensure_future(client.generate([_request("a"), _request("b")]))
        await asyncio.sleep(0.3)
        found = await client.partial_tokens(["a", "b"])
        await call
        return found, client.dead_engines

    found, dead = asyncio.run(run())
    assert found.keys() == set(_request_ids(engines[1])) and not dead


def test_unsupported_request_kills_no_engine():
    engines = _engines(2, capabilities=replace(ALL_CAPABILITIES, sampling=frozenset()))
    client = EngineClient(engines, deadline_s=5)
    picky = replace(_request("a"), sampling=SamplingParams(max_tokens=4, top_k=3))
    with pytest.raises(UnsupportedParameter, match="top_k=3"):
        asyncio.run(client.generate([picky]))
    assert client.dead_engines == {}


def test_cancelling_aborts_requests_on_engines():
    engines = _engines(2, delay_s=60.0)

    async def run():
        client = EngineClient(engines, deadline_s=120)
        call = asyncio.ensure_future(client.generate([_request("a"), _request("b")]))
        await asyncio.sleep(0.3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await asyncio.sleep(0.3)

    asyncio.run(run())
    assert [engine.calls for engine in engines] == [["generate", "abort"]] * 2


@pytest.mark.defect("cancelled-requests-count-as-load")
@pytest.mark.parametrize("ticks", range(4))
def test_cancelled_requests_do_not_count_as_load(ticks: int):
    engines = _engines(2, delay_s=0.05)

    async def run() -> None:
        client = EngineClient(engines, deadline_s=5)
        call = asyncio.ensure_future(client.generate([_request(f"a{n}", session="a") for n in range(2)]))
        for _ in range(ticks):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
        running = asyncio.ensure_future(client.generate([_request("b")]))
        await asyncio.sleep(0.02)
        await client.generate([_request("x")])
        await running

    asyncio.run(run())
    assert [sum(name in "bx" for name in _request_ids(engine)) for engine in engines] == [1, 1]


def test_calls_reach_every_live_engine():
    engines = _engines(3)

    async def run():
        client = EngineClient(engines, deadline_s=5)
        await client.pause("abort")
        await client.resume()
        freed = await client.sleep()
        await client.wake_up(["weights"])
        await client.wake_up()
        await client.abort(["x"])
        await client.reset_prefix_cache()
        names = [health.name for health in await client.health()]
        await client.close()
        return freed, names

    freed, names = asyncio.run(run())
    assert freed == 0
    assert names == ["e0", "e1", "e2"]
    for engine in engines:
        expected = ["pause", "resume", "sleep", "wake_up", "wake_up", "abort", "reset_prefix_cache", "health", "close"]
        assert [call for call in engine.calls if call != "abort"] == [call for call in expected if call != "abort"]


def test_engine_that_hangs_in_call_is_marked_dead():
    engines = _engines(2)
    engines[1].resume = _never  # type: ignore[method-assign,assignment]
    client = EngineClient(engines, deadline_s=1)
    asyncio.run(client.resume())
    assert engines[0].calls == ["resume"]
    assert "e1.resume did not finish within 1 s" in client.dead_engines["e1"]


@pytest.mark.defect("pause-waits-for-hung-engine")
@pytest.mark.parametrize("method", ["pause", "resume"])
def test_pause_has_same_timeout_for_hanging_engine(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.engines.client.HEALTH_TIMEOUT_S", 0.1)
    engines = _engines(2)
    setattr(engines[1], method, _never)
    engines[1].health = _never  # type: ignore[method-assign,assignment]

    async def run() -> None:
        client = EngineClient(engines, deadline_s=600, health_check_interval_s=0.1)
        async with asyncio.timeout(5), client.pause_requests("keep"):
            pass
        assert list(client.dead_engines) == ["e1"]

    asyncio.run(run())


@pytest.mark.defect("long-step-counts-as-death")
@pytest.mark.parametrize("method", ["pause", "resume"])
def test_responsive_engine_in_long_step_stays_alive(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.engines.client.HEALTH_TIMEOUT_S", 0.1)
    engines = _engines(2)
    original = getattr(engines[1], method)

    async def finish_late(*args: object) -> None:
        await asyncio.sleep(0.6)  # longer than the timeout of a health check
        await original(*args)

    async def run() -> dict[str, str]:
        client = EngineClient(engines, deadline_s=1800, health_check_interval_s=0.1)
        async with client.pause_requests("keep"):
            pass
        return client.dead_engines

    setattr(engines[1], method, finish_late)
    assert asyncio.run(run()) == {}
    monkeypatch.setattr(client_module, "MAX_STEP_S", 0.3)
    assert list(asyncio.run(run())) == ["e1"]


def test_cancelled_restart_ends_and_no_other_starts():
    begun: list[bool] = []
    ended: list[bool] = []

    async def restart() -> None:
        begun.append(True)
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)  # releases its resources
            ended.append(True)

    async def run() -> None:
        engines = _engines(2)
        client = EngineClient(engines, deadline_s=5)
        client.restart_dead_engines = restart
        engines[0].failures["health"] = EngineError("gone")
        await client.health()
        client.start_restart()
        await asyncio.sleep(0)
        await client.cancel_restart()
        assert ended == [True]
        client.start_restart()
        await asyncio.sleep(0)
        assert begun == [True]

    asyncio.run(run())


def test_call_that_kills_last_engine_names_it():
    engines = _engines(1)
    engines[0].resume = _never  # type: ignore[method-assign,assignment]
    with pytest.raises(DeadlineExceeded, match=r"e0\.resume did not finish within 0.05 s"):
        asyncio.run(EngineClient(engines, deadline_s=0.05).resume())


def test_tokens_per_second_counts_only_busy_time():
    async def run():
        client = EngineClient(_engines(2, delay_s=0.05), deadline_s=60)
        completions = await client.generate([_request(f"r{n}") for n in range(4)])
        await asyncio.sleep(3)
        return (
            sum(len(completion.token_ids) for completion in completions),
            await client.metrics(),
            await client.metrics(),
        )

    tokens, metrics, later = asyncio.run(run())
    assert tokens / 2 < metrics["engines/tokens_per_s"] <= tokens / 0.05
    assert metrics["engines/dead"] == metrics["engines/running"] == 0
    assert later["engines/tokens_per_s"] == 0


class _MemoryReportingEngine(ScriptedEngine):
    """An engine that reports its peak memory."""

    peak_gib = 0.0

    async def health(self) -> EngineHealth:
        return EngineHealth(self.name, 0, extra={"peak_rss_gib": self.peak_gib, "else": 9.0})


def test_memory_is_maximum_over_engines():
    engines = [_MemoryReportingEngine(name="e0"), _MemoryReportingEngine(name="e1"), ScriptedEngine(name="e2")]
    engines[0].peak_gib, engines[1].peak_gib = 1.5, 0.5  # type: ignore[attr-defined]
    metrics = asyncio.run(EngineClient(engines, deadline_s=5).metrics())
    assert {name: value for name, value in metrics.items() if "gib" in name} == {"memory/engine_peak_rss_gib": 1.5}


class _DraftingEngine(ScriptedEngine):
    """An engine that reports drafts."""

    async def health(self) -> EngineHealth:
        return EngineHealth(self.name, 0, draft_steps=4, accepted_drafts=6)


def test_accepted_drafts_are_counted_per_step():
    async def metrics() -> list[dict[str, float]]:
        client = EngineClient([_DraftingEngine(name="e0"), ScriptedEngine(name="e1")], deadline_s=5)
        return [await client.metrics(), await client.metrics()]

    name = "engines/accepted_drafts_per_step"
    first, without_steps = asyncio.run(metrics())
    assert first[name] == 1.5
    assert name not in without_steps


def test_request_error_of_healthy_engine_is_retried_once():
    engines = _engines(2)
    engines[0].failures["generate"] = EngineError("could not do that")

    async def run():
        client = EngineClient(engines, deadline_s=5)
        completions = await client.generate([_request("a")])
        engines[1].failures["generate"] = EngineError("nor could I")
        with pytest.raises(EngineError, match="nor could I"):
            await client.generate([_request("b")])
        return completions, client.dead_engines

    completions, dead = asyncio.run(run())
    assert [completion.request_id for completion in completions] == ["a"]
    assert dead == {}


def test_late_failure_of_replaced_engine_spares_replacement():
    old, new = ScriptedEngine(name="e0", delay_s=60.0), ScriptedEngine(name="e0")

    async def run():
        client = EngineClient([old], deadline_s=120)
        slow = asyncio.ensure_future(client.generate([_request("slow")]))
        await asyncio.sleep(0.3)
        client.replace("e0", new)
        old.failures["health"] = EngineError("gone")
        old.partially_loaded = True
        slow.cancel()
        await asyncio.gather(slow, return_exceptions=True)
        old.failures["abort"] = EngineError("gone")
        await asyncio.sleep(0.3)
        await client.generate([_request("next")])
        return client.dead_engines

    assert asyncio.run(run()) == {}


@pytest.mark.fault("F29")
def test_short_deadline_does_not_kill_busy_engine(monkeypatch):
    monkeypatch.setattr("skyrl_train.engines.client.HEALTH_TIMEOUT_S", 0.1)
    (engine,) = _engines(1)
    generate = engine.generate

    async def generate_slowly(requests: Any) -> Any:
        await asyncio.sleep(0.6)  # no counter changes: tokens are counted when a request finishes
        return await generate(requests)

    engine.generate = generate_slowly  # type: ignore[method-assign]

    async def run():
        client = EngineClient([engine], deadline_s=30)
        await client.generate([replace(_request("late"), deadline_s=0.05)])
        return client.dead_engines

    assert asyncio.run(run()) == {}


def test_paused_requests_continue_and_new_ones_wait():
    engines = _engines(2, delay_s=0.05)

    async def run() -> tuple[bool, list[str]]:
        client = EngineClient(engines, deadline_s=5)
        first = asyncio.ensure_future(client.generate([_request("a"), _request("b")]))
        await asyncio.sleep(0.01)
        async with client.pause_requests("keep"):
            late = asyncio.ensure_future(client.generate([_request("c")]))
            await asyncio.sleep(0.1)
            waited = not first.done() and not any("c" in _request_ids(engine) for engine in engines)
        return waited, [completion.stop_reason for completion in (*await first, *await late)]

    waited, reasons = asyncio.run(run())
    assert waited
    assert reasons == ["stop"] * 3


def test_aborted_requests_are_resampled_with_same_seed():
    engines = _engines(2, delay_s=0.5)

    async def run() -> tuple[list[Any], dict[str, float]]:
        client = EngineClient(engines, deadline_s=5)
        running = asyncio.ensure_future(client.generate([_request("a"), _request("b", deadline_s=30.0)]))
        await asyncio.sleep(0.01)
        async with client.pause_requests("abort"):
            for engine in engines:
                engine.version = 7
        return await running, await client.metrics()

    completions, metrics = asyncio.run(run())
    assert [(done.request_id, done.stop_reason, done.versions[0].version) for done in completions] == [
        ("a", "stop", 7),
        ("b", "stop", 7),
    ]
    assert [_request_ids(engine) for engine in engines] == [["a", "a"], ["b", "b"]]
    assert metrics["engines/wasted_tokens"] == 0, "no token was sampled before the pause"


def test_request_ended_by_deadline_is_not_resampled():
    (engine,) = _engines(1, delay_s=10.0)

    async def run() -> list[Any]:
        client = EngineClient([engine], deadline_s=5)
        running = asyncio.ensure_future(client.generate([_request("a", deadline_s=0.02)]))
        await asyncio.sleep(0.1)
        async with client.pause_requests("abort"):
            pass
        return await running

    (completion,) = asyncio.run(run())
    assert completion.stop_reason == "abort"
    assert _request_ids(engine) == ["a"]
