"""What waits for slots ends when their node has died."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_train.cluster import placement
from skyrl_train.cluster.placement import ResourcePool, await_unless_node_lost, wait_for_rescheduling
from skyrl_train.errors import ClusterLost, InsufficientResources


def slots_of(monkeypatch: pytest.MonkeyPatch, *looks: dict[int, str]) -> ResourcePool:
    """Two slots whose bundles are on these nodes, at one look after another; the last one stays. Node `a` lives."""
    left = list(looks)

    def table(group: Any) -> dict[str, Any]:
        return {"bundles_to_node_id": left.pop(0) if len(left) > 1 else left[0]}

    monkeypatch.setattr(placement, "placement_group_table", table)
    monkeypatch.setattr(placement.ray, "nodes", lambda: [{"NodeID": one, "Alive": one == "a"} for one in "ab"])
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


@pytest.mark.defect("C2-a-dead-node-is-restarted")
@pytest.mark.parametrize("lost", ["", "b"], ids=["Ray knows", "Ray does not know yet"])
def test_a_start_in_slots_of_a_dead_node_ends_at_once(monkeypatch: pytest.MonkeyPatch, lost: str):
    slots = slots_of(monkeypatch, {0: "a", 1: "a"}, {0: "a", 1: "a"}, {0: "a", 1: lost})
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


@pytest.mark.defect("an-engine-waits-for-the-nodes-of-others")
def test_a_start_that_takes_its_time_is_waited_for_while_its_own_node_lives(monkeypatch: pytest.MonkeyPatch):
    """That of the other slot is lost, and there is no room for another one."""

    async def start() -> str:
        await asyncio.sleep(0.05)
        return "capabilities"

    async def run() -> None:
        slots = slots_of(monkeypatch, {0: "a", 1: ""})
        await wait_for_rescheduling(slots, [1], 0.0)
        assert await await_unless_node_lost(start(), slots, [1]) == "capabilities"
        with pytest.raises(InsufficientResources, match="no free resources for its actors"):
            await wait_for_rescheduling(slots, [0, 1], 0.0)

    asyncio.run(run())
