"""DeepSpeed through the entrypoint: it trains, engines hold its weights, and a run resumes bitwise."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run, metrics_of


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("stage", "ranks"), [(2, 1), (3, 2)])
def test_deepspeed_run_resumes_bitwise(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, stage: int, ranks: int
):
    def start(name: str, *overrides: str) -> dict[int, dict[str, Any]]:
        folder = tmp_path / name
        folder.mkdir()
        run(
            "main_base",
            *easy(folder),
            "trainer.algorithm.use_kl_loss=true",
            "trainer.strategy=deepspeed",
            f"trainer.policy.deepspeed_config.zero_stage={stage}",
            f"trainer.ref.deepspeed_config.zero_stage={stage}",
            f"trainer.placement.policy_num_gpus_per_node={ranks}",
            "trainer.policy.optimizer_config.lr=1e-2",
            "generator.weight_sync_check=probe",
            "trainer.epochs=4",
            "trainer.max_steps=4",
            *overrides,
        )
        return metrics_of(folder)

    rows = start("straight", "trainer.hf_save_interval=4")
    for step in range(1, 5):
        assert rows[step]["weights/probe_gap"] <= 1e-4
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4
        assert rows[step]["policy/grad_norm"] > 0
    assert rows[4]["reward/mean"] > rows[1]["reward/mean"] + 0.1
    assert (tmp_path / "straight/exports/global_step_4/policy/model.safetensors").exists()
    checkpoint = tmp_path / "straight/ckpts/global_step_2"
    resumed = start("resumed", "trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}")
    for step in (3, 4):
        assert {k: v for k, v in resumed[step].items() if k in rows[step]} == rows[step]
