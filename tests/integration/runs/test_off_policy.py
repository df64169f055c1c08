"""Engines that sample from another policy than the trained one: detection, metrics and corrections."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.experiment import publisher

from .conftest import Run, metrics_of

HALF = ["generator.model_dtype=float16", "trainer.max_steps=1", "trainer.ckpt_interval=0"]
STALE_ENGINES = """
from skyrl_train.experiment.base import Experiment, run_experiment


class StaleEngines(Experiment):
    def build_trainer(self, running):
        trainer = super().build_trainer(running)
        publish = trainer.publisher.publish

        async def publish_even_versions(version):
            return await publish(version) if version % 2 == 0 else {}

        trainer.publisher.publish = publish_even_versions
        return trainer


if __name__ == "__main__":
    run_experiment(StaleEngines)
"""


@pytest.mark.on_demand
@pytest.mark.slow
def test_truncated_importance_sampling_with_stale_engines(easy: Callable[[Path], list[str]], tmp_path: Path):
    (tmp_path / "main_stale.py").write_text(STALE_ENGINES)
    command = [
        sys.executable,
        str(tmp_path / "main_stale.py"),
        *easy(tmp_path),
        "trainer.placement.colocate_all=false",
        "trainer.epochs=20",
        "trainer.max_steps=16",
        "trainer.ckpt_interval=0",
        "trainer.policy.optimizer_config.lr=3e-3",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=token",
        "generator.n_samples_per_prompt=8",
    ]
    done = subprocess.run(command, timeout=500, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    rows = metrics_of(tmp_path)
    # In steps 1, 3, ... engines have the current weights; in steps 2, 4, ... those from one update before.
    fresh = [rows[step] for step in range(3, 17, 2)]
    stale = [rows[step] for step in range(2, 17, 2)]
    assert {row["rollouts/max_staleness"] for row in fresh} == {0}
    assert {row["rollouts/max_staleness"] for row in stale} == {1}
    assert max(row["mismatch/ratio_std"] for row in fresh) < 1e-3
    assert min(row["mismatch/ratio_std"] for row in stale) > 1e-2
    assert min(row["mismatch/kl"] for row in stale) > 100 * max(row["mismatch/kl"] for row in fresh)
    assert max(row["mismatch/ess_tokens"] for row in stale) < min(row["mismatch/ess_tokens"] for row in fresh)
    first, last = (sum(rows[step]["reward/mean"] for step in steps) / 3 for steps in ((1, 2, 3), (14, 15, 16)))
    assert last > first + 0.2


@pytest.mark.on_demand
@pytest.mark.slow
def test_ratios_average_one_with_truncated_sampling(run: Run, small: Callable[[Path], list[str]], tmp_path: Path):
    run(
        "main_base",
        *small(tmp_path),
        "trainer.max_steps=2",
        "trainer.ckpt_interval=0",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=0",
        "trainer.policy.optimizer_config.lr=0",
        "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence",
        "generator.sampling_params.top_p=0.8",
        "generator.sampling_params.temperature=0.7",
    )
    for step in (1, 2):
        row = metrics_of(tmp_path)[step]
        assert abs(row["mismatch/ratio_mean"] - 1) < 1e-4
        assert row["mismatch/ratio_max"] < 1 + 1e-3
        assert abs(row["policy/ratio"] - 1) < 1e-4
        assert row["mismatch/ess_sequences"] > 1 - 1e-6


@pytest.mark.on_demand
@pytest.mark.slow
def test_half_precision_engines_are_compared_first(run: Run, easy: Callable[[Path], list[str]], tmp_path: Path):
    run("main_base", *easy(tmp_path), *HALF)
    rows = metrics_of(tmp_path)
    assert 0 < rows[0]["weights/probe_gap_mean"] <= publisher.HALF_PRECISION_MEAN_TOLERANCE
    assert rows[0]["weights/probe_gap_mean"] <= rows[0]["weights/probe_gap"]
    assert "weights/probe_gap" not in rows[1], "only the first sync compares log-probs"


@pytest.mark.on_demand
def test_mismatching_engines_end_the_run_before_training(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(publisher, "HALF_PRECISION_MEAN_TOLERANCE", 1e-9)
    failed = run("main_base", *easy(tmp_path / "other"), *HALF, expect=1)
    assert "do not compute the same model" in failed.stderr
    assert not (tmp_path / "other" / "ckpts" / "metrics.jsonl").exists()
