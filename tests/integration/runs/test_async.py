"""Asynchronous training with real engines and a real learner on separate GPUs or bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.trainer.batch_dump import read_batch
from tests.integration.runs.conftest import Run, kill_in_the_middle_of_step, metrics_of

ASYNC_OVERRIDES = [
    "--config-name=async",
    "trainer.epochs=3",
    "trainer.max_steps=5",
    "generator.weight_sync_check=probe",
    "generator.sampling_params.max_generate_length=48",
]


@pytest.mark.on_demand
@pytest.mark.parametrize("on_sync", ["recompute", "abort"])
def test_async_run_bounds_the_staleness_of_samples(
    on_sync: str, run: Run, small: Callable[[Path], list[str]], tmp_path: Path
):
    """Evaluations run while rollouts continue, and a token of another version would end the run."""
    evaluation = [] if on_sync == "abort" else ["trainer.eval_interval=2"]
    run("main_base", *ASYNC_OVERRIDES, *small(tmp_path), f"trainer.fully_async.on_sync={on_sync}", *evaluation)
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
    if on_sync != "abort":  # the number of requests that a pause aborts depends on timing
        assert all(row["async/wasted_tokens"] == 0 for row in steps)
        assert [step for step, row in rows.items() if any(name.startswith("eval/") for name in row)] == [0, 2, 4, 5]


def test_killed_async_run_uses_each_prompt_once(run: Run, easy: Callable[[Path], list[str]], tmp_path: Path):
    overrides = [*ASYNC_OVERRIDES, *easy(tmp_path), "trainer.dump_data_batch=true"]
    kill_in_the_middle_of_step(overrides, tmp_path, step=3)
    resumed_at = int((tmp_path / "ckpts" / "latest_ckpt_global_step.txt").read_text())
    run("main_base", *overrides)
    rows = metrics_of(tmp_path)
    assert sorted(rows) == [0, 1, 2, 3, 4, 5]
    assert rows[resumed_at + 1]["async/staleness_max"] == 0, (
        "interrupted rollouts are sampled again with the resumed weights"
    )
    assert max(row["async/staleness_max"] for row in rows.values() if "async/staleness_max" in row) <= 1
    dumped = tmp_path / "exports" / "dumped_data"
    uids = [read_batch(dumped / f"global_step_{step}_training_input.safetensors")[1] for step in range(1, 6)]
    for epoch in (uids[:2], uids[2:4], uids[4:]):
        assert list(Counter(uid for step in epoch for uid in step).values()) == [4] * 4 * len(epoch)
