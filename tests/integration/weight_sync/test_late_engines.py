"""Engines that join late or leave, over every route; the other engines are not called."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.weight_sync.sync import WeightSync
from tests.support.weight_targets import FakeEngine, LocalTrainer

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32}
METHODS = ("connect_weights", "begin_weights", "receive_weights", "commit_weights", "score", "health")


class RecordingEngine(FakeEngine):
    """An engine that records the names of the methods that are called."""

    def __init__(self, name: str, seed: int):
        super().__init__(tiny_model(seed=seed, **SMALL), name)
        self.calls: list[str] = []
        for method in METHODS:
            setattr(self, method, self._recorded(method, getattr(self, method)))

    def _recorded(self, name: str, method: Any) -> Any:
        async def call(*args: Any) -> Any:
            self.calls.append(name)
            return await method(*args)

        return call

    def has_weights_of(self, trainer: LocalTrainer) -> bool:
        weights = dict(self.model.named_parameters())
        return all(torch.equal(weights[name], tensor) for name, tensor in trainer.model.named_parameters())


@pytest.mark.parametrize("weight_sync_only_changed", [False, True], ids=["all", "only changed"])
@pytest.mark.parametrize("route", ["broadcast", "ipc", "checkpoint", "in_process"])
def test_late_engine_gets_all_weights(route: str, weight_sync_only_changed: bool, tmp_path: Path):
    trainer = LocalTrainer(
        tiny_model(seed=1, **SMALL), bucket_bytes=20_000, weight_sync_only_changed=weight_sync_only_changed
    )
    first, late = RecordingEngine("first", seed=2), RecordingEngine("late", seed=3)
    engines = [first]
    weight_sync = WeightSync(trainer, lambda: engines, route=route, deadline_s=30, folder=str(tmp_path))

    async def run() -> None:
        await weight_sync.sync_all(1)
        first.calls.clear()
        await weight_sync.sync_one(late, 1)
        assert first.calls == []
        assert late.has_weights_of(trainer)
        engines.append(late)
        for version in (2, 3):
            with torch.no_grad():
                trainer.model.get_parameter("model.norm.weight").add_(0.5)
            values = await weight_sync.sync_all(version)
            assert all(engine.has_weights_of(trainer) and engine.receiver.version == version for engine in engines)
        model_bytes = sum(tensor.nbytes for tensor in trainer.model.parameters())
        assert (values["weights/bytes"] < model_bytes) == weight_sync_only_changed
        engines.remove(late)
        late.receiver.close()
        late.calls.clear()
        with torch.no_grad():
            trainer.model.get_parameter("model.norm.weight").add_(0.5)
        await weight_sync.sync_all(4)
        assert first.has_weights_of(trainer)
        assert late.calls == []

    try:
        asyncio.run(run())
    finally:
        trainer.sender.close()
        for engine in (first, late):
            engine.receiver.close()
