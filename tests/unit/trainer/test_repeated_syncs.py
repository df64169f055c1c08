"""A sync during which engines die is repeated with the remaining or restarted ones, and reports complete metrics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.config.schema import Config
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import EngineError
from skyrl_train.experiment import engines as builders
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.trainer.publisher import WeightPublisher
from skyrl_train.weight_sync.sync import WeightSync
from tests.support.publishers import IdleLearner
from tests.support.weight_targets import LocalTrainer


class FailingEngine(ScriptedEngine):
    """An engine that fails every call once `dies` is set and weights arrive."""

    dies = False

    async def receive_weights(self, bucket: Any) -> None:
        if self.dies:
            self.failures = {"health": EngineError("gone"), "connect_weights": EngineError("gone")}
            raise EngineError("gone")
        await super().receive_weights(bucket)


@pytest.mark.fault("F29")
@pytest.mark.defect("repeated-sync-lacks-metrics")
@pytest.mark.parametrize("dying", [1, 2])
def test_repeated_sync_reports_its_last_metrics(dying: int, monkeypatch: pytest.MonkeyPatch):
    engines = [FailingEngine(name=f"engine {index}") for index in range(2)]
    client = EngineClient(engines, deadline_s=5)
    trainer = LocalTrainer(tiny_model(vocab_size=64, hidden_size=32))
    weight_sync = WeightSync(trainer, lambda: client.engines, route="in_process", deadline_s=5)
    learner: Any = IdleLearner()
    cluster: Any = None
    layout: Any = SimpleNamespace(engines=None, num_slots=0)

    async def connect(name: str, cfg: Config) -> ScriptedEngine:
        return ScriptedEngine(name=name)

    monkeypatch.setattr(builders, "connect_engine", connect)

    async def run() -> tuple[dict[str, float], dict[str, float]]:
        launcher = builders.EngineLauncher(Config(), cluster, layout)
        publisher = WeightPublisher(learner, client, weight_sync, launcher.restart, max_engine_restarts=4)
        first = await publisher.publish(1)
        for engine in engines[:dying]:
            engine.dies = True
        return first, await publisher.publish(2)

    first, second = asyncio.run(run())
    assert second["engines/restarts"] == dying
    weights = {name: value for name, value in first.items() if name.startswith("weights/")}
    assert weights | {"weights/version": 2.0} == {n: v for n, v in second.items() if n.startswith("weights/")}
