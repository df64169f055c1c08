"""Lifecycle: the states of an engine, their transitions and their errors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from skyrl_train.engines.lifecycle import MEMORY_TAGS, EngineState, Lifecycle, await_thread_future, tags_freed_at_level
from skyrl_train.errors import EngineError, UnsupportedParameter, WeightSyncError
from skyrl_train.weight_sync.protocol import Manifest

NOT_LOADED = "'a' is not fully loaded: .* It serves no requests until then"
ASLEEP = r"'a' is asleep; call wake_up\(\) first"
COMPLETE, PARTIAL = Manifest(1, ()), Manifest(1, (), base_version=0)
Change = Callable[[Lifecycle], object]


def discard(lifecycle: Lifecycle) -> None:
    lifecycle.sleep(MEMORY_TAGS, discards_weights=True)
    lifecycle.wake_up(MEMORY_TAGS)


CHANGES: dict[str, Change] = {
    "drain": lambda engine: engine.pause(busy=True),
    "pause": Lifecycle.pause,
    "sleep": lambda engine: engine.sleep(MEMORY_TAGS),
    "load": Lifecycle.invalidate_weights,
    "discard": discard,
    "fail": lambda engine: engine.fail("its process 7 ended"),
    "close": Lifecycle.close,
}


def make_lifecycle(*changes: str) -> Lifecycle:
    lifecycle = Lifecycle("a")
    for change in changes:
        CHANGES[change](lifecycle)
    return lifecycle


@pytest.mark.parametrize(
    ("changes", "state", "error"),
    [
        ("", EngineState.RUNNING, None),
        ("drain", EngineState.DRAINING, None),
        ("pause", EngineState.PAUSED, None),
        ("drain pause", EngineState.PAUSED, None),
        ("pause sleep", EngineState.ASLEEP, ASLEEP),
        ("load", EngineState.LOADING_WEIGHTS, NOT_LOADED),
        ("sleep load", EngineState.LOADING_WEIGHTS, NOT_LOADED),
        ("discard", EngineState.LOADING_WEIGHTS, NOT_LOADED),
        ("load fail", EngineState.BROKEN, "'a' is dead: its process 7 ended"),
        ("pause close", EngineState.CLOSED, "'a' is closed"),
        ("fail close", EngineState.CLOSED, "'a' is dead: its process 7 ended"),
        ("close fail", EngineState.CLOSED, "'a' is closed"),
    ],
)
def test_state_decides_what_is_admitted_and_refused(changes: str, state: EngineState, error: str | None):
    lifecycle = make_lifecycle(*changes.split())
    assert lifecycle.state is state
    assert lifecycle.can_admit == (state is EngineState.RUNNING)
    assert lifecycle.is_halted == (state not in (EngineState.RUNNING, EngineState.DRAINING))
    if error is None:
        lifecycle.check_serving()
        return
    with pytest.raises(EngineError, match=rf"^Engine {error}\.$"):
        lifecycle.check_serving()


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ("", ()),
        ("drain", ("paused",)),
        ("pause", ("paused",)),
        ("sleep", ("paused", "asleep")),
        ("load", ("partially_loaded",)),
        ("discard", ("partially_loaded",)),
    ],
)
def test_health_reports_state_and_counters(changes: str, flags: tuple[str, ...]):
    health = make_lifecycle(*changes.split()).health(3, running=2)
    assert (health.name, health.version, health.running) == ("a", 3, 2)
    assert tuple(flag for flag in ("paused", "asleep", "partially_loaded") if getattr(health, flag)) == flags


@pytest.mark.parametrize("end", ["fail", "close"])
def test_health_of_ended_engine_is_error(end: str):
    with pytest.raises(EngineError, match=r"'a' is (dead|closed)"):
        make_lifecycle(end).health(0)


# -- pausing ----------------------------------------------------------------------------------------------------------


def test_drains_end_together_when_no_request_runs():
    lifecycle = Lifecycle("a")
    lifecycle.finish_draining()
    assert lifecycle.state is EngineState.RUNNING
    drains = [lifecycle.pause(busy=True) for _ in range(2)]
    assert not any(drained.done() for drained in drains)
    lifecycle.finish_draining()
    assert all(drained.done() for drained in drains)
    assert lifecycle.state is EngineState.PAUSED
    lifecycle.resume()
    assert lifecycle.state is EngineState.RUNNING


def test_resume_ends_drain():
    lifecycle = Lifecycle("a")
    drained = lifecycle.pause(busy=True)
    lifecycle.resume()
    assert drained.done()
    assert lifecycle.state is EngineState.RUNNING


@pytest.mark.parametrize("halt", ["pause", "sleep", "load"])
def test_halted_engine_does_not_drain(halt: str):
    lifecycle = make_lifecycle(halt)
    assert lifecycle.pause(busy=True).done(), "its requests would not finish"
    assert lifecycle.pause().done()


# -- memory and weights -----------------------------------------------------------------------------------------------


def test_wakes_by_tags_and_stays_paused():
    lifecycle = make_lifecycle("pause")
    assert lifecycle.sleep(tags_freed_at_level(1)) == {"kv_cache"}
    assert lifecycle.sleep(tags_freed_at_level(2)) == {"weights"}, "the other was freed before"
    assert lifecycle.freed_among(None) == MEMORY_TAGS
    with pytest.raises(EngineError, match=ASLEEP):
        lifecycle.check_serving(allow_freed_cache=True)
    lifecycle.wake_up(lifecycle.freed_among(["weights"]))
    assert lifecycle.freed_among(["weights"]) == frozenset()
    lifecycle.check_serving(allow_freed_cache=True)
    with pytest.raises(EngineError, match=ASLEEP):
        lifecycle.check_serving()
    lifecycle.wake_up(lifecycle.freed_among(None))
    assert lifecycle.state is EngineState.PAUSED


@pytest.mark.parametrize(("call", "state"), [("pause", EngineState.PAUSED), ("resume", EngineState.RUNNING)])
def test_calls_while_asleep_count_after_waking(call: str, state: EngineState):
    lifecycle = Lifecycle("a") if call == "pause" else make_lifecycle("pause")
    lifecycle.sleep(MEMORY_TAGS)
    getattr(lifecycle, call)()
    assert lifecycle.state is EngineState.ASLEEP
    lifecycle.wake_up(MEMORY_TAGS)
    assert lifecycle.state is state


def test_sleeping_without_weights_refuses_sync():
    lifecycle = make_lifecycle("sleep")
    with pytest.raises(EngineError, match=r"'a' sleeps without its weights; call wake_up\(\[\"weights\"\]\) first"):
        lifecycle.check_can_load(COMPLETE)
    lifecycle.wake_up(frozenset({"weights"}))
    lifecycle.check_can_load(PARTIAL)


@pytest.mark.parametrize("change", ["discard", "load"])
def test_lost_weights_need_complete_sync(change: str):
    lifecycle = make_lifecycle(change)
    with pytest.raises(WeightSyncError, match=r"Engine 'a' has no complete weights to update\. Send all tensors"):
        lifecycle.check_can_load(PARTIAL)
    lifecycle.check_can_load(COMPLETE)
    lifecycle.invalidate_weights()
    lifecycle.mark_weights_loaded()
    assert lifecycle.state is EngineState.RUNNING
    lifecycle.check_can_load(PARTIAL)


def test_weights_that_sleep_with_copy_are_not_discarded():
    lifecycle = make_lifecycle("sleep")
    lifecycle.sleep(MEMORY_TAGS, discards_weights=True)
    lifecycle.wake_up(MEMORY_TAGS)
    assert lifecycle.state is EngineState.RUNNING


# -- the end ----------------------------------------------------------------------------------------------------------


def test_only_first_close_closes():
    lifecycle = Lifecycle("a")
    assert [lifecycle.close(), lifecycle.close()] == [True, False]


@pytest.mark.parametrize("error", [UnsupportedParameter("no such adapter"), ZeroDivisionError("by nothing")])
def test_failure_names_engine_and_cause(error: Exception):
    failure = Lifecycle("a").as_engine_error(error)
    if isinstance(error, EngineError):
        assert failure is error
    else:
        assert str(failure) == "Engine 'a' failed: ZeroDivisionError: by nothing"
        assert failure.__cause__ is error


async def wait_for(lifecycle: Lifecycle, future: asyncio.Future[None]) -> None:
    with lifecycle.translate_cancellation():
        await future


def test_call_cancelled_by_end_gets_its_reason():
    async def run() -> None:
        lifecycle, future = make_lifecycle("close"), asyncio.get_running_loop().create_future()
        call = asyncio.ensure_future(wait_for(lifecycle, future))
        await asyncio.sleep(0)
        future.cancel()
        with pytest.raises(EngineError, match="'a' is closed"):
            await call

    asyncio.run(run())


def test_cancelled_caller_of_ended_engine_stays_cancelled():
    async def run() -> None:
        call = asyncio.ensure_future(wait_for(make_lifecycle("close"), asyncio.get_running_loop().create_future()))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call

    asyncio.run(run())


def test_cancelled_caller_leaves_outcome_to_others():
    shared: Future[int] = Future()

    async def run() -> int:
        first, second = (asyncio.ensure_future(await_thread_future(shared)) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        shared.set_result(5)
        return await second

    assert asyncio.run(run()) == 5
