"""Runs with each value of trainer.placement.colocate_offload: on CPUs nothing is freed, but all calls are made."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Run, metrics_of
from .test_engine_dies import assert_complete, run_and_signal_engine

CHANGING = ("timing/", "memory/", "throughput/", "engines/", "progress/")
"""Prefixes of metrics that differ between equal runs."""


@pytest.mark.slow
@pytest.mark.on_demand
def test_results_do_not_depend_on_the_mode(run: Run, small: Callable[[Path], list[str]], tmp_path: Path):
    results = []
    for mode in ("none", "kv_cache", "all"):
        run(
            "main_base",
            *small(tmp_path / mode),
            f"trainer.placement.colocate_offload={mode}",
            "generator.weight_sync_check=probe",
            "trainer.eval_interval=1",
            "trainer.max_steps=3",
        )
        rows = metrics_of(tmp_path / mode)
        assert set(rows) == {0, 1, 2, 3}
        results.append(
            [
                {name: value for name, value in row.items() if "/" in name and not name.startswith(CHANGING)}
                for row in rows.values()
            ]
        )
    assert results[0] == results[1] == results[2]


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("mode", ["none", "kv_cache"])
def test_killed_engine_restarts_in_each_mode(mode: str, small: Callable[[Path], list[str]], tmp_path: Path):
    overrides = [
        *small(tmp_path),
        f"trainer.placement.colocate_offload={mode}",
        "generator.weight_sync_check=probe",
        "trainer.eval_before_train=false",
        "trainer.max_steps=6",
    ]
    run = run_and_signal_engine(overrides, tmp_path, signal.SIGKILL)
    assert run.code == 0, run.output[-4000:]
    assert_complete(tmp_path, steps=6)
