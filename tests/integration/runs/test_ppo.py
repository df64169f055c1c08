"""PPO with a critic, and a reference that follows the policy, started through the entrypoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .conftest import Run, metrics_of

Small = Callable[[Path], list[str]]
Start = Callable[..., dict[int, dict[str, float]]]
ENVIRONMENT = """
from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register


class ParityEnv(BaseTextEnv):
    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=1.0 + 0.5 * (len(action) % 2), done=True, metadata={})


register("parity_and_1", "parity_env:ParityEnv")
"""


@pytest.fixture
def start(run: Run, small: Small, plugins: Path, tmp_path: Path) -> Start:
    """Return a function that runs 2 steps per epoch, with rewards for a random model, and returns its metrics."""
    (plugins / "parity_env.py").write_text(ENVIRONMENT)
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start_run(name: str, *overrides: str) -> dict[int, dict[str, float]]:
        excluded = ("environment.", "data.", "trainer.ckpt_i")
        base = [override for override in small(tmp_path / name) if not override.startswith(excluded)]
        run(
            "main_base",
            *base,
            f"data.train_data=['{tmp_path / 'rows.jsonl'}']",
            "trainer.plugins=[parity_env]",
            "environment.env_class=parity_and_1",
            "trainer.epochs=2",
            "trainer.ckpt_interval=1",
            "data.val_data=[]",
            *overrides,
        )
        return metrics_of(tmp_path / name)

    return start_run


def has_same_weights(file: Path, other_file: Path) -> bool:
    weights, others = load_file(file), load_file(other_file)
    return weights.keys() == others.keys() and all(
        bool((weights[name] == other).all()) for name, other in others.items()
    )


def training_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of the training, without those of weight syncs."""
    return {name: value for name, value in metrics.items() if name.startswith(("critic/", "policy/", "reward/"))}


@pytest.mark.slow
def test_ppo_with_separate_critic_resumes_bitwise_identical(start: Start, tiny_model_path: str, tmp_path: Path):
    ppo = [
        "trainer.algorithm.advantage_estimator=gae",
        f"trainer.critic.model.path={tiny_model_path}",
        "trainer.critic.optimizer_config.lr=1e-3",
        "trainer.critic_mini_batch_size=2",
        "trainer.update_epochs_per_batch=2",
        "trainer.max_steps=3",
    ]
    rows = start("colocated", *ppo)
    assert rows[1]["critic/explained_variance"] == 0, "a new critic returns 0 for all states"
    losses, values = ([rows[step][f"critic/{name}"] for step in (1, 2, 3)] for name in ("loss", "value_mean"))
    assert losses[0] > 1.2 * losses[1] > 1.44 * losses[2]
    assert 0 < values[0] < values[1] < values[2] < 1.5
    rows.pop(0)  # metrics of the first weight sync
    assert all(row["critic/lr"] == 1e-3 and row["critic/grad_norm"] > 0 for row in rows.values())

    checkpoint = tmp_path / "colocated" / "ckpts" / "global_step_2"
    assert {path.name for path in checkpoint.iterdir() if path.is_dir()} == {"policy", "critic"}
    resume_options = ["trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}"]
    resumed = start("dedicated", *ppo, *resume_options, "trainer.placement.colocate_all=false")
    assert training_metrics(resumed[3]) == training_metrics(rows[3])
    for role in ("policy", "critic"):
        file = f"ckpts/global_step_3/{role}/shard_0.safetensors"
        assert has_same_weights(tmp_path / "dedicated" / file, tmp_path / "colocated" / file), role


@pytest.mark.on_demand
@pytest.mark.slow
def test_reference_follows_policy_and_is_resumed(start: Start, tmp_path: Path):
    options = [
        "trainer.algorithm.use_kl_loss=true",
        "trainer.update_ref_every_epoch=true",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.placement.colocate_all=false",
        "trainer.placement.colocate_policy_ref=false",
        "trainer.placement.ref_num_gpus_per_node=2",  # the policy has one rank
    ]
    rows = start("straight", *options)
    assert [rows[step]["policy/kl"] > 1e-6 for step in (1, 2, 3, 4)] == [False, True, False, True]
    assert not (tmp_path / "straight" / "ckpts" / "reference.partial").exists()

    checkpoint = tmp_path / "straight" / "ckpts" / "global_step_3"
    resumed = start("resumed", *options, "trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}")
    assert training_metrics(resumed[4]) == training_metrics(rows[4])
