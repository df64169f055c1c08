"""On a shared accelerator, engines and learner never hold more than fits at the same time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from skyrl_train.engines.base import EngineHealth
from skyrl_train.errors import EngineError
from skyrl_train.learner.learner import BatchSizes, Learner
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.trainer.trainer import ColocatedOffloadManager
from skyrl_train.weight_sync.buckets import plan_buckets
from skyrl_train.weight_sync.protocol import Bucket, Manifest, TensorSpec
from skyrl_train.weight_sync.sync import Probe, WeightSync

PARAMETERS, MOMENTS, LEFT_BY_UPDATE, REFERENCE, WEIGHTS, CACHE = 4, 8, 3, 2, 6, 16
CAPACITY = 22
"""Capacity of the device in GB, say: what engines hold while they generate."""


class Device:
    """Records what is held, and fails if it exceeds the capacity."""

    def __init__(self) -> None:
        self.held: dict[str, int] = {}
        self.peak: dict[str, int] = {}

    def take(self, **sizes: int) -> None:
        self.held |= sizes
        total = sum(self.held.values())
        assert total <= CAPACITY, f"out of memory: {self.held}"
        self.peak = max(self.peak, dict(self.held), key=lambda held: sum(held.values()))

    def free(self, *names: str) -> None:
        for name in names:
            self.held.pop(name, None)


class Ranks:
    """All ranks of the policy, or of a reference, which only has parameters."""

    def __init__(self, device: Device, policy: bool):
        self.device, self.policy = device, policy

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        answer = getattr(self, method, lambda *_: None)(*args)
        return [answer]

    def offload(self) -> None:
        self.device.free(*(("parameters", "moments", "left") if self.policy else ("reference",)))

    def onload(self) -> None:
        sizes = {"parameters": PARAMETERS, "moments": MOMENTS} if self.policy else {"reference": REFERENCE}
        self.device.take(**sizes)

    def onload_parameters_only(self) -> None:
        self.device.free("moments", "left")
        self.device.take(parameters=PARAMETERS)

    def prepare_manifest(self, version: int, perturbed: bool) -> Manifest:
        assert "parameters" in self.device.held
        self.announced = Manifest(version, (TensorSpec("w", (1,), "float32"),), is_self_test=perturbed)
        return self.announced

    def send_weights(self, index: int) -> Bucket:
        assert "parameters" in self.device.held
        return plan_buckets(self.announced)[index]


class Engine(ScriptedEngine):
    """An engine like vLLM, which wakes its cache to score and frees it again.

    Weights of a self-test score differently.
    """

    def __init__(self, device: Device):
        super().__init__(name="shared")
        self.device = device

    async def sleep(self, level: int = 1) -> int:
        self.device.free("weights", "cache")
        return await super().sleep(level)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self.device.take(weights=WEIGHTS, **({} if tags == ["weights"] else {"cache": CACHE}))
        await super().wake_up(tags)

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        if "score" in self.failures:
            raise self.failures["score"]
        self.device.take(cache=CACHE)
        self.device.free("cache")
        return [[-2.0 if self._is_self_test else -1.0] * (len(ids) - 1) for ids in token_ids]

    async def health(self) -> EngineHealth:
        return EngineHealth(name=self.name, version=self.version, asleep=self.asleep)


def shared(device: Device) -> tuple[ColocatedOffloadManager, WeightSync, Engine, Learner]:
    policy: Any = Ranks(device, policy=True)
    reference: Any = Ranks(device, policy=False)
    engine, learner = Engine(device), Learner(policy, reference, BatchSizes(1))

    async def trainer_score(token_ids: Any) -> list[list[float]]:
        assert "parameters" in device.held
        return [[-1.0] * (len(ids) - 1) for ids in token_ids]

    weight_sync = WeightSync(
        policy,
        lambda: [engine],
        route="in_process",
        deadline_s=5,
        probe=Probe([[1, 2, 3]], trainer_score, self_test=True, offload_trainer=learner.offloaded),
    )
    client: Any = engine
    return ColocatedOffloadManager(client, learner), weight_sync, engine, learner


@pytest.mark.defect("engines-wake-beside-optimizer")
@pytest.mark.defect("probe-allocates-cache-beside-learner")
def test_steps_with_self_test_and_probe_fit():
    device = Device()

    async def run() -> None:
        offload_manager, weight_sync, engine, _ = shared(device)
        await engine.sleep()
        for version in range(2):
            async with offload_manager.training():
                device.take(left=LEFT_BY_UPDATE)
                async with offload_manager.syncing():
                    await weight_sync.sync_all(version)
                    assert device.held == {"parameters": PARAMETERS, "weights": WEIGHTS}
            async with offload_manager.generating():
                assert device.held == {"weights": WEIGHTS, "cache": CACHE}

    asyncio.run(run())
    assert device.peak == {"weights": WEIGHTS, "cache": CACHE}


def test_failed_probe_keeps_weights_loaded():
    device = Device()

    async def run() -> None:
        _, weight_sync, engine, learner = shared(device)
        await learner.onload()
        await learner.onload_weights_only()
        engine.failures = {"score": EngineError("gone")}
        with pytest.raises(EngineError, match="gone"):
            await weight_sync.sync_all(0)
        assert device.held == {"parameters": PARAMETERS}

    asyncio.run(run())
