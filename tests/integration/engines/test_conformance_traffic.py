"""Every engine with concurrent requests: aborts, deadlines, sleep, prefix cache, adapters."""

from __future__ import annotations

import asyncio
import math
from contextlib import suppress
from typing import Any

import pytest
import torch

from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.errors import EngineError, UnsupportedParameter
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
from tests.support.tiny_adapters import merged, save_tiny_adapter

# -- concurrent requests ----------------------------------------------------------------------------------------------


def test_64_concurrent_requests_get_their_own_completions(bench: EngineHarness, reference: Reference):
    requests = [
        bench.request((n + 3, 2 * n + 3, 100), temperature=0.0, max_tokens=4 + n % 5, name=f"r{n}") for n in range(64)
    ]

    async def generate_all() -> list[Any]:
        return await asyncio.gather(*(bench.engine.generate([request]) for request in requests))

    for request, (completion,) in zip(requests, bench.run(generate_all()), strict=True):
        assert completion.request_id == request.request_id
        assert completion.token_ids.tolist() == reference.greedy(request.token_ids, request.sampling.max_tokens)


def test_no_request_is_active_after_all_completions(bench: EngineHarness, reference: Reference):
    bench.generate(*(bench.request(PROMPT, seed=n) for n in range(5)))
    health = bench.run(bench.engine.health())
    assert (health.name, health.running, health.queued) == (bench.capabilities.name, 0, 0)
    assert not (health.paused or health.asleep or health.partially_loaded)


def test_no_requests_give_no_completions(bench: EngineHarness):
    assert bench.generate() == []


# -- aborts and deadlines ---------------------------------------------------------------------------------------------


def test_abort_returns_what_was_sampled(bench: EngineHarness, reference: Reference):
    requests = long_requests(bench)

    async def run() -> list[Any]:
        calls = bench.start(*requests)
        await bench.wait_until_running(len(requests))
        await bench.engine.abort([requests[0].request_id, requests[2].request_id, "unknown"])
        return await calls

    completions = bench.run(run())
    assert [c.stop_reason for c in completions] == ["abort", "length", "abort", "length"]
    version = bench.run(bench.engine.health()).version
    for request, completion in zip(requests, completions, strict=True):
        if completion.stop_reason == "abort":
            assert 0 < len(completion.token_ids) < LONGEST
        assert_spans(completion, [version])
        assert_logprobs(reference, request, completion)


def test_a_deadline_ends_a_request_as_aborted(bench: EngineHarness, reference: Reference):
    request = bench.request(PROMPT, max_tokens=LONGEST, deadline_s=0.1)
    others = long_requests(bench, 3)
    late, *rest = bench.generate(request, *others)
    assert (late.stop_reason, [c.stop_reason for c in rest]) == ("abort", ["length"] * 3)
    assert len(late.token_ids) < LONGEST
    assert_logprobs(reference, request, late)


def test_deadline_passes_while_paused(bench: EngineHarness, reference: Reference):
    async def run() -> list[Any]:
        await bench.engine.pause(bench.pause_mode)
        try:
            return await bench.engine.generate([bench.request(PROMPT, deadline_s=0.1)])
        finally:
            await bench.engine.resume()

    (completion,) = bench.run(run(), timeout_s=30)
    assert (completion.stop_reason, completion.token_ids.tolist()) == ("abort", [])


@pytest.mark.defect("queued-requests-time-out")
def test_queueing_time_does_not_count_against_deadline(bench: EngineHarness, reference: Reference):
    async def run() -> tuple[Completion, list[Completion]]:
        await bench.engine.pause(bench.pause_mode)
        ahead = bench.start(*(bench.request((*PROMPT, n)) for n in range(MAX_NUM_SEQS)))
        await asyncio.sleep(0)  # The requests ahead arrive first.
        last = bench.start(bench.request(PROMPT, max_tokens=2, deadline_s=1.0))
        await asyncio.sleep(1.5)
        await bench.engine.resume()
        return (await last)[0], await ahead

    last, ahead = bench.run(run(), timeout_s=60)
    assert (last.stop_reason, len(last.token_ids)) == ("length", 2)
    assert last.running_s < 1.0
    assert {completion.stop_reason for completion in ahead} == {"length"}


