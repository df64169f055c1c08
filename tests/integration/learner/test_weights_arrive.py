"""Engine and trainer hold the same weights, and it shows when they do not."""

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
async def pair(
    model_path: str, route: str, adapter_only: bool = False, **changes: Any
) -> AsyncIterator[tuple[Learner, TransformersEngine, WeightSync]]:
    """A learner that moves its weights visibly in one step, an engine, and what connects them."""
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


async def gap(learner: Learner, engine: TransformersEngine) -> float:
    """Largest difference (nats) between the engine's log-probs of what it sampled and the trainer's."""
    request = SampleRequest("r", to_token_array(PROBE_IDS[0]), SamplingParams(max_tokens=20, ignore_eos=True), seed=1)
    (done,) = await engine.generate([request])
    ids = [*request.token_ids.tolist(), *done.token_ids.tolist()]
    (mine,) = await learner.sequence_logprobs([ids])
    theirs = done.full_logprobs.tolist()
    return max(abs(a - b) for a, b in zip(mine[len(request.token_ids) - 1 :], theirs, strict=True))


def batch() -> TrainBatch:
    return policy_batch()


@pytest.mark.parametrize("route", ["in_process", "broadcast"])
@pytest.mark.parametrize("kind", ["qwen2", "llama-untied"])
def test_engine_and_trainer_agree_to_1e_4_before_training_and_after_every_sync(tmp_path, route: str, kind: str):  # type: ignore[no-untyped-def]
    name, _, untied = kind.partition("-")
    model_path = save_tiny_model(tmp_path / "model", name, tied=not untied)

    async def run() -> None:
        async with pair(model_path, route) as (learner, engine, weight_sync):
            await weight_sync.sync_all(0)
            assert await gap(learner, engine) <= 1e-4
            for version in (1, 2):
                await learner.update(batch())
                assert await gap(learner, engine) > 1e-2, "the update did not move the weights: nothing is tested"
                await weight_sync.sync_all(version)
                assert await gap(learner, engine) <= 1e-4
                assert (await engine.health()).version == version

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_adapters_arrive_merged_and_what_they_do_not_change_travels_once(tmp_path, kind: str):  # type: ignore[no-untyped-def]
    model_path = save_tiny_model(tmp_path / "model", kind)
    options: dict[str, Any] = {
        "lora": LoraConfig(rank=4),
        "weight_sync_only_changed": True,
        "optimizer_config": OptimizerConfig(lr=1e-1),
    }

    async def run() -> None:
        async with pair(model_path, "broadcast", **options) as (learner, engine, weight_sync):
            first = await weight_sync.sync_all(0)
            for version in (1, 2):
                await learner.update(batch())
                assert await gap(learner, engine) > 1e-2, "the update did not move the weights: nothing is tested"
                later = await weight_sync.sync_all(version)
                assert await gap(learner, engine) <= 1e-4
                assert (await engine.health()).version == version
            adapted = sum(4 * p.numel() for name, p in tiny_model(kind).named_parameters() if "_proj.weight" in name)
            assert later["weights/bytes"] == adapted < first["weights/bytes"]

    asyncio.run(run())


@pytest.mark.parametrize("route", ["in_process", "broadcast"])
def test_separate_adapters_arrive_after_the_model_alone(tmp_path, route: str):  # type: ignore[no-untyped-def]
    model_path = save_tiny_model(tmp_path / "model")
    options = {"lora": LoraConfig(rank=4, exclude_modules=["down_proj"]), "optimizer_config": OptimizerConfig(lr=1e-1)}

    async def run() -> None:
        async with pair(model_path, route, adapter_only=True, **options) as (learner, engine, weight_sync):
            first = await weight_sync.sync_all(0)
            for version in (1, 2):
                await learner.update(batch())
                assert await gap(learner, engine) > 1e-2, "the update did not move the weights: nothing is tested"
                later = await weight_sync.sync_all(version)
                assert await gap(learner, engine) <= 1e-4
                assert (await engine.health()).version == version
            model = sum(4 * p.numel() for p in tiny_model().parameters())
            assert first["weights/bytes"] == model + later["weights/bytes"] < 2 * model

    asyncio.run(run())


@pytest.mark.fault("F31")
def test_a_skipped_sync_is_caught_by_name(tiny_model_path: str):
    async def run() -> None:
        async with pair(tiny_model_path, "in_process") as (learner, engine, weight_sync):
            await weight_sync.sync_all(0)
            await weight_sync.verify(0, [engine])
            await learner.update(batch())
            with pytest.raises(WeightSyncError, match=r"engine.*(one|0).*differ.*stale"):
                await weight_sync.verify(0, [engine])

    asyncio.run(run())
