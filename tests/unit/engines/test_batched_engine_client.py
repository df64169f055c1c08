"""Batches of lockstep rollouts do not depend on how long environments take, and nothing deadlocks."""

from __future__ import annotations

import asyncio
import random
from itertools import count
from typing import Any

import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines import client
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import BatchedEngineClient, EngineClient
from skyrl_train.errors import EngineError
from skyrl_train.testing.scripted_engine import ScriptedEngine


def _request(name: str) -> SampleRequest:
    return SampleRequest(name, to_token_array((1, 2)), SamplingParams(max_tokens=3), 0)


def _batches(engine: ScriptedEngine) -> list[list[str]]:
    return [[request.request_id for request in batch] for batch in engine.batches]


def _run(work: Any, engine: ScriptedEngine) -> Any:
    async def run() -> Any:
        async with asyncio.timeout(10):
            return await work(BatchedEngineClient(EngineClient([engine], deadline_s=5)))

    return asyncio.run(run())


@pytest.mark.parametrize("seed", range(5))
def test_batches_do_not_depend_on_environment_latency(seed):
    engine, clock = ScriptedEngine(), random.Random(seed)

    async def episode(lockstep: BatchedEngineClient, name: str, turns: int) -> None:
        async with lockstep.episode():
            for turn in range(turns):
                await asyncio.sleep(clock.random() / 100)
                completion = (await lockstep.generate([_request(f"{name}{turn}")]))[0]
                assert completion.request_id == f"{name}{turn}"
        await asyncio.sleep(clock.random() / 100)

    async def work(lockstep: BatchedEngineClient) -> None:
        await asyncio.gather(*(episode(lockstep, name, turns) for name, turns in [("a", 3), ("b", 1), ("c", 2)]))

    _run(work, engine)
    assert _batches(engine) == [["a0", "b0", "c0"], ["a1", "c1"], ["a2"]]


def test_fast_episode_waits_for_one_about_to_register():
    engine = ScriptedEngine()

    async def episode(lockstep: BatchedEngineClient, name: str) -> None:
        async with lockstep.episode():
            await lockstep.generate([_request(name)])

    async def work(lockstep: BatchedEngineClient) -> None:
        await asyncio.gather(*(episode(lockstep, name) for name in "abc"))

    _run(work, engine)
    assert _batches(engine) == [["a", "b", "c"]]


def test_episode_in_environment_delays_the_others():
    engine = ScriptedEngine()

    async def work(lockstep: BatchedEngineClient) -> int:
        async with lockstep.episode():
            other = asyncio.ensure_future(_generate_alone(lockstep, "other"))
            await asyncio.sleep(0.02)
            sent = len(engine.batches)
            await lockstep.generate([_request("mine")])
        await other
        return sent

    assert _run(work, engine) == 0
    assert _batches(engine) == [["mine", "other"]]


async def _generate_alone(lockstep: BatchedEngineClient, name: str) -> None:
    async with lockstep.episode():
        await lockstep.generate([_request(name)])


def test_failed_or_cancelled_episode_releases_the_others():
    engine = ScriptedEngine()

    async def raises(lockstep: BatchedEngineClient) -> None:
        async with lockstep.episode():
            await asyncio.sleep(0.01)
            raise RuntimeError("environment broke")

    async def hangs(lockstep: BatchedEngineClient) -> None:
        async with lockstep.episode():
            await asyncio.Event().wait()

    async def work(lockstep: BatchedEngineClient) -> None:
        broken, hung = asyncio.ensure_future(raises(lockstep)), asyncio.ensure_future(hangs(lockstep))
        waiting = asyncio.ensure_future(_generate_alone(lockstep, "sound"))
        cut = asyncio.ensure_future(_generate_alone(lockstep, "cut"))
        with pytest.raises(RuntimeError):
            await broken
        assert not waiting.done()
        hung.cancel()
        cut.cancel()
        await waiting

    _run(work, engine)
    assert _batches(engine) == [["sound"]]


def test_engine_error_reaches_all_callers():
    engine = ScriptedEngine(failures={"generate": EngineError("broken")})

    async def work(lockstep: BatchedEngineClient) -> list[Any]:
        return await asyncio.gather(*(_generate_alone(lockstep, name) for name in "ab"), return_exceptions=True)

    for error in _run(work, engine):
        assert isinstance(error, EngineError)
        assert "broken" in str(error)


def test_requests_of_episode_and_its_tasks_stay_together():
    engine = ScriptedEngine()

    async def group(lockstep: BatchedEngineClient, name: str) -> None:
        async with lockstep.episode():
            await lockstep.generate([_request(f"{name}0"), _request(f"{name}1")])
            await asyncio.gather(*(lockstep.generate([_request(f"{name}{n}")]) for n in (2, 3)))

    async def work(lockstep: BatchedEngineClient) -> None:
        await asyncio.gather(group(lockstep, "a"), group(lockstep, "b"))

    _run(work, engine)
    assert _batches(engine) == [["a0", "a1", "b0", "b1"], ["a2", "a3", "b2", "b3"]]


def test_requests_outside_episodes_get_completions():
    engine = ScriptedEngine()

    async def work(lockstep: BatchedEngineClient) -> Any:
        return await lockstep.generate([_request("evaluation")])

    assert _run(work, engine)[0].token_ids.tolist() == [1, 2]


def test_waiting_episodes_are_not_recounted_per_call(monkeypatch: pytest.MonkeyPatch):
    """Numbers of episodes count how often they are looked up: some times each, whoever else waits."""

    class Number(int):
        looked_up = 0

        def __hash__(self) -> int:
            Number.looked_up += 1
            return super().__hash__()

    engine, episodes, turns = ScriptedEngine(), 300, 3

    async def episode(lockstep: BatchedEngineClient, index: int) -> None:
        async with lockstep.episode():
            for turn in range(turns):
                for _ in range(index):  # they come one by one
                    await asyncio.sleep(0)
                await lockstep.generate([_request(f"{index}.{turn}")])

    async def work(lockstep: BatchedEngineClient) -> None:
        await asyncio.gather(*(episode(lockstep, index) for index in range(episodes)))

    monkeypatch.setattr(client, "count", lambda: map(Number, count()))
    _run(work, engine)
    assert [len(batch) for batch in engine.batches] == [episodes] * turns
    assert Number.looked_up < 20 * episodes * turns
