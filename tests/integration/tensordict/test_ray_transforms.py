"""Transforms whose state is in a Ray actor share it, also if they start at the same time."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.tensordict.envs.chat import DatasetChatEnv
from skyrl_train.tensordict.losses.mc_advantage import RayMCAdvantage


@pytest.fixture(scope="module", autouse=True)
def ray_runtime() -> Iterator[None]:
    with Cluster():
        yield


@pytest.fixture(autouse=True)
def no_actor_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide actors from transforms, as if another process made them a moment later; Ray's own look-up finds them."""
    find = ray.get_actor

    def missing(name: str, **settings: Any) -> Any:
        if not settings:
            raise ValueError(f"no actor {name}")
        return find(name, **settings)

    monkeypatch.setattr(ray, "get_actor", missing)


def step(reward: float, version: int = 0) -> TensorDictBase:
    row = {"query": "q", "policy_version": torch.tensor(version)}
    row |= {"next": {"reward": torch.tensor([[reward]]), "done": torch.tensor([[True]])}}
    return lazy_stack([TensorDict(row)])


@pytest.mark.timeout(300)
def test_named_advantages_share_groups_and_statistics():
    make = partial(RayMCAdvantage, 2, actor_name="advantages", remote_config={"num_cpus": 0.1}, max_staleness=0)
    first, second = make(), make()
    assert first.inv(step(0.0)) is None
    assert [round(float(row["advantage"]), 3) for row in second.inv(step(1.0)).unbind(0)] == [-0.707, 0.707]
    assert first.inv(step(0.0)) is None and second.inv(step(0.0, version=1)) is None  # drops the older one
    assert first.get_stats()["completed_trajectories"] == 4 and second.get_stats()["abandoned"] == 1
    assert first.flush() == 1 and second.queued_groups == 0 and first.get_stats()["abandoned"] == 2


@pytest.mark.timeout(300)
def test_environments_share_rows_of_named_reader():
    rows = [{"query": str(number)} for number in range(4)]
    settings: dict[str, Any] = {"shuffle": False, "num_envs": 2, "ray_backend": True, "dataloader_actor_name": "rows"}
    first, second = (DatasetChatEnv(dataset=rows, **settings) for _ in range(2))
    assert [row["query"] for env in (first, second) for row in env.reset().unbind(0)] == ["0", "1", "2", "3"]
