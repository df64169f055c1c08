"""Syncs that send a model once, and later only the adapter that is trained on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import WeightSyncError
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.weight_sync.protocol import Bucket, Manifest
from skyrl_train.weight_sync.sync import Probe, WeightSync
from tests.support.weight_targets import AdaptedTrainer, FakeEngine, score

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32}
PROBE_TOKENS = [[1, 2, 3, 4, 5], [6, 7, 8]]
LAYER = "model.layers.0.self_attn.q_proj"


@asynccontextmanager
async def engines(*names: str) -> AsyncIterator[list[TransformersEngine]]:
    """Engines whose weights differ from the trainer's."""
    started = [TransformersEngine(tiny_model(seed=2, **SMALL), name=name) for name in names]
    try:
        yield started
    finally:
        for engine in started:
            await engine.close()


def sync_of(trainer: AdaptedTrainer, targets: list[Any], *, probed: bool = True) -> WeightSync:
    async def trainer_score(token_ids: Any) -> list[list[float]]:
        return score(trainer.full_weights(), token_ids)

    probe = Probe(PROBE_TOKENS, trainer_score, self_test=True) if probed else None
    return WeightSync(
        trainer,
        lambda: targets,
        route="in_process",
        deadline_s=60,
        probe=probe,
        adapter_only=True,
    )


def trainer_of(**options: Any) -> AdaptedTrainer:
    return AdaptedTrainer(tiny_model(seed=1, **SMALL), **options)


def sizes(trainer: AdaptedTrainer) -> tuple[int, int]:
    """Bytes of the model and of the adapter."""
    return (
        sum(tensor.nbytes for tensor in trainer.model.parameters()),
        sum(tensor.nbytes for tensor in trainer.tensors.values()),
    )


def test_model_is_sent_once_per_engine():
    async def run() -> None:
        async with engines("left", "right", "new") as started:
            trainer, alive = trainer_of(), started[:2]
            weight_sync, (model, adapter) = sync_of(trainer, alive), sizes(trainer)

            async def sync_bytes(version: int) -> float:
                trainer.draw(version)
                return (await weight_sync.sync_all(version))["weights/bytes"]

            assert await sync_bytes(0) == model + adapter
            assert await sync_bytes(1) == adapter
            alive[1] = started[2]
            await weight_sync.sync_one(alive[1], 1)
            assert score(trainer.full_weights(), PROBE_TOKENS)[0] == pytest.approx(
                (await alive[1].score(PROBE_TOKENS))[0]
            )
            assert await sync_bytes(2) == model + adapter
            assert await sync_bytes(3) == adapter

    asyncio.run(run())


def test_failed_sync_is_followed_by_complete_one():
    class Faulty:
        """Flips a bit of one bucket when asked to."""

        def __init__(self, engine: Any):
            self.engine = engine
            self.is_due = False

        def __getattr__(self, name: str) -> Any:
            return getattr(self.engine, name)

        async def receive_weights(self, bucket: Bucket) -> None:
            if self.is_due:
                self.is_due = False
                tampered = bucket.payload.clone()  # type: ignore[union-attr]
                tampered[0] ^= 1
                bucket = replace(bucket, payload=tampered)
            await self.engine.receive_weights(bucket)

    async def run() -> None:
        async with engines("one") as (engine,):
            trainer, target = trainer_of(), Faulty(engine)
            weight_sync = sync_of(trainer, [target])
            await weight_sync.sync_all(0)
            trainer.draw(1)
            target.is_due = True
            with pytest.raises(
                WeightSyncError, match=r"engine one: model\.layers\.0\..*\.lora_A\.weight changed in transit"
            ):
                await weight_sync.sync_all(1)
            assert (await weight_sync.sync_all(2))["weights/bytes"] == sum(sizes(trainer))

    asyncio.run(run())


def test_probe_notices_changed_adapter():
    async def run() -> None:
        async with engines("one") as (engine,):
            weight_sync = sync_of(trainer_of(), [engine])
            await weight_sync.sync_all(0)
            await weight_sync.verify(0, [engine])
            adapter = engine.served.adapters.synced
            assert adapter is not None
            adapter.layers[LAYER][1].add_(0.1)
            with pytest.raises(WeightSyncError, match=r"engine one: log-probs .* stale or corrupt"):
                await weight_sync.verify(0, [engine])

    asyncio.run(run())


def test_self_test_notices_ignored_adapter():
    class IgnoresAdapter(TransformersEngine):
        """Serves the model and ignores its adapter."""

        async def score(self, token_ids: Any, temperature: float = 1.0) -> list[list[float]]:
            self.served.adapters.synced = None
            return await super().score(token_ids, temperature)

    async def run() -> None:
        trainer = trainer_of()
        for name, tensor in trainer.tensors.items():
            if ".lora_B." in name:
                tensor.zero_()  # as at the start of a run, when the model alone has the right log-probs
        engine = IgnoresAdapter(tiny_model(seed=2, **SMALL), name="deaf")
        try:
            with pytest.raises(WeightSyncError, match="engine deaf: perturbed weights changed"):
                await sync_of(trainer, [engine]).sync_all(0)
        finally:
            await engine.close()

    asyncio.run(run())


def without(tensor: str) -> Any:
    return lambda m: replace(m, tensors=tuple(spec for spec in m.tensors if spec.name != tensor))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without(f"{LAYER}.lora_B.weight"), rf"the engine has {LAYER}\.lora_B\.weight, but"),
        (
            lambda m: replace(m, adapter=replace(m.adapter, rank=5)),
            r"lora_A\.weight is announced with shape \[4, 32\].* \[5, 32\]",
        ),
        (
            lambda m: replace(m, adapter=replace(m.adapter, layers=("lm_head",))),
            "engine one: the adapter changes lm_head, which is not a linear layer",
        ),
        (lambda m: replace(m, adapter=None), r"lora_A\.weight.* was announced, but the engine has no such tensor"),
    ],
)
def test_unfitting_adapter_is_rejected_before_transfer(change: Any, message: str):
    class WrongManifest(AdaptedTrainer):
        def prepare_manifest(self, version: int, perturbed: bool = False) -> Manifest:
            return change(super().prepare_manifest(version, perturbed))  # type: ignore[no-any-return]

    async def run() -> None:
        async with engines("one") as (engine,):
            with pytest.raises(WeightSyncError, match=message):
                await sync_of(WrongManifest(tiny_model(seed=1, **SMALL)), [engine], probed=False).sync_all(1)
            assert not (await engine.health()).partially_loaded

    asyncio.run(run())


def test_engine_without_adapter_support_rejects_adapter():
    target = FakeEngine(tiny_model(seed=2, **SMALL), "plain")
    with pytest.raises(WeightSyncError, match=r"engine plain: .* adapter separate from its model.*lora\.sync=merged"):
        asyncio.run(sync_of(trainer_of(), [target], probed=False).sync_all(1))


def test_one_nan_in_the_adapter_stops_the_sync():
    async def run() -> None:
        async with engines("one") as (engine,):
            trainer = trainer_of()
            trainer.tensors[f"{LAYER}.lora_A.weight"][0, 0] = torch.nan
            with pytest.raises(WeightSyncError, match=rf"{LAYER}\.lora_A\.weight contains NaN"):
                await sync_of(trainer, [engine], probed=False).sync_all(1)

    asyncio.run(run())
