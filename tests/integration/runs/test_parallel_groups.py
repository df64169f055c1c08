"""Parallel groups with sequence and tensor parallelism, through the entrypoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import Run, metrics_of


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sequence", "tensor"])
def test_all_models_train_in_parallel_groups(
    run: Run, easy: Callable[[Path], list[str]], tiny_model_path: str, tmp_path: Path, kind: str
):
    run(
        "main_base",
        *easy(tmp_path),
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path={tiny_model_path}",
        "trainer.critic.optimizer_config.lr=1e-3",
        "trainer.critic_mini_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.max_steps=2",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.critic.sequence_parallel_size=2",
        *(f"trainer.{role}.{kind}_parallel_size=2" for role in ("policy", "ref")),
        "generator.weight_sync_check=probe",
    )
    rows = metrics_of(tmp_path)
    for step in (1, 2):
        assert rows[step]["weights/probe_gap"] <= 1e-4
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4, (
            "log-probs differ from those of the engine, which has one rank"
        )
        assert rows[step]["policy/grad_norm"] > 0
        assert rows[step]["critic/grad_norm"] > 0
    assert 1e-6 < rows[1]["policy/kl"] < rows[2]["policy/kl"]
    assert rows[2]["critic/loss"] < rows[1]["critic/loss"]


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("replay", ["rollout", "old_policy"])
def test_expert_parallel_moe_trains_with_routing_replay(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, replay: str
):
    model = save_tiny_model(tmp_path / "model", "qwen3_moe")
    run(
        "main_base",
        *easy(tmp_path),
        f"trainer.policy.model.path={model}",
        "trainer.policy_mini_batch_size=2",
        "trainer.max_steps=2",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.policy.expert_parallel_size=2",
        f"trainer.moe_routing_replay={replay}",
        "trainer.algorithm.router_aux_loss_coef=0.001",
        "generator.weight_sync_check=probe",
    )
    rows = metrics_of(tmp_path)
    for step in (1, 2):
        assert rows[step]["weights/probe_gap"] <= 1e-4
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4, (
            "log-probs differ from those of the engine, which has all experts"
        )
        assert rows[step]["policy/grad_norm"] > 0
        assert 1.0 <= rows[step]["policy/router_load_max"] <= 2.0
        assert 0.001 <= rows[step]["policy/router_aux_loss"] <= 0.002
    assert 0.9 < rows[1]["policy/ratio"] < 1.1