def test_cancelled_call_aborts_its_requests(bench: EngineHarness, reference: Reference):
    async def run() -> None:
        call = bench.start(*long_requests(bench, 2))
        await bench.wait_until_running(2)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        async with asyncio.timeout(10):
            while (await bench.engine.health()).running:
                await asyncio.sleep(0.01)

    bench.run(run())


# -- invalid requests and callers -------------------------------------------------------------------------------------


def test_duplicate_active_request_id_is_rejected(bench: EngineHarness, reference: Reference):
    (first,) = long_requests(bench, 1)
    duplicate = bench.request(PROMPT)

    async def run() -> Any:
        call = bench.start(first)
        await bench.wait_until_running()
        for requests in ([bench.request(PROMPT), first], [duplicate, duplicate]):
            with pytest.raises(UnsupportedParameter, match=rf"'{requests[-1].request_id}' is in use|request_id twice"):
                await bench.engine.generate(requests)
        health = await bench.engine.health()
        assert (health.running, health.queued) == (1, 0)
        return (await call)[0]

    completion = bench.run(run())
    assert (len(completion.token_ids), completion.stop_reason) == (LONGEST, "length")
    assert_logprobs(reference, first, completion)


def test_aborted_request_id_can_be_reused(bench: EngineHarness, reference: Reference):
    (first,) = long_requests(bench, 1)

    async def run() -> list[Any]:
        call = bench.start(first)
        await bench.wait_until_running()
        await bench.engine.abort([first.request_id])
        return [*await call, *await bench.engine.generate([first])]

    aborted, completion = bench.run(run())
    assert (aborted.stop_reason, completion.stop_reason) == ("abort", "length")


def test_invalid_parameters_are_rejected_without_side_effects(bench: EngineHarness, reference: Reference):
    invalid: list[tuple[str, dict[str, Any]]] = [
        ("temperature", {"temperature": 1e-40}),
        ("repetition_penalty", {"repetition_penalty": 1e-40}),
        ("repetition_penalty", {"repetition_penalty": 1e30}),
        ("stop_token_ids", {"stop_token_ids": (2**31 - 1,)}),
        ("stop_token_ids|min_tokens", {"stop_token_ids": (2**31 - 1,), "min_tokens": 2}),
        ("stop_token_ids|min_tokens", {"stop_token_ids": tuple(range(250)), "min_tokens": 2}),
    ]
    (first,) = long_requests(bench, 1)

    async def run() -> Any:
        call = bench.start(first)
        await bench.wait_until_running()
        for parameter, sampling in invalid:
            with pytest.raises(UnsupportedParameter, match=parameter) as caught:
                await bench.engine.generate([bench.request(PROMPT, **sampling)])
            assert bench.capabilities.name in str(caught.value)
        return (await call)[0]

    completion = bench.run(run())
    assert (len(completion.token_ids), completion.stop_reason) == (LONGEST, "length")
    assert_logprobs(reference, first, completion)


def test_request_rejected_by_engine_leaves_no_state(bench: EngineHarness, reference: Reference):
    """vLLM itself rejects temperatures above 2."""
    valid = bench.request(PROMPT)

    async def run() -> tuple[Any, Any]:
        await bench.engine.pause(bench.pause_mode)
        hot = asyncio.ensure_future(
            bench.engine.generate([bench.request(PROMPT), bench.request(PROMPT, temperature=3.0)])
        )
        call = bench.start(valid)
        await asyncio.sleep(0.3)
        await bench.engine.resume()
        return (await asyncio.gather(hot, return_exceptions=True))[0], (await call)[0]

    outcome, completion = bench.run(run(), timeout_s=60)
    assert_logprobs(reference, valid, completion)
    assert isinstance(outcome, list) or (isinstance(outcome, UnsupportedParameter) and "temperature" in str(outcome))
    health = bench.run(bench.engine.health())
    assert (health.running, health.queued) == (0, 0)
    if "wait" in bench.capabilities.pause_modes:
        bench.run(bench.engine.pause("wait"), timeout_s=20)


