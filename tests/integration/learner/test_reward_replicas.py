"""Replicas of a reward model in actors: the calls that a run makes, and the death of a replica."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.hydra import load_preset
from skyrl_train.config.predicates import count_slots
from skyrl_train.errors import ConfigError, RewardModelLost
from skyrl_train.experiment.learner import build_reward_model
from skyrl_train.experiment.placement import reserve_slots
from skyrl_train.learner.reward_worker import RewardModel
from skyrl_train.testing.tiny_models import save_tiny_reward_model

CONVERSATION = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]


def build_replicas(cluster: Cluster, path: str, count: int) -> RewardModel:
    cfg = load_preset(
        [
            "device=cpu",
            "trainer.bf16=false",
            f"trainer.reward.model.path={path}",
            f"trainer.placement.reward_num_gpus_per_node={count}",
        ]
    )
    placement, generator = cfg.trainer.placement, cfg.generator
    counts = count_slots(placement, generator, with_policy=False, with_engines=False, with_reward=True)
    layout = reserve_slots(cluster, counts, placement, generator, device="cpu", deadline_s=30)
    model = build_reward_model(cluster, cfg.trainer, layout, device="cpu")
    assert model is not None
    return model


async def score_forever(model: RewardModel) -> None:
    while True:
        await asyncio.gather(*(model.score([CONVERSATION]) for _ in range(2)))


@pytest.mark.on_demand
@pytest.mark.slow
def test_dead_replica_stops_the_run_by_name(tmp_path: Path):
    async def run(model: RewardModel) -> None:
        await model.setup(120)
        first, second = await asyncio.gather(*(model.score([CONVERSATION, CONVERSATION]) for _ in range(2)))
        assert first == second and isinstance(first[0], float) and first[0] == first[1]
        model.replicas[1].kill()
        with pytest.raises(RewardModelLost, match="reward model 1 died during score"):
            await asyncio.wait_for(score_forever(model), 60)  # a replica that is being killed may still answer

    path = save_tiny_reward_model(tmp_path / "model")
    with Cluster():
        with Cluster() as first_cluster:
            asyncio.run(run(build_replicas(first_cluster, path, 2)))
        with Cluster() as second_cluster, pytest.raises(ConfigError, match=r"trainer\.reward\.model\.path='/no/such"):
            asyncio.run(build_replicas(second_cluster, "/no/such", 1).setup(120))
