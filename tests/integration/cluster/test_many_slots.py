"""Processes that use several slots, on a Ray runtime that believes in four accelerators."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from skyrl_train.cluster.actors import spawn
from skyrl_train.cluster.placement import locate_gpus, reserve_pool, visible_devices
from skyrl_train.cluster.ray_cluster import Cluster


class Sees:
    """What is spawned."""

    def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def threads(self) -> tuple[int, str]:
        """Those of torch, and of the processes that it starts."""
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings={"num_cpus": 8, "num_gpus": 4, "object_store_memory": 100 << 20}) as cluster:
        yield cluster


@pytest.mark.defect("one-core-beside-an-accelerator")
@pytest.mark.slow
def test_an_actor_sees_the_accelerators_of_all_its_slots_and_their_cores_beside_a_tenant_in_each(cluster: Cluster):
    slots = reserve_pool(cluster, count=4, actors_per_slot=2, device="cuda", total_slots=4, deadline_s=30, key="test")
    target = f"{__name__}:Sees"

    async def run() -> None:
        ranks = [
            spawn(cluster, target, {}, pool=slots, index=index, name="rank", is_async=False, deadline_s=60)
            for index in range(4)
        ]
        seen = [await rank.devices() for rank in ranks]
        assert sorted(seen) == ["0", "1", "2", "3"]
        assert await ranks[0].threads() == (2, "2"), "8 CPUs for four slots"
        engines = []
        for first in (0, 2):
            places = await locate_gpus(slots, range(first, first + 2), 60)
            devices = visible_devices(places, "test")
            assert devices == f"{seen[first]},{seen[first + 1]}"
            engines.append(
                spawn(
                    cluster, target, {}, pool=slots, index=first, name="engine", is_async=True, deadline_s=60,
                    devices=devices,
                )
            )  # fmt: skip
            assert await engines[-1].devices() == devices
        assert await engines[0].threads() == (2, "2")

    asyncio.run(run())
