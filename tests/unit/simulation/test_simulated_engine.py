"""Simulated engines and learners take the expected virtual time, and record the version of each token."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from skyrl_train.config.schema import Config
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.errors import EngineError
from tests.support.simulation import virtual_time
from tests.support.simulation.engine import SimulatedEngine
from tests.support.simulation.run import RunShape, build_run
from tests.support.simulation.timings import EngineTimings, LearnerTimings, ResponseLengths, Timings

STEP_S, PER_SEQUENCE_S = 0.5, 0.25
BALANCED = Timings(
    engine=EngineTimings(decode_s=0.1, decode_per_sequence_s=0.0, prefill_tokens_per_s=1e9),
    learner=LearnerTimings(0.0, 0.0, step_s=6.4),
    sync_s=0.0,
    response=ResponseLengths(64.0, 0.0),
)
"""Timings with which a response of 64 tokens takes as long as an update."""


def request(name: str, tokens: int, prompt: int = 1) -> SampleRequest:
    return SampleRequest(name, to_token_array((0,) * prompt), SamplingParams(max_tokens=tokens), 0)


def engine(**timings: float) -> SimulatedEngine:
    settings = {"decode_s": STEP_S, "prefill_tokens_per_s": 1e9} | timings
    return SimulatedEngine(lambda request: request.sampling.max_tokens, EngineTimings(**settings), name="e")  # type: ignore[arg-type]


def test_virtual_time_skips_waits_and_detects_deadlock(monkeypatch: pytest.MonkeyPatch):
    async def wait() -> float:
        await asyncio.gather(*(asyncio.sleep(3600.0 * hours) for hours in range(100)))
        return asyncio.get_running_loop().time()

    assert virtual_time.run(wait()) == pytest.approx(99 * 3600)
    monkeypatch.setattr(virtual_time, "_THREAD_S", 0.1)
    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(asyncio.Event().wait())


def test_sequences_share_steps_and_slow_each_other():
    async def run() -> list[float]:
        subject = engine(decode_per_sequence_s=PER_SEQUENCE_S, max_num_seqs=2)
        ends = []

        async def generate(name: str, tokens: int) -> None:
            await subject.generate([request(name, tokens)])
            ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(generate("a", 4), generate("b", 8), generate("waits", 4))
        return ends

    both, alone = STEP_S + 2 * PER_SEQUENCE_S, STEP_S + PER_SEQUENCE_S
    assert virtual_time.run(run()) == pytest.approx([4 * both, 8 * both, 8 * both], abs=1e-6)
    assert alone < both


def test_group_prompt_is_prefilled_once():
    async def run() -> float:
        subject = engine(prefill_tokens_per_s=10.0)
        await subject.generate([replace(request(str(n), 2, prompt=20), group="g") for n in range(3)])
        return asyncio.get_running_loop().time()

    assert virtual_time.run(run()) == pytest.approx(20 / 10 + 2 * STEP_S)


@pytest.mark.parametrize("mode", ["keep", "retract", "abort"])
def test_tokens_have_the_version_that_sampled_them(mode: str):
    async def run() -> tuple[Completion, float]:
        subject = engine(prefill_tokens_per_s=1.0)
        call = asyncio.ensure_future(subject.generate([request("a", 10, prompt=1)]))
        await asyncio.sleep(1.0 + 4 * STEP_S + 0.1)
        await subject.pause(mode)
        await asyncio.sleep(100.0)
        await subject.commit_weights(7)
        await subject.resume()
        (completion,) = await call
        return completion, asyncio.get_running_loop().time()

    completion, end_s = virtual_time.run(run())
    spans = [(span.start, span.stop, span.version) for span in completion.versions]
    if mode == "abort":
        assert (completion.stop_reason, spans) == ("abort", [(0, 4, 0)])
        return
    assert spans == [(0, 4, 0), (4, 10, 7)]
    prefill_s = 5.0 if mode == "retract" else 0.0  # for the prompt and four tokens
    assert end_s == pytest.approx(1.0 + 10 * STEP_S + 100.0 + prefill_s)


def test_dead_engine_fails_all_requests():
    async def run() -> None:
        subject = engine()
        running = asyncio.ensure_future(subject.generate([request("a", 10)]))
        await asyncio.sleep(1.0)
        subject.die()
        for call in (running, subject.generate([request("b", 1)]), subject.health()):
            with pytest.raises(EngineError, match="e "):
                await call

    virtual_time.run(run())


@pytest.mark.parametrize(("staleness", "step_s"), [(0, 12.8), (1, 6.4)])
def test_rollouts_ahead_overlap_with_updates(staleness: int, step_s: float):
    """Generation and update take 6.4 s each."""

    async def seconds(steps: int) -> float:
        cfg = Config()
        cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt = 4, 4
        built = build_run(cfg, BALANCED, RunShape(1, staleness), steps)
        await built.trainer.fit()
        await built.client.close()
        return asyncio.get_running_loop().time()

    elapsed_s = virtual_time.run(seconds(12)) - virtual_time.run(seconds(4))
    assert elapsed_s / 8 == pytest.approx(step_s, rel=0.01)
