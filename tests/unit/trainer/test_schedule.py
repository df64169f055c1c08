from __future__ import annotations

from skyrl_train.trainer.trainer import StepSchedule


def test_the_last_step_of_an_epoch_is_smaller_and_none_crosses_it():
    schedule = StepSchedule(num_prompts=10, train_batch_size=4, epochs=2)
    assert schedule.total_steps == 6
    assert [schedule.prompts_of_step(step) for step in range(8)] == [4, 4, 2, 4, 4, 2, 0, 0]
    assert [schedule.prompts_before(step) for step in range(7)] == [0, 4, 8, 10, 14, 18, 20]


def test_max_steps_ends_a_run_early_and_never_makes_it_longer():
    assert StepSchedule(10, 4, 2, max_steps=5).total_steps == 5
    assert StepSchedule(10, 4, 2, max_steps=50).total_steps == 6
    assert StepSchedule(10, 4, 2, max_steps=5).prompts_of_step(5) == 0


def test_a_batch_larger_than_the_data_is_the_data():
    schedule = StepSchedule(num_prompts=3, train_batch_size=8, epochs=1)
    assert schedule.total_steps == 1
    assert schedule.prompts_of_step(0) == 3
