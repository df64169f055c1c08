from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.engines.base import EngineHealth
from skyrl_train.engines.client import ProgressWatchdog
from skyrl_train.errors import DeadlineExceeded


class HealthStub:
    """A stub of an engine's health; if `moves`, every check reports a new token."""

    def __init__(self, moves: bool):
        self.moves = moves
        self.num_checks = 0
        self.now = EngineHealth("e", 0)

    async def health(self) -> EngineHealth:
        self.num_checks += 1
        if self.moves:
            self.now = replace(self.now, generated_tokens=self.now.generated_tokens + 1)
        return self.now


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@pytest.mark.fault("F29")
@pytest.mark.defect("queued-requests-time-out")
def test_call_lasts_while_engine_makes_progress():
    engine = HealthStub(moves=True)

    async def run() -> list[str]:
        watchdog = ProgressWatchdog("e", engine.health)
        return await asyncio.gather(*(watchdog.watch(after(0.5), 0.1) for _ in range(50)))

    assert asyncio.run(run()) == ["done"] * 50
    assert engine.num_checks < 15  # all calls share the health checks


@pytest.mark.fault("F29")
def test_stalled_engine_fails_and_call_is_cancelled():
    cancelled: list[bool] = []

    async def hangs() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    with pytest.raises(DeadlineExceeded, match=r"e\.generate"):
        asyncio.run(ProgressWatchdog("e", HealthStub(moves=False).health).watch(hangs(), 0.1))
    assert cancelled == [True]


def test_engine_without_health_response_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.engines.client.HEALTH_TIMEOUT_S", 0.1)

    async def hang() -> Any:
        await asyncio.sleep(60)

    with pytest.raises(DeadlineExceeded, match=r"e\.health"):
        asyncio.run(ProgressWatchdog("e", hang).watch(after(60), 30.0))
