"""Processes that use several slots, on a Ray cluster that claims to have four GPUs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from skyrl_train.cluster.actors import spawn
from skyrl_train.cluster.placement import locate_gpus, reserve_pool, visible_devices
from skyrl_train.cluster.ray_cluster import Cluster


class DeviceReporter:
    """A class whose methods return what its actor process can use."""

    def devices(self) -> str:
        return os.environ["CUDA_VISIBLE_DEVICES"]

    def threads(self) -> tuple[int, str]:
        """Return the threads of torch, and OMP_NUM_THREADS of child processes."""
        import torch

        return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(settings={"num_cpus": 8, "num_gpus": 4, "object_store_memory": 100 << 20}) as cluster:
        yield cluster


@pytest.mark.defect("one-cpu-core-per-accelerator")
@pytest.mark.slow
def test_actor_sees_gpus_and_cores_of_its_slots(cluster: Cluster):
    slots = reserve_pool(cluster, count=4, actors_per_slot=2, device="cuda", total_slots=4, deadline_s=30, key="test")
    target = f"{__name__}:DeviceReporter"

    async def run() -> None:
        ranks = [
            spawn(cluster, target, {}, pool=slots, index=index, name="rank", is_async=False, deadline_s=60)
            for index in range(4)
        ]
        rank_devices = [await rank.devices() for rank in ranks]
        assert sorted(rank_devices) == ["0", "1", "2", "3"]
        assert await ranks[0].threads() == (2, "2"), "8 CPUs for four slots"
        engines = []
        for first in (0, 2):
            locations = await locate_gpus(slots, range(first, first + 2), 60)
            devices = visible_devices(locations, "test")
            assert devices == f"{rank_devices[first]},{rank_devices[first + 1]}"
            engines.append(
                spawn(
                    cluster, target, {}, pool=slots, index=first, name="engine", is_async=True, deadline_s=60,
                    devices=devices,
                )
            )  # fmt: skip
            assert await engines[-1].devices() == devices
        assert await engines[0].threads() == (2, "2")

    asyncio.run(run())
