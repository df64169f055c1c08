"""What test_nodes.py runs on a cluster of three more nodes, two of which have the label role=trainer."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import ray

from skyrl_train.cluster.actors import Remote, spawn
from skyrl_train.cluster.paths import SharedPath, check_paths
from skyrl_train.cluster.placement import Slots, placed_again, reserve
from skyrl_train.cluster.room import Need, fits, free_nodes
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.errors import ConfigError, NoRoom, WorkerDied

TRAINER = {"role": "trainer"}
ONE_OF_EACH: dict[str, Any] = {"tenants": 1, "device": "cpu", "total_slots": 5, "deadline_s": 20.0, "key": "test"}


def say(line: str) -> None:
    print(line, flush=True)


def labels_of(slots: Slots) -> list[str]:
    found = {node["NodeID"]: node["Labels"].get("role", "none") for node in ray.nodes()}
    return [found[node] for node in slots.nodes]


def check_placement(cluster: Cluster) -> tuple[Slots, Slots]:
    """Two slots spread over the trainer's nodes, and a pair on one node that is anybody's."""
    ranks = reserve(cluster, count=2, strategy="SPREAD", labels=TRAINER, **ONE_OF_EACH)
    assert labels_of(ranks) == ["trainer", "trainer"]
    assert len(set(ranks.nodes)) == 2
    pair = reserve(cluster, count=2, together=2, strategy="SPREAD", labels={"role": "engine"}, **ONE_OF_EACH)
    assert len(set(pair.nodes)) == 1
    assert pair.bundle(1) == 0
    with pytest.raises(ConfigError, match=r"test: needs 1 slots of .* on nodes with the labels {'role': 'nobody'}"):
        reserve(cluster, count=1, labels={"role": "nobody"}, **(ONE_OF_EACH | {"deadline_s": 1.0}))
    # An autoscaler adds nodes for a group that waits, so what nobody has is waited for.
    with pytest.raises(ConfigError, match=r"test: needs 1 slots of 1 GPU.*not placed within 1 s"):
        reserve(cluster, count=1, **(ONE_OF_EACH | {"deadline_s": 1.0, "device": "cuda"}))
    return ranks, pair


def check_seen(ranks: Slots) -> None:
    """/proc/self/cwd is a folder of each node's own."""
    nodes = frozenset(ranks.nodes)
    here, there = (Path("/proc/self/cwd") / name for name in ("one-node-lacks-it", "one-node-has-it"))
    nowhere = SharedPath("hub", "/proc/self/cwd/nobody-has-it", nodes)
    check_paths([SharedPath("model", os.getcwd(), nodes), SharedPath("ckpts", os.getcwd(), nodes, True)], 60)
    assert not list(Path.cwd().glob(".seen*"))
    ckpts, resumed = SharedPath("ckpts", "/proc/self/cwd", nodes, True), SharedPath("resume", str(there), nodes)
    with pytest.raises(ConfigError) as caught:
        check_paths([SharedPath("model", str(here), nodes), ckpts, resumed, nowhere], 60)
    first, second, third = str(caught.value).splitlines()
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    assert f"model='{here}': 1 of the 2 nodes that use it do not see it: 127." in first
    assert "2 of the 2 nodes that use it do not see the driver's folder" in second
    assert all(addresses[node] in second for node in nodes)
    assert f"resume='{there}': 1 of the 2 nodes that use it do not see it: 127." in third


def rank_on(cluster: Cluster, slots: Slots, index: int) -> Remote:
    target = "tests.integration.cluster.subject:Subject"
    kwargs: dict[str, Any] = {"slots": slots, "index": index, "name": f"rank {index}", "concurrent": False}
    return spawn(cluster, target, {}, deadline_s=60.0, **kwargs)


async def check_loss(cluster: Cluster, ranks: Slots) -> None:
    """A node is lost: named by what ran there; its slot has no room on the one that is full, and then it has."""
    workers = [rank_on(cluster, ranks, index) for index in range(2)]
    for worker in workers:
        await worker.add(1)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    beside = reserve(cluster, count=1, labels=TRAINER, **(ONE_OF_EACH | {"total_slots": 1}))
    lost = next(node for node in ranks.nodes if node not in beside.nodes)
    say(f"KILL {addresses[lost]}")
    dead = workers[ranks.nodes.index(lost)]
    with pytest.raises(WorkerDied, match=rf"its node {addresses[lost]} \(Ray's id {lost[:12]}\) was lost"):
        await dead.hang()
    with pytest.raises(NoRoom, match="the others have no room for them"):
        await placed_again(ranks, [0, 1], 1.0)
    kept = 1 - ranks.nodes.index(lost)
    workers[kept].kill()
    await placed_again(ranks, [kept], 0.0)
    assert await rank_on(cluster, ranks, kept).add(1) == 1, "Ray starts actors in bundles whose node lives"
    assert not fits([Need(1, {"CPU": ranks.cpus}, TRAINER)], free_nodes())
    ray.util.remove_placement_group(beside.group)
    await placed_again(ranks, [0, 1], 20.0)
    again = rank_on(cluster, ranks, ranks.nodes.index(lost))
    assert await again.add(2) == 2


def main() -> None:
    with Cluster() as cluster:
        assert not cluster.single_machine
        ranks, _ = check_placement(cluster)
        check_seen(ranks)
        asyncio.run(check_loss(cluster, ranks))
    say("DONE")


if __name__ == "__main__":
    main()
