"""Splits of slots between engines and trainers, compared for hand-computed steps."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import pytest

from skyrl_train.config.keys import replace_value
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints import probe_splits
from skyrl_train.entrypoints.probe_estimate import MeasuredStep
from skyrl_train.entrypoints.probe_splits import Comparison, Split, compare_splits, configured_split, keys_of, table
from tests.support.probe_steps import REST_S, SYNC_S, config, measured_step

LENGTHS = [10, 20, 30, 40]
RESPONSES = 128
FOUR_SLOTS = {"trainer.placement.policy_num_gpus_per_node": 4, "generator.num_inference_engines": 4}
APART = {
    "trainer.placement.colocate_all": False,
    "trainer.placement.policy_num_gpus_per_node": 2,
    "generator.num_inference_engines": 2,
}
AHEAD = {"trainer.fully_async.enabled": True, "trainer.fully_async.max_staleness_steps": 1}


def compared(cfg: Config, steps: list[MeasuredStep], lengths: Sequence[int] = LENGTHS) -> Comparison:
    found = compare_splits(cfg, steps, lengths)
    assert found is not None
    return found


def steps_of(decode_s: float, per_sequence_s: float, engines: int) -> tuple[list[MeasuredStep], list[int]]:
    """Return steps whose engines take exactly the given times, and the response lengths of the last one."""
    generator, steps, per_engine = random.Random(3), [], RESPONSES // engines
    lengths: list[int] = []
    for _ in range(5):
        lengths = [round(generator.lognormvariate(3.0, 0.7)) for _ in range(RESPONSES)]
        mean, shorter = fmean(lengths), fmean(min(pair) for pair in combinations(lengths, 2))
        row: dict[str, float] = {"rollouts/tokens": sum(lengths), "response/mean_tokens": mean}
        row |= {"response/max_tokens": max(lengths), "rollouts/trajectories": RESPONSES}
        row["timing/generate_s"] = decode_s * max(lengths) + per_sequence_s * sum(lengths) / engines
        row["timing/response_s"] = decode_s * mean + per_sequence_s * (mean + (per_engine - 1) * shorter)
        steps.append(measured_step(8, row))
    return steps, lengths


def test_configured_split_takes_what_was_measured():
    synchronous, steps = config(**APART), [measured_step(8)] * 3
    row = steps[0].row
    first = compared(synchronous, steps).estimates[0]
    assert first.split == Split(2, 2)
    assert first.generate_s == pytest.approx(row["timing/generate_s"])
    assert first.step_s == pytest.approx(row["timing/step_s"])

    busy = measured_step(8, {"timing/generate_s": 0.1, "timing/step_s": 4.0, "async/engines_idle": 0.25})
    first = compared(config(**APART, **AHEAD), [busy] * 3).estimates[0]
    assert (first.split.max_staleness_steps, first.generate_s) == (1, pytest.approx(3.0))


def test_engines_and_trainers_scale_with_their_slots():
    comparison = compared(config(**APART), [measured_step(8)] * 3)
    row = measured_step(8).row
    generate_s, train_s = row["timing/generate_s"], row["timing/score_s"] + row["timing/update_s"]
    assert comparison.proportional_reason is not None and "equally long" in comparison.proportional_reason
    for estimate in comparison.estimates:
        engines, trainers = (4, 4) if estimate.split.colocate_all else (estimate.split.engines, estimate.split.trainers)
        sides = generate_s * 2 / engines, train_s * 2 / trainers
        assert (estimate.generate_s, estimate.train_s) == pytest.approx(sides)
        joined = max(sides[0], sides[1] + REST_S) if estimate.split.max_staleness_steps else sum(sides) + REST_S
        assert estimate.step_s == pytest.approx(joined + SYNC_S)


def test_only_colocated_splits_spend_time_on_swapping():
    step_s = 12.0
    row = measured_step(8, {"timing/step_s": step_s}).row
    comparison = compared(config(**FOUR_SLOTS), [measured_step(8, {"timing/step_s": step_s})] * 3)
    assert comparison.estimates[0].step_s == pytest.approx(step_s)
    separate = next(estimate for estimate in comparison.estimates if estimate.split == Split(2, 2))
    expected = 2 * (row["timing/generate_s"] + row["timing/score_s"] + row["timing/update_s"]) + SYNC_S
    assert separate.step_s == pytest.approx(expected)
    assert comparison.keys


def test_decode_step_is_fitted_where_responses_differ():
    """The longest response bounds a synchronous step, whatever the number of engines."""
    steps, lengths = steps_of(decode_s=0.1, per_sequence_s=0.01, engines=2)
    comparison = compared(config(**APART), steps, lengths)
    assert comparison.proportional_reason is None
    longest = fmean(step.row["response/max_tokens"] for step in steps)
    tokens = fmean(step.row["rollouts/tokens"] for step in steps)
    for estimate in comparison.estimates:
        expected = 0.1 * longest / (1 + estimate.split.max_staleness_steps) + 0.01 * tokens / estimate.split.engines
        assert estimate.generate_s == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
    ("changed", "keys", "reason"),
    [
        ({}, {"generator.max_num_seqs": 8}, "max_num_seqs"),
        ({"episode/max_turns": 2.0}, {}, "several turns"),
        ({"sampling/dropped": 2.0}, {}, "no step trained on"),
        ({"sampling/cancelled": 2.0}, {}, "no step trained on"),
        ({}, AHEAD, "asynchronous"),
        ({}, {"generator.backend": "vllm", "generator.inference_engine_tensor_parallel_size": 2}, "several acc"),
    ],
)
def test_steps_that_hide_decode_time_are_named(changed: dict[str, float], keys: dict[str, Any], reason: str):
    steps, lengths = steps_of(decode_s=0.1, per_sequence_s=0.01, engines=2)
    unclear = [MeasuredStep(step.prompts, {**step.row, **changed}) for step in steps]
    found_reason = compared(config(**APART, **keys), unclear, lengths).proportional_reason
    assert found_reason is not None and reason in found_reason
    assert "too few steps" in str(compared(config(**APART), steps[:2], lengths).proportional_reason)


def test_splits_that_exceed_memory_are_skipped(monkeypatch: pytest.MonkeyPatch):
    cfg, steps = config(**FOUR_SLOTS), [measured_step(8)] * 3
    assert min(estimate.split.trainers for estimate in compared(cfg, steps).estimates) < 3

    def fits(changed: Config) -> bool:
        return changed.trainer.placement.policy_num_gpus_per_node >= 3

    monkeypatch.setattr(probe_splits, "fits_in_memory", fits)
    assert min(estimate.split.trainers for estimate in compared(cfg, steps).estimates) == 3


def test_every_proposed_split_is_valid():
    cfg, slow = config(**FOUR_SLOTS), {"timing/step_s": 12.0}
    comparison = compared(cfg, [measured_step(8, slow)] * 3)
    splits = [one.split for one in comparison.estimates]
    assert splits[0] == configured_split(cfg) == Split(4, 4, colocate_all=True)
    assert {(one.engines, one.trainers) for one in splits[1:]} == {(1, 3), (2, 2), (3, 1)}
    assert {one.max_staleness_steps for one in splits} == {0, 1}
    for text in comparison.keys:
        key, _, value = text.partition("=")
        cfg = replace_value(cfg, key, json.loads(value))
    assert validate(cfg) == []
    fastest = min(comparison.estimates, key=lambda one: one.step_s)
    assert configured_split(cfg) == fastest.split
    marked = [line for line in table(comparison) if line.endswith("<")]
    assert len(marked) == 1 and str(fastest.split) in marked[0]


def test_one_slot_is_not_divided():
    assert compare_splits(config(), [measured_step(8)] * 3, LENGTHS) is None


def test_splits_that_need_more_slots_are_skipped():
    """A critic that no longer shares the policy's slots needs its own."""
    slots = {"trainer.placement.policy_num_gpus_per_node": 2, "generator.num_inference_engines": 2}
    critic: dict[str, object] = {"trainer.critic.model.path": "any", "trainer.critic_mini_batch_size": 4}
    critic["trainer.algorithm.advantage_estimator"] = "gae"
    assert compare_splits(config(**slots), [measured_step(8)] * 3, LENGTHS) is not None
    assert compare_splits(config(**slots, **critic), [measured_step(8)] * 3, LENGTHS) is None


def test_trainers_stay_on_their_nodes_where_possible():
    cfg = config(**{"trainer.placement.policy_num_nodes": 2, "trainer.placement.policy_num_gpus_per_node": 4})
    assert dict(keys_of(cfg, Split(2, 6)))["trainer.placement.policy_num_gpus_per_node"] == 3
    odd = dict(keys_of(cfg, Split(3, 5)))
    assert (odd["trainer.placement.policy_num_nodes"], odd["trainer.placement.policy_num_gpus_per_node"]) == (1, 5)