def test_non_finite_logits_raise_error(bench: EngineHarness, reference: Reference):
    broken = bench.random_model(0)
    with torch.no_grad():
        broken.get_parameter("model.norm.weight").fill_(3e38)
    bench.run(bench.publish(broken))
    with pytest.raises(
        EngineError, match=r"not finite|Out of range float"
    ):  # The second message is that of vLLM's server.
        bench.generate(bench.request(PROMPT))
    with suppress(EngineError):
        (scores,) = bench.run(bench.engine.score([PROMPT]))
        assert not any(math.isfinite(logprob) for logprob in scores)
    reference = bench.serve(bench.random_model(0))
    request = bench.request(PROMPT)
    assert_logprobs(reference, request, bench.generate(request)[0])


# -- sleep ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("level", "keep_weights"), [(1, False), (2, False), (2, True)])
def test_sleeping_engine_rejects_requests_and_wakes_by_tags(
    bench: EngineHarness, reference: Reference, level: int, keep_weights: bool
):
    request = bench.request(PROMPT, temperature=0.0)
    assert bench.run(bench.engine.sleep(level, keep_weights)) == 0  # On a CPU no memory is freed.
    health = bench.run(bench.engine.health())
    assert health.asleep
    with pytest.raises(EngineError, match="asleep"):
        bench.generate(request)
    with pytest.raises(UnsupportedParameter, match="everything"):
        bench.run(bench.engine.wake_up(["everything"]))
    bench.run(bench.engine.wake_up(["weights"]))
    assert bench.run(bench.engine.health()).asleep
    new = bench.serve(bench.random_model(2))  # In a colocated run, weights are synced before the cache is restored.
    bench.run(bench.engine.wake_up(["kv_cache"]))
    health = bench.run(bench.engine.health())
    assert not (health.asleep or health.paused)
    (completion,) = bench.generate(bench.request(PROMPT, temperature=0.0))
    assert completion.token_ids.tolist() == new.greedy(PROMPT, 16)


def test_wake_up_without_tags_restores_all_memory(bench: EngineHarness, reference: Reference):
    bench.run(bench.engine.sleep())
    bench.run(bench.engine.wake_up())
    request = bench.request(PROMPT)
    assert_logprobs(reference, request, bench.generate(request)[0])


def test_paused_engine_wakes_up_paused(bench: EngineHarness, reference: Reference):
    async def run() -> bool:
        await bench.engine.pause(bench.pause_mode)
        await bench.engine.sleep()
        await bench.engine.wake_up()
        return (await bench.engine.health()).paused

    assert bench.run(run())


# -- prefix cache -----------------------------------------------------------------------------------------------------


def count_cached_tokens(bench: EngineHarness, request: SampleRequest) -> int:
    """Run a request, and return how many of its prompt tokens needed no prefill."""
    before = bench.run(bench.engine.health()).cached_tokens
    bench.generate(request)
    return bench.run(bench.engine.health()).cached_tokens - before


def test_only_reset_clears_prefix_cache(bench: EngineHarness, reference: Reference):
    bench.generate(bench.request(LONG_PROMPT))
    warm = count_cached_tokens(bench, bench.request(LONG_PROMPT))
    bench.run(bench.engine.pause(bench.pause_mode))
    bench.run(bench.engine.resume())
    assert count_cached_tokens(bench, bench.request(LONG_PROMPT)) == warm
    bench.run(bench.engine.reset_prefix_cache())
    assert count_cached_tokens(bench, bench.request(LONG_PROMPT)) == 0


def test_cached_prompt_is_prefilled_again_after_sync(bench: EngineHarness, reference: Reference):
    for seed in (3, 4, 3):
        reference = bench.serve(bench.random_model(seed))
        for _ in range(2):
            request = bench.request(LONG_PROMPT, temperature=0.0)
            (completion,) = bench.generate(request)
            assert completion.token_ids.tolist() == reference.greedy(LONG_PROMPT, 16)
            assert_logprobs(reference, request, completion)


# -- tokens of running requests ---------------------------------------------------------------------------------------


