"""Group filters between rollouts and training, from the command line to the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from .conftest import Run, metrics_of

PLUGIN = """
from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register


class ParityEnv(BaseTextEnv):
    def step(self, action):
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action) % 2), done=True, metadata={})


register("parity", "parity_plugin:ParityEnv")
"""

SIX_STEPS = ("trainer.max_steps=6", "trainer.epochs=6", "trainer.hf_save_interval=6", "trainer.eval_before_train=false")


@pytest.fixture
def parity(small: Callable[[Path], list[str]], plugins: Path, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Return overrides for 10 prompts that a random model answers correctly half of the time, without evaluation."""
    (plugins / "parity_plugin.py").write_text(PLUGIN)
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(10)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def overrides(folder: Path) -> list[str]:
        base = [option for option in small(folder) if not option.startswith(("environment.", "data."))]
        return [
            *base,
            f"data.train_data=['{tmp_path / 'rows.jsonl'}']",
            "data.val_data=[]",
            "trainer.plugins=[parity_plugin]",
            "environment.env_class=parity",
            "generator.n_samples_per_prompt=2",
        ]

    return overrides


@pytest.mark.on_demand
@pytest.mark.slow
def test_filtered_run_resumes_bitwise_identical(run: Run, parity: Callable[[Path], list[str]], tmp_path: Path):
    filters = [
        "trainer.algorithm.dynamic_sampling.type=filter",
        "trainer.algorithm.overlong_buffer.len=8",
        "trainer.algorithm.overlong_buffer.penalty_factor=0.5",
        "data.curriculum.min_pass_rate=0.1",
        *SIX_STEPS,
    ]
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    run("main_base", *parity(straight), *filters)
    from_step_2 = f"trainer.resume_path={straight / 'ckpts' / 'global_step_2'}"
    run("main_base", *parity(resumed), *filters, "trainer.resume_mode=from_path", from_step_2)

    rows = metrics_of(straight)
    assert metrics_of(resumed) == {step: rows[step] for step in range(3, 7)}
    assert sum(rows[step]["sampling/dropped"] for step in range(1, 7)) > 0
    assert sum(rows[step]["sampling/curriculum_skipped"] for step in range(1, 7)) > 0
    assert all(rows[step]["rollouts/failed"] == 0 for step in range(1, 7))
    assert 0 < rows[1]["reward/length_penalty"] <= 0.5
    for step in range(1, 7):
        used = rows[step]["sampling/drawn"] - rows[step]["sampling/dropped"]
        assert used in (2, 4), "an epoch of 10 prompts has steps of 4, 4 and 2"
    weights = "exports/global_step_6/policy/model.safetensors"
    actual, expected = load_file(resumed / weights), load_file(straight / weights)
    assert all(bool((actual[name] == tensor).all()) for name, tensor in expected.items())


@pytest.mark.on_demand
@pytest.mark.slow
def test_over_provisioned_run_cancels_slow_rollouts(run: Run, parity: Callable[[Path], list[str]], tmp_path: Path):
    run(
        "main_base",
        *parity(tmp_path),
        "trainer.max_steps=3",
        "trainer.eval_before_train=false",
        "generator.over_provisioning=0.5",
        "generator.apply_overlong_filtering=true",
        "generator.zero_reward_on_non_stop=true",
        "trainer.algorithm.zero_variance_filter=true",
    )
    rows = metrics_of(tmp_path)
    assert [rows[step]["sampling/cancelled"] for step in (1, 2, 3)] == [2, 2, 1]
    assert [rows[step]["rollouts/trajectories"] for step in (1, 2, 3)] == [8, 8, 4]
    assert all(rows[step]["rollouts/failed"] == 0 for step in (1, 2, 3))
