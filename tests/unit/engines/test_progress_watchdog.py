from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.engines.base import EngineHealth
from skyrl_train.engines.client import ProgressWatchdog
from skyrl_train.errors import DeadlineExceeded


class Counting:
    """An engine's health: `moves` says whether it has sampled something since it was last asked."""

    def __init__(self, moves: bool):
        self.moves = moves
        self.asked = 0
        self.now = EngineHealth("e", 0)

    async def health(self) -> EngineHealth:
        self.asked += 1
        if self.moves:
            self.now = replace(self.now, generated_tokens=self.now.generated_tokens + 1)
        return self.now


async def after(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "done"


@pytest.mark.fault("F29")
@pytest.mark.defect("long-answers-cut-for-having-waited")
def test_call_lasts_while_engine_makes_progress():
    engine = Counting(moves=True)

    async def run() -> list[str]:
        progress = ProgressWatchdog("e", engine.health)
        return await asyncio.gather(*(progress.watch(after(0.5), 0.1) for _ in range(50)))

    assert asyncio.run(run()) == ["done"] * 50
    assert engine.asked < 15  # once for all of them


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
        asyncio.run(ProgressWatchdog("e", Counting(moves=False).health).watch(hangs(), 0.1))
    assert cancelled == [True]


def test_engine_without_health_response_fails(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.engines.client.HEALTH_TIMEOUT_S", 0.1)

    async def silent() -> Any:
        await asyncio.sleep(60)

    with pytest.raises(DeadlineExceeded, match=r"e\.health"):
        asyncio.run(ProgressWatchdog("e", silent).watch(after(60), 30.0))
