"""Rollouts go on while a step is learnt, over real engines and a real learner in slots of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.trainer.batch_dump import read_batch
from tests.integration.runs.conftest import Run, kill_in_the_middle_of_step, metrics_of

AHEAD = [
    "--config-name=async",
    "trainer.epochs=3",
    "trainer.max_steps=5",
    "generator.weight_sync_check=probe",
    "generator.sampling_params.max_generate_length=48",
]


@pytest.mark.on_demand
@pytest.mark.parametrize("on_sync", ["recompute", "abort"])
def test_a_run_learns_from_samples_of_bounded_age(
    on_sync: str, run: Run, small: Callable[[Path], list[str]], tmp_path: Path
):
    """Its evaluations, while rollouts go on, are of one version: another one would end the run."""
    evaluated = [] if on_sync == "abort" else ["trainer.eval_interval=2"]
    run("main_base", *AHEAD, *small(tmp_path), f"trainer.fully_async.on_sync={on_sync}", *evaluated)
    rows = metrics_of(tmp_path)
    steps = [rows[step] for step in range(1, 6)]
    ages = [row["async/staleness_max"] for row in steps]
    assert ages[0] == 0
    assert max(ages) == 1, "rollouts never ran ahead"
    assert all(
        0 <= row["async/staleness_min"] <= row["async/staleness_mean"] <= row["async/staleness_max"] for row in steps
    )
    assert all(0 <= row[f"async/{name}"] <= 1 for row in steps for name in ("engines_idle", "trainer_idle"))
    assert [row["weights/version"] for row in steps] == [1, 2, 3, 4, 5]
    assert all(row["rollouts/failed"] == 0 for row in steps)
    if on_sync != "abort":  # whether a pause ends anything is a matter of timing
        assert all(row["async/wasted_tokens"] == 0 for row in steps)
        assert [step for step, row in rows.items() if any(name.startswith("eval/") for name in row)] == [0, 2, 4, 5]


def test_killed_async_run_uses_each_prompt_once(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path
):
    overrides = [*AHEAD, *easy(tmp_path), "trainer.dump_data_batch=true"]
    kill_in_the_middle_of_step(overrides, tmp_path, step=3)
    resumed_at = int((tmp_path / "ckpts" / "latest_ckpt_global_step.txt").read_text())
    run("main_base", *overrides)
    rows = metrics_of(tmp_path)
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert rows[resumed_at + 1]["async/staleness_max"] == 0, "what was under way is sampled again, with its weights"
    assert max(row["async/staleness_max"] for row in rows.values() if "async/staleness_max" in row) <= 1
    dumped = tmp_path / "exports" / "dumped_data"
    uids = [read_batch(dumped / f"global_step_{step}_training_input.safetensors")[1] for step in range(1, 6)]
    for epoch in (uids[:2], uids[2:4], uids[4:]):
        assert list(Counter(uid for step in epoch for uid in step).values()) == [4] * 4 * len(epoch)
