"""What a step and a run will take follows from the steps that were taken."""

from __future__ import annotations

import pytest

from skyrl_train.config.keys import with_value_at
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.simulation import estimate
from skyrl_train.simulation.estimate import (
    PHASES,
    REST,
    asked_split,
    divide_slots,
    estimate_run,
    estimate_step,
    keys_of,
)
from skyrl_train.simulation.run import Split
from skyrl_train.trainer.loop import Intervals
from skyrl_train.trainer.schedule import StepSchedule
from tests.support.measured_steps import REST_S, SYNC_S, config, taken


def test_steps_of_the_runs_own_size_are_taken_as_they_are():
    step = estimate_step([taken(8, noise=1.1), taken(8), taken(8, noise=3.0), taken(2)], 8, optimizer_steps=2)
    alike = taken(8, noise=1.1).row
    assert not step.scaled
    assert step.step_s == pytest.approx(alike["timing/step_s"])
    assert {name: step.seconds[name] for name in PHASES} == {name: alike[f"timing/{name}_s"] for name in PHASES}
    assert step.seconds[REST] == pytest.approx(1.1 * REST_S)


def test_steps_that_are_slow_and_fast_in_turn_take_their_mean():
    bursts = [taken(8, noise=noise) for noise in (3.0, 1.0, 1.0)]
    assert estimate_step(bursts, 8, 2, ahead=True).step_s == pytest.approx(5 / 3 * taken(8).row["timing/step_s"])
    assert estimate_step(bursts, 8, 2).step_s == pytest.approx(taken(8).row["timing/step_s"])


def test_smaller_steps_are_scaled_by_tokens_and_optimizer_steps():
    """What does not grow with them, a wait for the longest answer or the rest, is not scaled."""
    step = estimate_step([taken(2), taken(4)], 32, optimizer_steps=8)
    assert step.scaled
    assert step.seconds == pytest.approx({name: taken(32).row[f"timing/{name}_s"] for name in PHASES} | {REST: REST_S})
    assert step.step_s == pytest.approx(taken(32).row["timing/step_s"])


def test_steps_of_one_small_size_are_scaled_by_tokens_alone():
    step = estimate_step([taken(2), taken(2)], 8, optimizer_steps=2)
    assert step.seconds["generate"] == pytest.approx(4 * taken(2).row["timing/generate_s"])
    assert step.seconds["publish"] == SYNC_S


def test_a_run_is_its_start_its_steps_and_its_evaluations():
    """10 prompts, 4 a step, twice: steps of 4, 4, 2, 4, 4, 2; evaluations before, and after steps 4 and 6."""
    schedule = StepSchedule(10, 4, 2)
    run = estimate_run(schedule, Intervals(4, 0, 0, True, schedule.total_steps), 2.0, 3.0, start_s=7.0)
    assert (run.steps, run.evaluations, run.whole_steps) == (6, 3, 5.0)
    assert run.seconds == 7 + 5 * 2 + 3 * 3
    none = estimate_run(schedule, Intervals(0, 0, 0, False, schedule.total_steps), 2.0, 3.0, start_s=7.0)
    assert none.seconds == 7 + 5 * 2


def test_a_division_that_does_not_fit_into_memory_is_none(monkeypatch: pytest.MonkeyPatch):
    cfg = config(**{"trainer.placement.policy_num_gpus_per_node": 4, "generator.num_inference_engines": 4})
    steps = [taken(8, {"timing/step_s": 12.0})] * 3
    found = divide_slots(cfg, steps)
    assert found is not None
    assert min(one.split.trainers for one in found.outcomes) < 3

    def fits(changed: Config) -> bool:
        return changed.trainer.placement.policy_num_gpus_per_node >= 3

    monkeypatch.setattr(estimate, "fits", fits)
    found = divide_slots(cfg, steps)
    assert found is not None
    assert min(one.split.trainers for one in found.outcomes) == 3


def test_every_division_that_is_proposed_is_one_that_a_run_accepts():
    cfg = config(**{"trainer.placement.policy_num_gpus_per_node": 4, "generator.num_inference_engines": 4})
    swaps = {"timing/step_s": 12.0}  # most of which colocated models spend on making room for each other
    found = divide_slots(cfg, [taken(8, swaps)] * 3 + [taken(8, swaps, noise=1.1)])
    assert found is not None
    splits = [one.split for one in found.outcomes]
    assert splits[0] == asked_split(cfg) == Split(4, 4, colocated=True)
    assert {(one.engines, one.trainers) for one in splits[1:]} == {(1, 3), (2, 2), (3, 1)}
    assert {one.staleness for one in splits} == {0, 1}
    assert found.assumed is not None and "as long" in found.assumed  # these steps are all alike
    assert found.keys
    for text in found.keys:
        key, _, value = text.partition("=")
        cfg = with_value_at(
            cfg, key, {"true": True, "false": False}.get(value) if value in ("true", "false") else int(value)
        )
    assert validate(cfg) == []
    assert asked_split(cfg) in splits


def test_answers_that_differ_tell_what_a_decode_step_takes():
    cfg = config(**{"trainer.placement.policy_num_gpus_per_node": 2, "generator.num_inference_engines": 2})
    steps = [
        taken(8, {"response/mean_tokens": mean, "response/max_tokens": 60.0, "rollouts/tokens": 32 * mean})
        for mean in (20.0, 25.0, 30.0)
    ]
    found = divide_slots(cfg, steps)
    assert found is not None
    assert found.assumed is None


def test_one_slot_is_not_divided():
    assert divide_slots(config(), [taken(8)] * 3) is None


def test_what_the_configuration_does_not_allow_is_not_proposed():
    """A critic that leaves the policy's slots needs more of them."""
    slots = {"trainer.placement.policy_num_gpus_per_node": 2, "generator.num_inference_engines": 2}
    critic: dict[str, object] = {"trainer.critic.model.path": "any", "trainer.critic_mini_batch_size": 4}
    critic["trainer.algorithm.advantage_estimator"] = "gae"
    assert divide_slots(config(**slots), [taken(8)] * 3) is not None
    assert divide_slots(config(**slots, **critic), [taken(8)] * 3) is None


def test_trainers_of_several_nodes_stay_on_them_where_that_is_possible():
    cfg = config(**{"trainer.placement.policy_num_nodes": 2, "trainer.placement.policy_num_gpus_per_node": 4})
    assert dict(keys_of(cfg, Split(2, 6)))["trainer.placement.policy_num_gpus_per_node"] == 3
    odd = dict(keys_of(cfg, Split(3, 5)))
    assert (odd["trainer.placement.policy_num_nodes"], odd["trainer.placement.policy_num_gpus_per_node"]) == (1, 5)
