"""ScriptedEngine implements the parts of the engine protocol that tests rely on."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import InferenceEngine, SampleRequest, SamplingParams, VersionSpan
from skyrl_train.errors import EngineError
from skyrl_train.testing.scripted_engine import ScriptedEngine

REQUEST = SampleRequest("r", to_token_array((5, 6, 7)), SamplingParams(max_tokens=2), 0)


def test_completions_come_from_function_up_to_max_tokens():
    engine: InferenceEngine = ScriptedEngine(lambda request: [9] * len(request.token_ids))
    (truncated,) = asyncio.run(engine.generate([REQUEST]))
    assert (truncated.token_ids.tolist(), truncated.stop_reason, truncated.versions) == (
        [9, 9],
        "length",
        [VersionSpan(0, 2, 0)],
    )
    (complete,) = asyncio.run(engine.generate([replace(REQUEST, sampling=SamplingParams(max_tokens=9))]))
    assert (len(complete.token_ids), complete.stop_reason) == (3, "stop")


def test_deadlines_and_aborts_end_slow_requests():
    async def run():
        engine = ScriptedEngine(delay_s=60)
        (expired,) = await engine.generate([replace(REQUEST, deadline_s=0.01)])
        call = asyncio.ensure_future(engine.generate([REQUEST]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.abort(["r"])
        return expired, (await call)[0]

    for completion in asyncio.run(run()):
        assert (completion.token_ids.tolist(), completion.stop_reason) == ([], "abort")


def test_paused_requests_wait_and_closed_engine_rejects():
    async def run():
        engine = ScriptedEngine()
        await engine.pause()
        call = asyncio.ensure_future(engine.generate([REQUEST]))
        await asyncio.sleep(0.01)
        assert not call.done()
        await engine.resume()
        await call
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await engine.generate([REQUEST])

    asyncio.run(run())


def test_partial_tokens_arrive_over_the_delay():
    async def run():
        engine = ScriptedEngine(lambda request: range(100), delay_s=0.2)
        request = replace(REQUEST, sampling=SamplingParams(max_tokens=100))
        call = asyncio.ensure_future(engine.generate([request]))
        seen = []
        while not call.done():
            seen.append((await engine.partial_tokens(["r", "other"])).get("r", ()))
            await asyncio.sleep(0.01)
        assert await engine.partial_tokens(["r"]) == {}
        return [list(ids) for ids in seen]

    seen = asyncio.run(run())
    assert all(ids == list(range(len(ids))) for ids in seen)
    assert len({len(ids) for ids in seen}) > 5


def test_aborted_request_returns_the_tokens_seen():
    async def run():
        engine = ScriptedEngine(lambda request: range(100), delay_s=0.2)
        call = asyncio.ensure_future(engine.generate([replace(REQUEST, sampling=SamplingParams(max_tokens=100))]))
        while not (seen := await engine.partial_tokens(["r"])):
            await asyncio.sleep(0.01)
        await engine.abort(["r"])
        return seen["r"].tolist(), (await call)[0]

    seen, completion = asyncio.run(run())
    assert completion.stop_reason == "abort"
    assert completion.token_ids[: len(seen)].tolist() == seen
