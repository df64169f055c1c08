"""A reward model as the only source of rewards: with colocated or dedicated placement, and in evaluation only."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_reward_model

from .conftest import Run, metrics_of

Overrides = Callable[[Path], list[str]]


@pytest.fixture
def chat(easy: Overrides, tmp_path: Path) -> Overrides:
    """Return overrides for two steps whose rewards are 10 times the scores of a tiny classifier."""
    reward_model = save_tiny_reward_model(tmp_path / "reward_model", seed=1)

    def overrides(folder: Path) -> list[str]:
        folder.mkdir()
        return [
            *(option for option in easy(folder) if not option.startswith(("environment.", "trainer.plugins"))),
            "environment.env_class=chat",
            f"trainer.reward.model.path={reward_model}",
            "trainer.reward.coef=10",
            "trainer.max_steps=2",
            "trainer.ckpt_interval=0",
        ]

    return overrides


REWARD_METRICS = ("reward/", "environment/", "policy/", "response/")


@pytest.mark.slow
@pytest.mark.parametrize("dedicated", [False, pytest.param(True, marks=pytest.mark.on_demand)])
def test_reward_model_in_shared_and_dedicated_placement(run: Run, chat: Overrides, tmp_path: Path, dedicated: bool):
    run("main_base", *chat(tmp_path / "colocated"))
    rows = metrics_of(tmp_path / "colocated")
    for step in (1, 2):
        assert rows[step]["rollouts/failed"] == 0
        assert rows[step]["reward/mean"] == pytest.approx(10 * rows[step]["environment/reward_model_score"])
        assert rows[step]["reward/std"] > 0 and rows[step]["policy/grad_norm"] > 0
    if dedicated:
        two_replicas = ["trainer.placement.colocate_all=false", "trainer.placement.reward_num_gpus_per_node=2"]
        run("main_base", *chat(tmp_path / "dedicated"), *two_replicas)
        rewards = [
            {
                step: {key: value for key, value in row.items() if key.startswith(REWARD_METRICS)}
                for step, row in metrics.items()
            }
            for metrics in (rows, metrics_of(tmp_path / "dedicated"))
        ]
        assert rewards[0] == rewards[1], "scores depend neither on the replica nor on timing"


@pytest.mark.on_demand
@pytest.mark.slow
def test_reward_model_scores_evaluation_only(run: Run, chat: Overrides, tmp_path: Path):
    overrides = [
        option for option in chat(tmp_path / "run") if not option.startswith(("data.val", "trainer.eval_interval"))
    ]
    evaluation = [f"data.val_data=['{tmp_path / 'run' / 'rows.jsonl'}']", "trainer.eval_interval=1"]
    done = run("main_generate", *overrides, *evaluation)
    scores = json.loads(done.stdout[done.stdout.index("{") :])
    assert scores["eval/unknown/avg_score"] != 0
    assert scores["eval/unknown/num_failed"] == 0
    short = ["trainer.reward.model_config_kwargs.max_position_embeddings=8"]
    failed = run("main_generate", *overrides, *evaluation, *short, expect=1)
    assert "reward_model_too_long" in failed.stderr