def test_partial_tokens_grow_into_the_completion(bench: EngineHarness, reference: Reference):
    watched, other = long_requests(bench, 2)

    async def run() -> tuple[Completion, list[dict[str, list[int]]]]:
        task, seen = bench.start(watched, other), []
        while not task.done():
            tokens = await bench.engine.partial_tokens([watched.request_id, "unknown"])
            seen.append({request_id: ids.tolist() for request_id, ids in tokens.items()})
            await asyncio.sleep(0.005)
        assert await bench.engine.partial_tokens([watched.request_id, other.request_id]) == {}
        return (await task)[0], seen

    completion, seen = bench.run(run())
    if not bench.capabilities.partial_tokens:
        assert not any(seen)
        assert bench.refusal_reason("partial_tokens")
        return
    assert {request_id for tokens in seen for request_id in tokens} == {watched.request_id}
    streamed = [tokens[watched.request_id] for tokens in seen if tokens]
    lengths = [len(ids) for ids in streamed]
    assert all(lengths) and lengths == sorted(lengths)
    assert len(set(lengths)) >= 20  # SGLang's process would send pieces of 50 tokens by itself
    assert all(completion.token_ids[: len(ids)].tolist() == ids for ids in streamed)


@pytest.mark.parametrize("mode", ["keep", "retract", "abort"])
def test_partial_tokens_survive_every_pause(bench: EngineHarness, reference: Reference, mode: str):
    if not bench.capabilities.partial_tokens or mode not in bench.capabilities.pause_modes:
        return
    (request,) = long_requests(bench, 1)

    async def tokens() -> list[int]:
        found = await bench.engine.partial_tokens([request.request_id])
        return found[request.request_id].tolist() if found else []

    async def run() -> tuple[list[list[int]], Completion]:
        task, seen = bench.start(request), [await tokens()]
        while not seen[0]:
            seen = [await tokens()]
        await bench.engine.pause(mode)
        seen += [await tokens(), await tokens()]
        await bench.engine.resume()
        seen.append(await tokens())
        return seen, (await task)[0]

    seen, completion = bench.run(run())
    if mode == "abort":
        assert seen[1:] == [[]] * 3 and completion.stop_reason == "abort"
        seen = seen[:1]
    assert [len(ids) for ids in seen] == sorted(len(ids) for ids in seen) and seen[1:2] == seen[2:3]
    assert all(completion.token_ids[: len(ids)].tolist() == ids for ids in seen)


def test_json_and_top_logprobs_continue_after_retraction(bench: EngineHarness, reference: Reference):
    if not bench.capabilities.json_schema:
        return
    schema = '{"type": "array", "items": {"enum": [10, 20, 30]}, "minItems": 30, "maxItems": 30}'
    disturbed, plain = (
        bench.request(PROMPT, seed=5, max_tokens=150, ignore_eos=False, top_k=2, top_logprobs=2, json_schema=schema)
        for _ in range(2)
    )

    async def run() -> list[Completion]:
        task = bench.start(disturbed)
        while len((await bench.engine.partial_tokens([disturbed.request_id])).get(disturbed.request_id, ())) < 10:
            await asyncio.sleep(0.001)
        await bench.engine.pause("retract")
        await bench.engine.resume()
        return await task

    ((completion,), (expected,)) = bench.run(run()), bench.generate(plain)
    assert completion.token_ids.tolist() == expected.token_ids.tolist()
    assert largest_difference(completion.logprobs, expected.logprobs) <= TOLERANCE
    assert completion.top_logprobs is not None and expected.top_logprobs is not None
    assert completion.top_logprobs.token_ids.shape == (len(completion.token_ids), 2)
    assert largest_difference(completion.top_logprobs.logprobs, expected.top_logprobs.logprobs) <= TOLERANCE


# -- adapters ---------------------------------------------------------------------------------------------------------


def lacks_adapters(bench: EngineHarness, folder: str) -> bool:
    if bench.capabilities.lora:
        return False
    for call in (bench.engine.load_adapter("a", folder), bench.engine.generate([bench.request(PROMPT, adapter="a")])):
        with pytest.raises(UnsupportedParameter, match="adapter") as caught:
            bench.run(call)
        assert bench.capabilities.name in str(caught.value)
    assert bench.refusal_reason("adapter")
    return True


