"""Engine and trainer hold the same weights, and a difference is detected."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from skyrl_train.config.schema import LoraConfig, OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import WeightSyncError
from skyrl_train.learner.learner import BatchSizes, Learner, LocalWorker, WorkerGroup
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model
from skyrl_train.weight_sync.sync import Probe, WeightSync
from tests.support.learner_specs import policy_batch, tiny_spec

PROBE_IDS = [[5, 9, 77, 30, 12, 44], [8, 8, 8, 250]]


@asynccontextmanager
async def connect_engine(
    model_path: str, route: str, adapter_only: bool = False, **changes: Any
) -> AsyncIterator[tuple[Learner, TransformersEngine, WeightSync]]:
    """Yield a learner that changes its weights visibly in one step, an engine, and their weight sync."""
    spec = tiny_spec(model_path, **{"optimizer_config": OptimizerConfig(lr=1e-2), "total_steps": 10, **changes})
    learner = Learner(
        WorkerGroup([LocalWorker(LearnerWorker(spec, 0, 1))]), None, BatchSizes(100, max_tokens_per_microbatch=1000)
    )
    engine = TransformersEngine(model_path, threads=1, name="one")
    probe = Probe(PROBE_IDS, learner.sequence_logprobs)
    weight_sync = WeightSync(
        learner.policy, lambda: [engine], route=route, deadline_s=60.0, probe=probe, adapter_only=adapter_only
    )
    try:
        await learner.setup()
        yield learner, engine, weight_sync
    finally:
        await engine.close()
        await learner.close()


async def max_logprob_difference(learner: Learner, engine: TransformersEngine) -> float:
    """Return the largest difference (nats) between the engine's log-probs of its samples and the trainer's."""
    request = SampleRequest("r", to_token_array(PROBE_IDS[0]), SamplingParams(max_tokens=20, ignore_eos=True), seed=1)
    (completion,) = await engine.generate([request])
    ids = [*request.token_ids.tolist(), *completion.token_ids.tolist()]
    (trainer_logprobs,) = await learner.sequence_logprobs([ids])
    engine_logprobs = completion.full_logprobs.tolist()
    return max(abs(a - b) for a, b in zip(trainer_logprobs[len(request.token_ids) - 1 :], engine_logprobs, strict=True))


def make_batch() -> TrainBatch:
    return policy_batch()


@pytest.mark.parametrize("route", ["in_process", "broadcast"])
@pytest.mark.parametrize("kind", ["qwen2", "llama-untied"])
def test_engine_and_trainer_agree_after_every_sync(tmp_path, route: str, kind: str):  # type: ignore[no-untyped-def]
    name, _, untied = kind.partition("-")
    model_path = save_tiny_model(tmp_path / "model", name, tied=not untied)

    async def run() -> None:
        async with connect_engine(model_path, route) as (learner, engine, weight_sync):
            await weight_sync.sync_all(0)
            assert await max_logprob_difference(learner, engine) <= 1e-4
            for version in (1, 2):
                await learner.update(make_batch())
                assert await max_logprob_difference(learner, engine) > 1e-2, (
                    "the update did not change the weights, so nothing is tested"
                )
                await weight_sync.sync_all(version)
                assert await max_logprob_difference(learner, engine) <= 1e-4
                assert (await engine.health()).version == version

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_merged_adapters_sync_only_changed_weights(tmp_path, kind: str):  # type: ignore[no-untyped-def]
    model_path = save_tiny_model(tmp_path / "model", kind)
    options: dict[str, Any] = {
        "lora": LoraConfig(rank=4),
        "weight_sync_only_changed": True,
        "optimizer_config": OptimizerConfig(lr=1e-1),
    }

    async def run() -> None:
        async with connect_engine(model_path, "broadcast", **options) as (learner, engine, weight_sync):
            first = await weight_sync.sync_all(0)
            for version in (1, 2):
                await learner.update(make_batch())
                assert await max_logprob_difference(learner, engine) > 1e-2, (
                    "the update did not change the weights, so nothing is tested"
                )
                later = await weight_sync.sync_all(version)
                assert await max_logprob_difference(learner, engine) <= 1e-4
                assert (await engine.health()).version == version
            sizes = {name: p.numel() for name, p in tiny_model(kind).named_parameters()}
            adapted = sum(size for name, size in sizes.items() if "_proj.weight" in name)
            assert 0.9 * adapted < round(later["weights/changed"] * sum(sizes.values())) <= adapted
            assert later["weights/bytes"] == 4 * adapted < first["weights/bytes"]

    asyncio.run(run())


@pytest.mark.parametrize("route", ["in_process", "broadcast"])
def test_separate_adapters_sync_without_the_model(tmp_path, route: str):  # type: ignore[no-untyped-def]
    model_path = save_tiny_model(tmp_path / "model")
    options = {"lora": LoraConfig(rank=4, exclude_modules=["down_proj"]), "optimizer_config": OptimizerConfig(lr=1e-1)}

    async def run() -> None:
        async with connect_engine(model_path, route, adapter_only=True, **options) as (learner, engine, weight_sync):
            first = await weight_sync.sync_all(0)
            for version in (1, 2):
                await learner.update(make_batch())
                assert await max_logprob_difference(learner, engine) > 1e-2, (
                    "the update did not change the weights, so nothing is tested"
                )
                later = await weight_sync.sync_all(version)
                assert await max_logprob_difference(learner, engine) <= 1e-4
                assert (await engine.health()).version == version
            model = sum(4 * p.numel() for p in tiny_model().parameters())
            assert first["weights/bytes"] == model + later["weights/bytes"] < 2 * model

    asyncio.run(run())


@pytest.mark.fault("F31")
def test_skipped_sync_is_detected_by_name(tiny_model_path: str):
    async def run() -> None:
        async with connect_engine(tiny_model_path, "in_process") as (learner, engine, weight_sync):
            await weight_sync.sync_all(0)
            await weight_sync.verify(0, [engine])
            await learner.update(make_batch())
            with pytest.raises(WeightSyncError, match=r"engine.*(one|0).*differ.*stale"):
                await weight_sync.verify(0, [engine])

    asyncio.run(run())
