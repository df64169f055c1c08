"""Adapters from weight syncs, separate from the model: served like merged weights, or rejected by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_train.errors import WeightSyncError
from tests.support.engine_harness import TOLERANCE, EngineHarness, assert_logprobs, assert_spans, largest_difference
from tests.support.reference_sampler import Reference
from tests.support.tiny_adapters import merged, save_tiny_adapter
from tests.support.weight_targets import AdaptedTrainer

PROMPT = tuple(3 + (7 * n) % 250 for n in range(150))


@pytest.fixture
def trainer(bench: EngineHarness) -> Iterator[AdaptedTrainer]:
    """A trainer whose base model the engine serves before and after each test."""
    bench.serve(bench.random_model(0), "random")
    yield AdaptedTrainer(bench.model)
    bench.model = bench.model  # This marks the engine's weights as unknown.
    bench.serve(bench.model, "random")


def lacks_adapter_sync(bench: EngineHarness) -> bool:
    return bench.capabilities.synced_adapter_rank == 0


def assert_serves(bench: EngineHarness, reference: Reference, adapter: str | None = None) -> None:
    request = bench.request(PROMPT, adapter=adapter)
    (completion,) = bench.generate(request)
    assert_logprobs(reference, request, completion)


def nbytes(trainer: AdaptedTrainer) -> int:
    return sum(tensor.nbytes for tensor in trainer.tensors.values())


def test_engine_serves_new_adapter_after_every_sync(bench: EngineHarness, route: str, trainer: AdaptedTrainer):
    async def run() -> None:
        async with bench.syncing(route, trainer=trainer) as weight_sync:
            metrics = await weight_sync.self_test(await bench.next_version())
            assert metrics["weights/bytes"] > 2 * nbytes(trainer)
            for seed in (1, 2):
                trainer.draw(seed)
                version = await bench.next_version()
                metrics = await weight_sync.sync_all(version)
                assert metrics["weights/probe_gap"] <= TOLERANCE
                assert metrics["weights/bytes"] == nbytes(trainer)
                assert (await bench.engine.health()).version == version

    if lacks_adapter_sync(bench):
        return
    bench.run(run())
    assert_serves(bench, Reference(trainer.full_weights()))
    bench.run(bench.publish(trainer.model, route))
    assert_serves(bench, Reference(trainer.model))


def test_unsupported_adapter_sync_is_rejected(bench: EngineHarness, trainer: AdaptedTrainer):
    if not lacks_adapter_sync(bench):
        rank = bench.capabilities.synced_adapter_rank + 1
        if rank > 1 << 10:
            return
        trainer = AdaptedTrainer(bench.model, rank=rank)

    async def run() -> None:
        async with bench.syncing(trainer=trainer) as weight_sync:
            await weight_sync.sync_all(await bench.next_version())

    with pytest.raises(WeightSyncError, match=r"trainer\.policy\.model\.lora\.sync=merged"):
        bench.run(run())
    assert_serves(bench, Reference(bench.model))


def test_running_request_continues_with_new_adapter(bench: EngineHarness, trainer: AdaptedTrainer):
    async def run(request: Any) -> tuple[Any, int]:
        async with bench.syncing(trainer=trainer) as weight_sync:
            first = await bench.next_version()
            await weight_sync.sync_all(first)
            call = bench.start(request)
            await bench.wait_until_running()
            await bench.engine.pause("keep")
            trainer.draw(1)
            await weight_sync.sync_all(first + 1)
            await bench.engine.resume()
            (completion,) = await call
            return completion, first

    if lacks_adapter_sync(bench):
        return
    old = Reference(trainer.full_weights())
    request = bench.request(PROMPT, max_tokens=600)
    completion, first = bench.run(run(request))
    spans = assert_spans(completion, [first, first + 1])
    assert len(spans) == 2, "the sync came too late for this test"
    change = spans[1].start
    before = old.logprobs(PROMPT, completion.token_ids[:change], request.sampling)[1]
    assert largest_difference(completion.full_logprobs[:change], before) <= TOLERANCE
    after = Reference(trainer.full_weights()).full_logprobs_after(old, PROMPT, completion.token_ids, change)
    assert largest_difference(completion.full_logprobs[change:], after) <= TOLERANCE


def test_named_adapter_applies_to_base_model(bench: EngineHarness, trainer: AdaptedTrainer, tmp_path: Any):
    async def sync() -> None:
        async with bench.syncing(trainer=trainer) as weight_sync:
            await weight_sync.sync_all(await bench.next_version())

    if lacks_adapter_sync(bench):
        return
    folder = save_tiny_adapter(tmp_path, bench.model, seed=9)
    bench.run(bench.engine.load_adapter("a", folder))
    bench.run(sync())
    references = {None: Reference(trainer.full_weights()), "a": Reference(merged(trainer.model, folder))}
    requests = [bench.request(PROMPT, adapter=adapter, seed=n) for n in range(2) for adapter in references]
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert_logprobs(references[request.adapter], request, completion)
    bench.run(bench.engine.unload_adapter("a"))
    (scored,) = bench.run(bench.engine.score([PROMPT]))
    assert math.isclose(largest_difference(scored, references[None].score([PROMPT])[0]), 0, abs_tol=TOLERANCE)