def assert_adapted(bench: EngineHarness, model: Any, adapter: str | None, prompt: tuple[int, ...] = PROMPT) -> None:
    request = bench.request(prompt, adapter=adapter)
    assert_logprobs(Reference(model), request, bench.generate(request)[0])


def test_batch_mixes_adapters_and_base_model(bench: EngineHarness, reference: Reference, tmp_path):
    folders = {name: save_tiny_adapter(tmp_path / name, bench.model, seed=ord(name)) for name in "ab"}
    if lacks_adapters(bench, folders["a"]):
        return
    for name, folder in folders.items():
        bench.run(bench.engine.load_adapter(name, folder))
    references: dict[str | None, Reference] = {None: reference}
    references |= {name: Reference(merged(bench.model, folder)) for name, folder in folders.items()}
    # A shared prompt that is longer than a block of any prefix cache: its keys and values differ between adapters.
    requests = [
        bench.request(prompt, adapter=adapter, seed=n)
        for prompt in (LONG_PROMPT, PROMPT)
        for adapter in references
        for n in range(2)
    ]
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert_logprobs(references[request.adapter], request, completion)
    bench.run(bench.engine.unload_adapter("a"))
    with pytest.raises(UnsupportedParameter, match=r"adapter='a'.*\bb\b"):
        bench.generate(bench.request(PROMPT, adapter="a"))
    assert_adapted(bench, merged(bench.model, folders["b"]), "b")
    bench.run(bench.engine.unload_adapter("b"))


def test_adapter_survives_sync_and_can_be_replaced(bench: EngineHarness, reference: Reference, tmp_path):
    first, second = (save_tiny_adapter(tmp_path / str(seed), bench.model, seed=seed) for seed in (1, 2))
    if lacks_adapters(bench, first):
        return
    bench.run(bench.engine.load_adapter("a", first))
    assert_adapted(bench, merged(bench.model, first), "a", LONG_PROMPT)
    bench.serve(bench.random_model(1))
    assert_adapted(bench, merged(bench.model, first), "a", LONG_PROMPT)
    bench.run(bench.engine.load_adapter("a", second))
    assert_adapted(bench, merged(bench.model, second), "a", LONG_PROMPT)
    assert_adapted(bench, bench.model, None, LONG_PROMPT)
    bench.run(bench.engine.unload_adapter("a"))


def test_unloading_adapter_of_waiting_request_spares_others(bench: EngineHarness, reference: Reference, tmp_path):
    folder = save_tiny_adapter(tmp_path / "a", bench.model, seed=1)
    if lacks_adapters(bench, folder):
        return
    adapted, plain = bench.request(PROMPT, adapter="a"), bench.request(PROMPT)

    async def run() -> tuple[Any, Any]:
        await bench.engine.load_adapter("a", folder)
        await bench.engine.pause(bench.pause_mode)
        first, second = (asyncio.ensure_future(bench.engine.generate([request])) for request in (adapted, plain))
        async with asyncio.timeout(20):
            while (await bench.engine.health()).queued < 2:
                await asyncio.sleep(0.01)
        await bench.engine.unload_adapter("a")
        await bench.engine.resume()
        return (await asyncio.gather(first, return_exceptions=True))[0], (await second)[0]

    outcome, completion = bench.run(run(), timeout_s=60)
    assert_logprobs(reference, plain, completion)
    if isinstance(outcome, list):
        assert_logprobs(Reference(merged(bench.model, folder)), adapted, outcome[0])
    else:
        assert isinstance(outcome, UnsupportedParameter) and "adapter='a'" in str(outcome)


def test_invalid_adapter_is_rejected_without_side_effects(bench: EngineHarness, reference: Reference, tmp_path):
    other = save_tiny_adapter(tmp_path / "other", bench.random_model(0), rank=4, targets=("q_proj",), r=5)
    if lacks_adapters(bench, other):
        return
    for path in (str(tmp_path / "nowhere"), other):
        with pytest.raises(EngineError, match="adapter 'a'") as caught:
            bench.run(bench.engine.load_adapter("a", path))
        assert path in str(caught.value)
    with pytest.raises(UnsupportedParameter, match="adapter='a'"):
        bench.generate(bench.request(PROMPT, adapter="a"))
    assert_adapted(bench, bench.model, None)
