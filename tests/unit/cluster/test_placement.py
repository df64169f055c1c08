"""What waits for slots ends when their node has died."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_train.cluster import placement
from skyrl_train.cluster.placement import Slots, unless_lost
from skyrl_train.errors import ClusterLost


def slots_of(monkeypatch: pytest.MonkeyPatch, *states: str) -> Slots:
    """Slots whose placement group has these states, one after another; the last one stays."""
    left = list(states)

    def table(group: Any) -> dict[str, str]:
        return {"state": left.pop(0) if len(left) > 1 else left[0]}

    monkeypatch.setattr(placement, "placement_group_table", table)
    monkeypatch.setattr(placement, "_LOOKS_EVERY_S", 0.01)
    group: Any = None
    return Slots(group, count=1, cpus=1.0, gpus=0.0, tenants=1, cores=1)


@pytest.mark.defect("C2-a-dead-node-is-restarted")
def test_a_start_in_slots_of_a_dead_node_ends_at_once_and_names_it(monkeypatch: pytest.MonkeyPatch):
    slots = slots_of(monkeypatch, "CREATED", "CREATED", "RESCHEDULING")
    ended = asyncio.Event()

    async def start() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def run() -> None:
        with pytest.raises(ClusterLost, match=r"a node with slots of this run died .* is rescheduling"):
            await unless_lost(start(), slots)
        await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(run())


def test_a_start_that_takes_its_time_is_waited_for_while_the_node_lives(monkeypatch: pytest.MonkeyPatch):
    async def start() -> str:
        await asyncio.sleep(0.05)
        return "capabilities"

    assert asyncio.run(unless_lost(start(), slots_of(monkeypatch, "CREATED"))) == "capabilities"
