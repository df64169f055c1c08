"""The program that test_nodes.py runs on a cluster of three more nodes, two of which have the label role=trainer."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_train.cluster.actors import ActorProxy, spawn
from skyrl_train.cluster.capacity import ResourceDemand, can_place, query_free_capacity
from skyrl_train.cluster.placement import ResourcePool, reserve_pool, wait_for_rescheduling
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.cluster.shared_paths import SharedPath, check_shared_paths
from skyrl_train.errors import ConfigError, InsufficientResources, WorkerDied

TRAINER = {"role": "trainer"}
POOL_ARGUMENTS: dict[str, Any] = {
    "actors_per_slot": 1,
    "device": "cpu",
    "total_slots": 5,
    "deadline_s": 20.0,
    "key": "test",
}


def print_line(line: str) -> None:
    print(line, flush=True)


def labels_of(slots: ResourcePool) -> list[str]:
    label_by_node = {node["NodeID"]: node["Labels"].get("role", "none") for node in ray.nodes()}
    return [label_by_node[node] for node in slots.slot_node_ids]


def check_placement(cluster: Cluster) -> tuple[ResourcePool, ResourcePool]:
    """Reserve two slots spread over the trainer's nodes, and a pair on one node of another label."""
    ranks = reserve_pool(cluster, count=2, strategy="SPREAD", labels=TRAINER, **POOL_ARGUMENTS)
    assert labels_of(ranks) == ["trainer", "trainer"]
    assert len(set(ranks.slot_node_ids)) == 2
    pair = reserve_pool(
        cluster, count=2, slots_per_bundle=2, strategy="SPREAD", labels={"role": "engine"}, **POOL_ARGUMENTS
    )
    assert len(set(pair.slot_node_ids)) == 1
    assert pair.bundle_index(1) == 0
    with pytest.raises(ConfigError, match=r"test: needs 1 bundles of .* on nodes with the labels {'role': 'nobody'}"):
        reserve_pool(cluster, count=1, labels={"role": "nobody"}, **(POOL_ARGUMENTS | {"deadline_s": 1.0}))
    # An autoscaler may add nodes for a pending group, so a demand that no node satisfies waits, too.
    with pytest.raises(ConfigError, match=r"test: needs 1 GPUs.*not placed within 1 s"):
        reserve_pool(cluster, count=1, **(POOL_ARGUMENTS | {"deadline_s": 1.0, "device": "cuda"}))
    return ranks, pair


def check_shared(ranks: ResourcePool) -> None:
    """Check files on nodes; /proc/self/cwd is another folder on each node."""
    nodes = frozenset(ranks.slot_node_ids)
    missing_on_one, present_on_one = (
        Path("/proc/self/cwd") / name for name in ("one-node-lacks-it", "one-node-has-it")
    )
    missing_everywhere = SharedPath("hub", "/proc/self/cwd/nobody-has-it", nodes)
    check_shared_paths([SharedPath("model", os.getcwd(), nodes), SharedPath("ckpts", os.getcwd(), nodes, True)], 60)
    assert not list(Path.cwd().glob(".seen*"))
    ckpts, resumed = (
        SharedPath("ckpts", "/proc/self/cwd", nodes, True),
        SharedPath("resume", str(present_on_one), nodes),
    )
    with pytest.raises(ConfigError) as caught:
        check_shared_paths([SharedPath("model", str(missing_on_one), nodes), ckpts, resumed, missing_everywhere], 60)
    first, second, third = str(caught.value).splitlines()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    assert f"model='{missing_on_one}': 1 of the 2 nodes that use it do not see it: 127." in first
    assert "2 of the 2 nodes that use it do not see the driver's folder" in second
    assert all(addresses[node] in second for node in nodes)
    assert f"resume='{present_on_one}': 1 of the 2 nodes that use it do not see it: 127." in third


def rank_on(cluster: Cluster, slots: ResourcePool, index: int) -> ActorProxy:
    target = "tests.integration.cluster.subject:Subject"
    kwargs: dict[str, Any] = {"pool": slots, "index": index, "name": f"rank {index}", "is_async": False}
    return spawn(cluster, target, {}, deadline_s=60.0, **kwargs)


async def check_loss(cluster: Cluster, ranks: ResourcePool) -> None:
    """Lose a node: the error names it, and its slot moves once another node has free resources."""
    workers = [rank_on(cluster, ranks, index) for index in range(2)]
    for worker in workers:
        await worker.add(1)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    other_pool = reserve_pool(cluster, count=1, labels=TRAINER, **(POOL_ARGUMENTS | {"total_slots": 1}))
    lost = next(node for node in ranks.slot_node_ids if node not in other_pool.slot_node_ids)
    print_line(f"KILL {addresses[lost]}")
    dead = workers[ranks.slot_node_ids.index(lost)]
    with pytest.raises(WorkerDied, match=rf"its node {addresses[lost]} \(Ray's id {lost[:12]}\) was lost"):
        await dead.hang()
    with pytest.raises(InsufficientResources, match="no free resources for its actors"):
        await wait_for_rescheduling(ranks, [0, 1], 1.0)
    remaining = 1 - ranks.slot_node_ids.index(lost)
    workers[remaining].kill()
    await wait_for_rescheduling(ranks, [remaining], 0.0)
    assert await rank_on(cluster, ranks, remaining).add(1) == 1, "Ray starts actors in bundles whose node is alive"
    assert not can_place([ResourceDemand(1, {"CPU": ranks.cpus_per_slot}, TRAINER)], query_free_capacity())
    ray.util.remove_placement_group(other_pool.placement_group)
    await wait_for_rescheduling(ranks, [0, 1], 20.0)
    moved = rank_on(cluster, ranks, ranks.slot_node_ids.index(lost))
    assert await moved.add(2) == 2


def main() -> None:
    with Cluster() as cluster:
        assert not cluster.is_single_node
        ranks, _ = check_placement(cluster)
        check_shared(ranks)
        asyncio.run(check_loss(cluster, ranks))
    print_line("DONE")


if __name__ == "__main__":
    main()
