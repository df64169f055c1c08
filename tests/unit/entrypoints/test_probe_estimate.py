"""Estimates of the time of a step and of a run, from measured steps."""

from __future__ import annotations

import pytest

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.entrypoints.probe_estimate import PHASES, REST, estimate_run, estimate_step
from skyrl_train.trainer.trainer import StepSchedule
from tests.support.probe_steps import REST_S, SYNC_S, measured_step


def test_steps_of_requested_size_are_not_scaled():
    step = estimate_step(
        [measured_step(8, noise=1.1), measured_step(8), measured_step(8, noise=3.0), measured_step(2)],
        8,
        optimizer_steps=2,
    )
    same_size = measured_step(8, noise=1.1).row
    assert not step.scaled
    assert step.step_s == pytest.approx(same_size["timing/step_s"])
    assert {name: step.seconds[name] for name in PHASES} == {name: same_size[f"timing/{name}_s"] for name in PHASES}
    assert step.seconds[REST] == pytest.approx(1.1 * REST_S)


def test_bursts_are_averaged_if_rollouts_run_ahead():
    bursts = [measured_step(8, noise=noise) for noise in (3.0, 1.0, 1.0)]
    assert estimate_step(bursts, 8, 2, ahead=True).step_s == pytest.approx(
        5 / 3 * measured_step(8).row["timing/step_s"]
    )
    assert estimate_step(bursts, 8, 2).step_s == pytest.approx(measured_step(8).row["timing/step_s"])


def test_smaller_steps_scale_by_tokens_and_optimizer_steps():
    """Times that do not grow with the prompts, such as the wait for the longest answer, are not scaled."""
    step = estimate_step([measured_step(2), measured_step(4)], 32, optimizer_steps=8)
    assert step.scaled
    assert step.seconds == pytest.approx(
        {name: measured_step(32).row[f"timing/{name}_s"] for name in PHASES} | {REST: REST_S}
    )
    assert step.step_s == pytest.approx(measured_step(32).row["timing/step_s"])


def test_steps_of_one_size_scale_by_tokens():
    step = estimate_step([measured_step(2), measured_step(2)], 8, optimizer_steps=2)
    assert step.seconds["generate"] == pytest.approx(4 * measured_step(2).row["timing/generate_s"])
    assert step.seconds["publish"] == SYNC_S


def test_run_time_adds_start_steps_and_evaluations():
    """10 prompts, 4 per step, 2 epochs: steps of 4, 4, 2, 4, 4, 2; evaluations before, and after steps 4 and 6."""
    schedule = StepSchedule(10, 4, 2)
    run = estimate_run(schedule, TrainerConfig(eval_interval=4), 2.0, 3.0, start_s=7.0)
    assert (run.steps, run.evaluations, run.full_steps) == (6, 3, 5.0)
    assert run.seconds == 7 + 5 * 2 + 3 * 3
    none = estimate_run(schedule, TrainerConfig(eval_interval=0, eval_before_train=False), 2.0, 3.0, start_s=7.0)
    assert none.seconds == 7 + 5 * 2
