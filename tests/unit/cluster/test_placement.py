"""Waits for slots end when their node has died."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_train.cluster import placement
from skyrl_train.cluster.placement import ResourcePool, await_unless_node_lost, wait_for_rescheduling
from skyrl_train.errors import ClusterLost, InsufficientResources


def make_pool(monkeypatch: pytest.MonkeyPatch, *snapshots: dict[int, str]) -> ResourcePool:
    """Return a pool of two slots whose bundles are on these nodes in successive checks; the last one stays. Only node
    `a` is alive.
    """
    remaining = list(snapshots)

    def table(group: Any) -> dict[str, Any]:
        return {"bundles_to_node_id": remaining.pop(0) if len(remaining) > 1 else remaining[0]}

    monkeypatch.setattr(placement, "placement_group_table", table)
    monkeypatch.setattr(placement.ray, "nodes", lambda: [{"NodeID": node, "Alive": node == "a"} for node in "ab"])
    monkeypatch.setattr(placement, "CHECK_INTERVAL_S", 0.01)
    group: Any = None
    return ResourcePool(
        group,
        num_slots=2,
        cpus_per_slot=1.0,
        gpus_per_slot=0.0,
        actors_per_slot=1,
        min_cores_per_slot=1,
        bundle_order=(1, 0),
    )


@pytest.mark.defect("C2-engines-restart-on-dead-node")
@pytest.mark.parametrize("lost", ["", "b"], ids=["Ray knows", "Ray does not know yet"])
def test_start_on_lost_node_fails_immediately(monkeypatch: pytest.MonkeyPatch, lost: str):
    slots = make_pool(monkeypatch, {0: "a", 1: "a"}, {0: "a", 1: "a"}, {0: "a", 1: lost})
    ended = asyncio.Event()

    async def start() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def run() -> None:
        with pytest.raises(ClusterLost, match=r"a node of this run died"):
            await await_unless_node_lost(start(), slots, [0])
        await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(run())


@pytest.mark.defect("engine-restart-waits-for-lost-node")
def test_slow_start_ignores_loss_of_other_nodes(monkeypatch: pytest.MonkeyPatch):
    """Lose the node of the other slot, which fits on no other node."""

    async def start() -> str:
        await asyncio.sleep(0.05)
        return "capabilities"

    async def run() -> None:
        slots = make_pool(monkeypatch, {0: "a", 1: ""})
        await wait_for_rescheduling(slots, [1], 0.0)
        assert await await_unless_node_lost(start(), slots, [1]) == "capabilities"
        with pytest.raises(InsufficientResources, match="no free resources for its actors"):
            await wait_for_rescheduling(slots, [0, 1], 0.0)

    asyncio.run(run())
