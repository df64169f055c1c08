"""Engines that join late, come back or leave, over every route: the others are asked for nothing."""

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
TAKES = ("connect_weights", "begin_weights", "receive_weights", "commit_weights", "score", "health")


class Noting(FakeEngine):
    """Notes what it is asked for."""

    def __init__(self, name: str, seed: int):
        super().__init__(tiny_model(seed=seed, **SMALL), name)
        self.asked: list[str] = []
        for method in TAKES:
            setattr(self, method, self._noted(method, getattr(self, method)))

    def _noted(self, name: str, method: Any) -> Any:
        async def call(*args: Any) -> Any:
            self.asked.append(name)
            return await method(*args)

        return call

    def holds(self, trainer: LocalTrainer) -> bool:
        held = dict(self.model.named_parameters())
        return all(torch.equal(held[name], tensor) for name, tensor in trainer.model.named_parameters())


@pytest.mark.parametrize("weight_sync_only_changed", [False, True], ids=["all", "only changed"])
@pytest.mark.parametrize("route", ["broadcast", "ipc", "checkpoint", "in_process"])
def test_a_newcomer_gets_all_weights_from_the_trainer_while_the_others_go_on(
    route: str, weight_sync_only_changed: bool, tmp_path: Path
):
    trainer = LocalTrainer(
        tiny_model(seed=1, **SMALL), bucket_bytes=20_000, weight_sync_only_changed=weight_sync_only_changed
    )
    first, late = Noting("first", seed=2), Noting("late", seed=3)
    engines = [first]
    weight_sync = WeightSync(trainer, lambda: engines, route=route, deadline_s=30, folder=str(tmp_path))

    async def story() -> None:
        await weight_sync.sync_all(1)
        first.asked.clear()
        await weight_sync.sync_one(late, 1)
        assert first.asked == []
        assert late.holds(trainer)
        engines.append(late)
        for version in (2, 3):
            with torch.no_grad():
                trainer.model.get_parameter("model.norm.weight").add_(0.5)
            values = await weight_sync.sync_all(version)
            assert all(one.holds(trainer) and one.receiver.version == version for one in engines)
        whole = sum(tensor.nbytes for tensor in trainer.model.parameters())
        assert (values["weights/bytes"] < whole) == weight_sync_only_changed
        engines.remove(late)
        late.receiver.close()
        late.asked.clear()
        with torch.no_grad():
            trainer.model.get_parameter("model.norm.weight").add_(0.5)
        await weight_sync.sync_all(4)
        assert first.holds(trainer)
        assert late.asked == []

    try:
        asyncio.run(story())
    finally:
        trainer.sender.close()
        for one in (first, late):
            one.receiver.close()
