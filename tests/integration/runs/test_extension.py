"""Extensions by users: plugins under Ray, and subclasses of Experiment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.trainer.batch_dump import read_batch

from .conftest import Run, metrics_of

PLUGIN = """
import torch
import skyrl_train as sk
from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register


@sk.register.advantage("centred")
def centred(rewards, group_ids, valid, *, grpo_norm_by_std):
    return torch.where(valid, rewards - rewards[valid].mean(), 0.0)


@sk.register.policy_loss("reinforce")
def reinforce(logprobs, advantages, mask, *, eps_clip_low, eps_clip_high):
    return -logprobs * advantages * mask, torch.zeros_like(mask)


class LetterEnv(BaseTextEnv):
    def step(self, action):
        reward = float(len(action) % 3)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"length": len(action)})


register("letters", "my_plugin:LetterEnv")
"""

SUBCLASS = """
from skyrl_train.experiment.base import Experiment, run_experiment


class Halved(Experiment):
    def build_generator(self, client, environments, *, evaluation):
        generator = super().build_generator(client, environments, evaluation=evaluation)
        rollout = generator.rollout

        async def halved(prompt, position):
            group = await rollout(prompt, position)
            for row in group.trajectories:
                row.reward = 0.25
            return group

        generator.rollout = halved
        return generator


if __name__ == "__main__":
    run_experiment(Halved)
"""

ONE_STEP = (
    "trainer.max_steps=1",
    "trainer.ckpt_interval=0",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=0",
)


def without_environment(overrides: list[str]) -> list[str]:
    return [override for override in overrides if not override.startswith(("environment.", "data.train"))]


@pytest.mark.on_demand
@pytest.mark.slow
def test_plugins_work_in_every_process(
    run: Run,
    small: Callable,  # type: ignore[type-arg]
    plugins: Path,
    tmp_path: Path,
):
    (plugins / "my_plugin.py").write_text(PLUGIN)
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(
        "main_base",
        *without_environment(small(tmp_path)),
        *ONE_STEP,
        f"data.train_data=['{tmp_path / 'rows.jsonl'}']",
        "trainer.plugins=[my_plugin]",
        "environment.env_class=letters",
        "trainer.algorithm.advantage_estimator=centred",
        "trainer.algorithm.policy_loss_type=reinforce",
    )
    row = metrics_of(tmp_path)[1]
    assert row["rollouts/failed"] == 0
    assert row["environment/length"] > 0
    assert row["policy/grad_norm"] > 0


@pytest.mark.on_demand
@pytest.mark.slow
def test_experiment_subclass_replaces_generator(small: Callable, tmp_path: Path):  # type: ignore[type-arg]
    (tmp_path / "main_halved.py").write_text(SUBCLASS)
    command = [sys.executable, str(tmp_path / "main_halved.py"), *small(tmp_path), *ONE_STEP]
    command += ["trainer.dump_data_batch=true"]
    subprocess.run(command, check=True, timeout=500, env=os.environ, capture_output=True)
    assert metrics_of(tmp_path)[1]["reward/mean"] == 0.25
    batch, uids = read_batch(tmp_path / "exports" / "dumped_data" / "global_step_1_training_input.safetensors")
    assert batch.rewards.unique().tolist() == [0.25]
    assert len(batch) == len(uids) == 4 * len(set(uids)) == 16


@pytest.mark.slow
def test_evaluation_scores_without_training(run: Run, small: Callable, tmp_path: Path):  # type: ignore[type-arg]
    done = run("main_generate", *small(tmp_path))
    scores = json.loads(done.stdout[done.stdout.index("{") :])
    assert scores["eval/arithmetic/num_failed"] == 0
    logged = json.loads((tmp_path / "ckpts" / "evaluation" / "metrics.jsonl").read_text())
    assert logged["eval/arithmetic/avg_score"] == scores["eval/arithmetic/avg_score"]
    assert (tmp_path / "exports" / "dumped_evals" / "global_step_0_evals" / "arithmetic.jsonl").exists()
