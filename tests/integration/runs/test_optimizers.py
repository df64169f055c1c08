"""Optimizers through the entrypoint: runs resume bitwise, and only with the optimizer of the checkpoint."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .conftest import Run, metrics_of

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "ranks"),
    [
        ("muon", 2),
        pytest.param(
            "adamw_8bit", 1, marks=pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")
        ),
    ],
)
def test_run_resumes_bitwise_with_its_optimizer(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, optimizer: str, ranks: int
):
    def start(name: str, *overrides: str, expect: int = 0) -> tuple[dict[int, dict[str, Any]], str]:
        folder = tmp_path / name
        result = run(
            "main_base",
            *easy(folder),
            f"trainer.placement.policy_num_gpus_per_node={ranks}",
            f"trainer.policy.optimizer_config.name={optimizer}",
            "trainer.policy.optimizer_config.lr=1e-2",
            "generator.weight_sync_check=probe",
            "trainer.epochs=5",
            "trainer.max_steps=5",
            *overrides,
            expect=expect,
        )
        return (metrics_of(folder) if expect == 0 else {}), result.stdout + result.stderr

    rows, _ = start("straight")
    assert rows[5]["reward/mean"] > rows[1]["reward/mean"] + 0.1
    checkpoint = tmp_path / "straight/ckpts/global_step_2"
    resume = ["trainer.resume_mode=from_path", f"trainer.resume_path={checkpoint}"]
    resumed, _ = start("resumed", *resume)
    for step in (3, 4, 5):
        assert {k: v for k, v in resumed[step].items() if k in rows[step]} == rows[step]
    _, output = start("changed", *resume, "trainer.policy.optimizer_config.name=adamw", expect=1)
    assert f"optimizer_config.name='{optimizer}', and this run has optimizer_config.name='adamw'" in output
