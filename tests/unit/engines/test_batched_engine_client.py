"""BatchedEngineClient: batches do not depend on the latency of environments, and no episode deadlocks."""

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

    async def episode(batched: BatchedEngineClient, name: str, turns: int) -> None:
        async with batched.episode():
            for turn in range(turns):
                await asyncio.sleep(clock.random() / 100)
                completion = (await batched.generate([_request(f"{name}{turn}")]))[0]
                assert completion.request_id == f"{name}{turn}"
        await asyncio.sleep(clock.random() / 100)

    async def work(batched: BatchedEngineClient) -> None:
        await asyncio.gather(*(episode(batched, name, turns) for name, turns in [("a", 3), ("b", 1), ("c", 2)]))

    _run(work, engine)
    assert _batches(engine) == [["a0", "b0", "c0"], ["a1", "c1"], ["a2"]]


def test_fast_episode_waits_for_one_about_to_register():
    engine = ScriptedEngine()

    async def episode(batched: BatchedEngineClient, name: str) -> None:
        async with batched.episode():
            await batched.generate([_request(name)])

    async def work(batched: BatchedEngineClient) -> None:
        await asyncio.gather(*(episode(batched, name) for name in "abc"))

    _run(work, engine)
    assert _batches(engine) == [["a", "b", "c"]]


def test_episode_in_environment_delays_the_others():
    engine = ScriptedEngine()

    async def work(batched: BatchedEngineClient) -> int:
        async with batched.episode():
            other_task = asyncio.ensure_future(_generate_alone(batched, "other"))
            await asyncio.sleep(0.02)
            num_batches = len(engine.batches)
            await batched.generate([_request("mine")])
        await other_task
        return num_batches

    assert _run(work, engine) == 0
    assert _batches(engine) == [["mine", "other"]]


async def _generate_alone(batched: BatchedEngineClient, name: str) -> None:
    async with batched.episode():
        await batched.generate([_request(name)])


def test_failed_or_cancelled_episode_releases_the_others():
    engine = ScriptedEngine()

    async def raises(batched: BatchedEngineClient) -> None:
        async with batched.episode():
            await asyncio.sleep(0.01)
            raise RuntimeError("environment failed")

    async def hangs(batched: BatchedEngineClient) -> None:
        async with batched.episode():
            await asyncio.Event().wait()

    async def work(batched: BatchedEngineClient) -> None:
        broken, hanging = asyncio.ensure_future(raises(batched)), asyncio.ensure_future(hangs(batched))
        waiting = asyncio.ensure_future(_generate_alone(batched, "sound"))
        cancelled = asyncio.ensure_future(_generate_alone(batched, "cancelled"))
        with pytest.raises(RuntimeError):
            await broken
        assert not waiting.done()
        hanging.cancel()
        cancelled.cancel()
        await waiting

    _run(work, engine)
    assert _batches(engine) == [["sound"]]


def test_engine_error_reaches_all_callers():
    engine = ScriptedEngine(failures={"generate": EngineError("broken")})

    async def work(batched: BatchedEngineClient) -> list[Any]:
        return await asyncio.gather(*(_generate_alone(batched, name) for name in "ab"), return_exceptions=True)

    for error in _run(work, engine):
        assert isinstance(error, EngineError)
        assert "broken" in str(error)


def test_requests_of_episode_and_its_tasks_stay_together():
    engine = ScriptedEngine()

    async def group(batched: BatchedEngineClient, name: str) -> None:
        async with batched.episode():
            await batched.generate([_request(f"{name}0"), _request(f"{name}1")])
            await asyncio.gather(*(batched.generate([_request(f"{name}{n}")]) for n in (2, 3)))

    async def work(batched: BatchedEngineClient) -> None:
        await asyncio.gather(group(batched, "a"), group(batched, "b"))

    _run(work, engine)
    assert _batches(engine) == [["a0", "a1", "b0", "b1"], ["a2", "a3", "b2", "b3"]]


def test_requests_outside_episodes_get_completions():
    engine = ScriptedEngine()

    async def work(batched: BatchedEngineClient) -> Any:
        return await batched.generate([_request("evaluation")])

    assert _run(work, engine)[0].token_ids.tolist() == [1, 2]


def test_waiting_episodes_are_not_recounted_per_call(monkeypatch: pytest.MonkeyPatch):
    """The ids of episodes are hashed a constant number of times per call, however many episodes wait."""

    class CountingId(int):
        num_hashes = 0

        def __hash__(self) -> int:
            CountingId.num_hashes += 1
            return super().__hash__()

    engine, episodes, turns = ScriptedEngine(), 300, 3

    async def episode(batched: BatchedEngineClient, index: int) -> None:
        async with batched.episode():
            for turn in range(turns):
                for _ in range(index):  # episodes call one after another
                    await asyncio.sleep(0)
                await batched.generate([_request(f"{index}.{turn}")])

    async def work(batched: BatchedEngineClient) -> None:
        await asyncio.gather(*(episode(batched, index) for index in range(episodes)))

    monkeypatch.setattr(client, "count", lambda: map(CountingId, count()))
    _run(work, engine)
    assert [len(batch) for batch in engine.batches] == [episodes] * turns
    assert CountingId.num_hashes < 20 * episodes * turns
