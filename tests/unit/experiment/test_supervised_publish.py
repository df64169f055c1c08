"""A sync during which engines die: it is repeated with those that are left or come back, and its row is a whole one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.config.schema import Config
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import EngineError
from skyrl_train.experiment import publisher as builders
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.weight_sync.sync import WeightPublisher
from tests.support.weight_targets import LocalTrainer


class Dying(ScriptedEngine):
    """Takes weights until it is told to die, and answers nothing from then on."""

    dies = False

    async def receive_weights(self, bucket: Any) -> None:
        if self.dies:
            self.failures = {"health": EngineError("gone"), "connect_weights": EngineError("gone")}
            raise EngineError("gone")
        await super().receive_weights(bucket)


class AtRest:
    """A learner that is."""

    @asynccontextmanager
    async def at_rest(self) -> AsyncIterator[int]:
        yield 2

    async def answers(self, seconds: float) -> bool:
        return True


class Followed:
    """A number of engines that is followed from the moment that `begin` is called."""

    begun = 0

    def begin(self) -> None:
        self.begun += 1


@pytest.mark.fault("F29")
@pytest.mark.defect("syncs-that-were-repeated-are-in-no-row")
@pytest.mark.parametrize("dying", [1, 2])
def test_the_row_of_a_sync_that_was_repeated_says_what_was_synced(dying: int, monkeypatch: pytest.MonkeyPatch):
    engines = [Dying(name=f"engine {index}") for index in range(2)]
    client = EngineClient(engines, deadline_s=5)
    trainer = LocalTrainer(tiny_model(vocab_size=64, hidden_size=32))
    publisher = WeightPublisher(trainer, lambda: client.engines, route="in_process", deadline_s=5)
    base: Any = SimpleNamespace(
        cfg=Config(), learner=AtRest(), layout=SimpleNamespace(engines=None, time_shared=False), cluster=None
    )

    async def connect(name: str, cfg: Config) -> ScriptedEngine:
        return ScriptedEngine(name=name)

    monkeypatch.setattr(builders, "connect_engine", connect)

    async def run() -> tuple[dict[str, float], dict[str, float]]:
        supervisor = builders.build_supervisor(base, client, publisher, None)
        wanted: Any = Followed()
        publish = builders.SupervisedPublisher(base.learner, client, publisher, supervisor, wanted=wanted).publish
        assert not wanted.begun, "no engine may join before the others have weights"
        first = await publish(1)
        assert wanted.begun
        for engine in engines[:dying]:
            engine.dies = True
        return first, await publish(2)

    first, second = asyncio.run(run())
    assert second["engines/restarts"] == dying
    weights = {name: value for name, value in first.items() if name.startswith("weights/")}
    assert weights | {"weights/version": 2.0} == {n: v for n, v in second.items() if n.startswith("weights/")}
