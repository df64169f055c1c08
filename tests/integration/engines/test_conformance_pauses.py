"""Every engine pauses between two tokens and continues, with new weights or unchanged."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import UnsupportedParameter
from skyrl_train.experiment.publisher import PAUSE_MODES
from tests.support.engine_harness import (
    LONG_PROMPT,
    LONGEST,
    MAX_NUM_SEQS,
    PROMPT,
    TOLERANCE,
    EngineHarness,
    assert_logprobs,
    assert_spans,
    largest_difference,
    long_requests,
)
from tests.support.reference_sampler import Reference


def paused_with_new_weights(
    bench: EngineHarness, mode: str, requests: list[SampleRequest]
) -> tuple[list[Any], Any, list[int]]:
    """Sync new weights during a pause.

    Returns:
        The completions of `requests`, the completion of a request that arrived during the pause, and the versions
        before and after.
    """

    async def run() -> tuple[list[Any], Any, list[int]]:
        old = (await bench.engine.health()).version
        calls = bench.start(*requests)
        await bench.wait_until_running(len(requests))
        await bench.engine.pause(mode)
        late = bench.start(bench.request(PROMPT, temperature=0.0, max_tokens=12))
        assert (await bench.engine.health()).paused
        await bench.publish(bench.random_model(1), probed=True)
        await asyncio.sleep(0.05)
        assert not late.done(), "a request that arrives during a pause must wait"
        await bench.engine.resume()
        return await calls, (await late)[0], [old, old + 1]

    return bench.run(run())


def lacks_mode(bench: EngineHarness, mode: str) -> bool:
    """True if the engine lacks a pause mode. This also checks that the engine rejects the mode by name."""
    if mode in bench.capabilities.pause_modes:
        return False
    with pytest.raises(UnsupportedParameter, match=mode) as caught:
        bench.run(bench.engine.pause(mode))
    assert bench.capabilities.name in str(caught.value)
    assert bench.refusal_reason(mode)
    return True


def assert_new_weights(bench: EngineHarness, late: Any, version: int) -> None:
    new = Reference(bench.model)
    assert late.token_ids.tolist() == new.greedy(PROMPT, 12)
    assert_spans(late, [version])
    assert late.versions[0].version == version


def test_pause_keep_continues_with_new_weights(bench: EngineHarness, reference: Reference):
    if lacks_mode(bench, "keep"):
        return
    requests = long_requests(bench)
    completions, late, versions = paused_with_new_weights(bench, "keep", requests)
    assert_new_weights(bench, late, versions[1])
    new = Reference(bench.model)
    for request, completion in zip(requests, completions, strict=True):
        assert (len(completion.token_ids), completion.stop_reason) == (LONGEST, "length")
        assert_spans(completion, versions)
        before, after = completion.versions
        old = reference.score([[*request.token_ids.tolist(), *completion.token_ids[: before.stop].tolist()]])[0]
        assert (
            largest_difference(completion.full_logprobs[: before.stop], old[len(request.token_ids) - 1 :]) <= TOLERANCE
        )
        expected = new.full_logprobs_after(reference, request.token_ids, completion.token_ids, after.start)
        assert largest_difference(completion.full_logprobs[after.start :], expected) <= TOLERANCE


def test_pause_retract_prefills_again_with_new_weights(bench: EngineHarness, reference: Reference):
    if lacks_mode(bench, "retract"):
        return
    requests = long_requests(bench)
    completions, late, versions = paused_with_new_weights(bench, "retract", requests)
    assert_new_weights(bench, late, versions[1])
    new = Reference(bench.model)
    for request, completion in zip(requests, completions, strict=True):
        assert (len(completion.token_ids), completion.stop_reason) == (LONGEST, "length")
        assert_spans(completion, versions)
        before, after = completion.versions
        ids, start = [*request.token_ids.tolist(), *completion.token_ids.tolist()], len(request.token_ids) - 1
        (old_scores,), (new_scores,) = reference.score([ids]), new.score([ids])
        expected = [*old_scores[start:][: before.stop], *new_scores[start:][after.start :]]
        assert largest_difference(completion.full_logprobs, expected) <= TOLERANCE


def test_pause_abort_returns_tokens_so_far(bench: EngineHarness, reference: Reference):
    if lacks_mode(bench, "abort"):
        return
    requests = long_requests(bench)
    completions, late, versions = paused_with_new_weights(bench, "abort", requests)
    assert_new_weights(bench, late, versions[1])
    for request, completion in zip(requests, completions, strict=True):
        assert completion.stop_reason == "abort"
        assert 0 < len(completion.token_ids) < LONGEST
        assert_spans(completion, versions[:1])
        assert_logprobs(reference, request, completion)


def test_pause_wait_finishes_running_requests_with_old_weights(bench: EngineHarness, reference: Reference):
    if lacks_mode(bench, "wait"):
        return
    requests = long_requests(bench)
    completions, late, versions = paused_with_new_weights(bench, "wait", requests)
    assert_new_weights(bench, late, versions[1])
    for request, completion in zip(requests, completions, strict=True):
        assert (len(completion.token_ids), completion.stop_reason) == (LONGEST, "length")
        assert_spans(completion, versions[:1])
        assert_logprobs(reference, request, completion)


@pytest.mark.parametrize(
    "on_sync", ["recompute", *(pytest.param(other, marks=pytest.mark.on_demand) for other in ("keep", "abort"))]
)
def test_sync_loses_none_of_64_active_requests(bench: EngineHarness, reference: Reference, on_sync: str):
    """The sync of an asynchronous run, with 16 running requests and 48 in the queue."""
    if lacks_mode(bench, PAUSE_MODES[on_sync]):
        return
    tokens = [LONGEST if n < MAX_NUM_SEQS else 4 for n in range(64)]
    requests = [
        bench.request((*PROMPT, n), temperature=0.0, max_tokens=max_tokens) for n, max_tokens in enumerate(tokens)
    ]
    client = EngineClient([bench.engine], deadline_s=60)

    async def run() -> tuple[list[Completion], list[int], dict[str, float]]:
        old = (await bench.engine.health()).version
        running = [asyncio.ensure_future(client.generate([request])) for request in requests[:MAX_NUM_SEQS]]
        await bench.wait_until_running(MAX_NUM_SEQS)
        waiting = [asyncio.ensure_future(client.generate([request])) for request in requests[MAX_NUM_SEQS:]]
        await asyncio.sleep(0.05)
        async with client.pause_requests(PAUSE_MODES[on_sync]):
            await bench.publish(bench.random_model(1))
        results = await asyncio.gather(*running, *waiting)
        return [completion for (completion,) in results], [old, old + 1], await client.metrics()

    completions, versions, metrics = bench.run(run())
    assert [len(completion.token_ids) for completion in completions] == tokens
    assert {completion.stop_reason for completion in completions} == {"length"}
    spans = [assert_spans(completion, versions) for completion in completions]
    assert all(request_spans[-1].version == versions[1] for request_spans in spans)
    assert all(len(request_spans) == 1 for request_spans in spans[MAX_NUM_SEQS:]), "requests that waited"
    assert all(len(request_spans) == (1 if on_sync == "abort" else 2) for request_spans in spans[:MAX_NUM_SEQS])
    assert (metrics["engines/wasted_tokens"] >= MAX_NUM_SEQS) == (on_sync == "abort")
    if on_sync != "keep":
        tails = [
            (completion, request_spans[-1].start) for completion, request_spans in zip(completions, spans, strict=True)
        ]
        expected = bench.generate(
            *(
                bench.request(
                    np.concatenate((request.token_ids, completion.token_ids[:start])).tolist(),
                    temperature=0.0,
                    max_tokens=len(completion.token_ids) - start,
                )
                for request, (completion, start) in zip(requests, tails, strict=True)
            )
        )
        assert [completion.token_ids[start:].tolist() for completion, start in tails] == [
            completion.token_ids.tolist() for completion in expected
        ]


def test_queued_request_uses_only_new_weights(bench: EngineHarness, reference: Reference):
    if lacks_mode(bench, "keep"):
        return
    running = [bench.request(LONG_PROMPT, seed=n, max_tokens=min(400, LONGEST)) for n in range(MAX_NUM_SEQS)]
    queued = bench.request(LONG_PROMPT, seed=99, max_tokens=12)  # It waits, because the engine is full.

    async def run() -> list[Any]:
        calls = bench.start(*running)
        await bench.wait_until_running(MAX_NUM_SEQS)
        last = bench.start(queued)
        await asyncio.sleep(0.05)
        await bench.engine.pause("keep")
        await bench.publish(bench.random_model(1))
        await bench.engine.resume()
        await calls
        return await last

    (completion,) = bench.run(run())
    assert_spans(completion, [bench.run(bench.engine.health()).version])
    assert_logprobs(Reference(bench.model), queued, completion)


def test_pause_and_resume_do_not_change_results(bench: EngineHarness, reference: Reference):
    for mode in sorted(bench.capabilities.pause_modes - {"abort"}):
        request = bench.request(PROMPT, seed=5, max_tokens=LONGEST)

        async def run(mode: str = mode, request: SampleRequest = request) -> list[Any]:
            call = bench.start(request)
            await bench.wait_until_running()
            await bench.engine.pause(mode)
            await bench.engine.resume()
            return await call

        (completion,) = bench.run(run())
        assert (len(completion.token_ids), completion.stop_reason) == (LONGEST, "length")
        assert_logprobs(reference, request, completion)


def test_unknown_pause_mode_is_rejected_by_name(bench: EngineHarness):
    with pytest.raises(UnsupportedParameter, match="later"):
        bench.run(bench.engine.pause("later"))
    assert not bench.run(bench.engine.health()).paused
