"""Resuming: a run that was killed and resumed has the same results as a run without interruption."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from skyrl_train.report.attempts import read_attempts
from skyrl_train.report.rollout_files import RolloutReader
from skyrl_train.report.run_reader import RunReader

from .conftest import Run, kill_in_the_middle_of_step, metrics_of

SIX_STEPS = ("trainer.epochs=1", "trainer.max_steps=6", "trainer.hf_save_interval=6")


@pytest.mark.slow
@pytest.mark.fault("F06")
@pytest.mark.fault("F09")
@pytest.mark.fault("F35")
@pytest.mark.fault("F37")
def test_killed_run_resumes_bitwise_identical(run: Run, small: Callable, tmp_path: Path):  # type: ignore[type-arg]
    straight, killed, data = tmp_path / "straight", tmp_path / "killed", tmp_path / "train.jsonl"
    data.write_text(Path(small(tmp_path)[0].split("'")[1]).read_text())
    steps = (f"data.train_data=['{data}']", *SIX_STEPS)
    run("main_base", *small(straight), *steps)
    killed.mkdir()
    overrides = [*small(killed), *steps]
    kill_in_the_middle_of_step(overrides, killed, step=3)
    # Step 4 may have ended before the signal arrived. Every second step is saved.
    saved = (killed / "ckpts" / "latest_ckpt_global_step.txt").read_text()
    assert saved in ("2", "4")
    done = run("main_base", *overrides)
    assert "resumed" in done.stdout
    assert metrics_of(killed) == metrics_of(straight)
    assert rollouts_of(killed) == rollouts_of(straight)
    weights = "exports/global_step_6/policy/model.safetensors"
    resumed, expected = load_file(killed / weights), load_file(straight / weights)
    assert all(bool((resumed[name] == tensor).all()) for name, tensor in expected.items())
    again = run("main_base", *overrides)
    assert "resumed at step 6 of 6" in again.stdout, "a finished run takes no more steps"
    assert_attempts_are_recorded(killed / "ckpts", int(saved))
    assert_rejects_other_data_and_names(run, overrides, data)


def assert_attempts_are_recorded(folder: Path, resumed: int) -> None:
    """Check the records of an attempt that was killed, and of two that ended well."""
    attempts = read_attempts(folder)
    assert [(attempt.end is None, attempt.error) for attempt in attempts] == [(True, ""), (False, ""), (False, "")]
    assert all(attempt.hardware["device"] == "cpu" and attempt.hardware["nodes"] == 1 for attempt in attempts)
    assert RunReader(folder).summary()["details"]["resumes"] == [resumed]


def assert_rejects_other_data_and_names(run: Run, overrides: list[str], data: Path) -> None:
    """Check that a run resumes only with the same data and in its own folder."""
    lines = data.read_text().splitlines()
    row = json.loads(lines[0])
    row["reward_spec"]["ground_truth"] = "-1"
    data.write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    changed = run("main_base", *overrides, expect=2)
    assert "data.train_data had other rows" in changed.stderr
    other = run("main_base", *overrides, "trainer.run_name=another", expect=2)
    assert "run_name was 'test_run', is 'another'" in other.stderr


def rollouts_of(folder: Path) -> list[dict[str, Any]]:
    """Return the rollouts that the run wrote, without measured times."""
    rows: list[dict[str, Any]] = RolloutReader(folder / "ckpts").table().to_pylist()
    assert {row["step"] for row in rows} == {1, 2, 3, 4, 5, 6} and len(rows) == 6 * 16
    for turn in (turn for row in rows for turn in row["turns"]):
        assert turn.pop("running_s") >= 0 and turn.pop("environment_s") >= 0
    return rows
