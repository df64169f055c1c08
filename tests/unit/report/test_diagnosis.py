"""Every rule with metrics that show its symptom, and with metrics that nearly do."""

from __future__ import annotations

import json
import logging
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.keys import all_keys
from skyrl_train.report.diagnosis import (
    DIAGNOSIS_FILE,
    NO_DIFFERENCE,
    NO_DIFFERENCE_IN_STEP,
    RULES,
    Diagnosis,
    Rule,
    async_rules,
    diagnose,
    gradient_rule,
    memory_rule,
    ratio_rules,
)
from skyrl_train.report.jsonl import JsonlTracker
from skyrl_train.report.trackers import Trackers

MEMORY = memory_rule(80.0, "memory/learner_peak_gib")
EVERY = [
    NO_DIFFERENCE,
    *ratio_rules(100.0),
    gradient_rule(uses_group_baseline=True),
    *async_rules(max_staleness_steps=1),
    *RULES,
    MEMORY,
]
HEALTHY = {
    "timing/step_s": 2.0,
    "reward/mean": 0.4,
    "reward/zero_variance_groups": 0.3,
    "response/truncated_fraction": 0.1,
    "policy/entropy": 1.0,
    "policy/kl": 0.01,
    "policy/grad_norm": 1.0,
    "mismatch/ratio_mean": 1.0,
    "rollouts/failed": 0.0,
    "rollouts/trajectories": 64.0,
    "environment/no_answer": 0.1,
    "async/trainer_idle": 0.05,
    "async/engines_idle": 0.05,
    "memory/learner_peak_gib": 60.0,
}


def steps(*changes: Mapping[str, float], count: int = 24) -> list[dict[str, float]]:
    """Return the rows of a healthy run with changes in its last steps."""
    return [dict(HEALTHY)] * (count - len(changes)) + [{**HEALTHY, **change} for change in changes]


def last(count: int, **values: float) -> list[dict[str, float]]:
    return steps(*[{name.replace("__", "/"): value for name, value in values.items()}] * count)


def bursts(waits_s: float) -> list[dict[str, float]]:
    """Return rows in which every other step waits for rollouts most of the time, and the others never."""
    waits = {"async/trainer_idle": 0.8, "timing/step_s": waits_s}
    return steps(*[waits, {"async/trainer_idle": 0.0, "timing/step_s": 1.0}] * 3)


def falling(score: float) -> list[dict[str, float]]:
    """Return rows with a rising reward and three evaluations, the first with score 0.6."""
    rewards = [HEALTHY | {"reward/mean": 0.3 + 0.02 * step} for step in range(24)]
    for step, value in ((3, 0.6), (12, score), (23, score)):
        rewards[step] = rewards[step] | {"eval/gsm8k/avg_score": value}
    return rewards


FAILS = {"rollouts/failed": 4.0, "rollouts/failed/timeout": 3.0, "rollouts/failed/crash": 1.0}
CASES: dict[str, tuple[list[dict[str, float]], list[dict[str, float]], str]] = {
    "no_difference": (
        last(5, reward__zero_variance_groups=0.97),
        last(4, reward__zero_variance_groups=1.0),
        "97% of the prompts",
    ),
    "large_policy_ratio": (
        last(1, policy__ratio_max=101.0),
        last(1, policy__ratio_max=99.0),
        r"before the step was 101 \(policy/ratio_max, trainer.guards.max_ratio=100\)",
    ),
    "large_engine_ratio": (
        last(1, mismatch__ratio_max=float("nan")),
        last(1, mismatch__ratio_max=100.0),
        "in the engine was nan",
    ),
    "gradient_spikes": (
        steps({"policy/grad_norm": 30.0}, {}, {"policy/grad_norm": 11.0}, {}),
        steps({"policy/grad_norm": 30.0}, {}, {}),
        "2 of the last 10 gradients",
    ),
    "trainer_starved": (bursts(waits_s=3.0), bursts(waits_s=0.8), "56% of the time in the last 6 steps"),
    "engines_starved": (last(6, async__engines_idle=0.7), last(6, async__engines_idle=0.5), "70% of the time"),
    "truncated": (
        last(3, response__truncated_fraction=0.5),
        last(2, response__truncated_fraction=1.0),
        "50% of the responses were truncated",
    ),
    "format_never_met": (last(5, environment__no_answer=1.0), last(5, environment__no_answer=0.9), "100% of the resp"),
    "entropy_collapse": (last(3, policy__entropy=0.01), last(3, policy__entropy=0.03), "from 1 to 0.01 nats"),
    "kl_runs_away": (
        steps(*({"policy/kl": kl} for kl in (0.5, 0.8, 0.9, 1.5, 2.0, 2.5))),
        [HEALTHY | {"policy/kl": 2.0 + 0.1 * (step % 4)} for step in range(24)],  # far away, but not moving
        "2 nats per token away",
    ),
    "engine_and_trainer_disagree": (
        last(3, mismatch__ratio_mean=1.2),
        last(3, mismatch__ratio_mean=1.05),
        "ratio was 1.2",
    ),
    "episodes_fail": (steps(FAILS, FAILS, FAILS), steps(FAILS, {}, FAILS), "6% .* failed, mostly as timeout"),
    "long_answers_are_cut": (
        last(3, rollouts__failed=2.0, **{"rollouts__failed__deadline": 2.0}),
        last(2, **{"rollouts__failed__deadline": 2.0}),
        "6 episodes",
    ),
    "evaluation_falls": (falling(0.5), falling(0.57), "from 0.6 to 0.5 while the .* reward rose"),
    "memory_near_its_limit": (
        last(1, memory__learner_peak_gib=78.0),
        last(1, memory__learner_peak_gib=75.0),
        "78 of 80 GiB",
    ),
}


def test_every_rule_has_cases():
    assert list(CASES) == [rule.name for rule in EVERY]


@pytest.mark.parametrize("name", CASES)
def test_rule_finds_its_symptom_but_no_near_miss(name: str, tmp_path: Path):
    unhealthy, near_miss, evidence = CASES[name]
    found = findings(tmp_path / "unhealthy", unhealthy)
    assert [finding["rule"] for finding in found] == [name]
    assert re.search(evidence, found[0]["evidence"]), found[0]["evidence"]
    assert findings(tmp_path / "near miss", near_miss) == []


def test_nan_metrics_are_unhealthy(tmp_path: Path):
    nan = float("nan")
    found = findings(tmp_path, last(3, mismatch__ratio_mean=nan))
    assert [finding["rule"] for finding in found] == ["engine_and_trainer_disagree"]
    assert [finding["rule"] for finding in findings(tmp_path, last(3, policy__grad_norm=nan))] == ["gradient_spikes"]


def test_kl_mismatch_is_ignored_for_stale_samples(tmp_path: Path):
    apart = {"mismatch/ratio_mean": 1.05, "mismatch/kl": 0.05}
    (found,) = findings(tmp_path / "new", steps(apart, apart, apart))
    assert found["evidence"] == "they were 0.05 nats per token apart in the last 3 steps (mismatch/kl)"
    old = apart | {"rollouts/max_staleness": 1.0}
    assert findings(tmp_path / "old", steps(apart, old, apart)) == []
    assert findings(tmp_path / "close", steps(*[apart | {"mismatch/kl": 0.015}] * 3)) == []


def test_engines_idle_at_the_end_are_not_starved(tmp_path: Path):
    idle, rules = {"async/engines_idle": 1.0}, async_rules(max_staleness_steps=6)
    assert findings(tmp_path / "ending", steps(*[idle] * 7, count=40), rules=rules, total=40) == []
    (found,) = findings(tmp_path / "going on", steps(*[idle] * 33, count=40), rules=rules, total=40)
    assert (found["rule"], found["since"], found["until"]) == ("engines_starved", 26, None)


def evaluated(*scores: float, every: int = 1, reward: float = 0.01) -> list[dict[str, float]]:
    """Return rows whose reward rises by `reward` per step, with an evaluation every `every` steps from step 0 on."""
    rows = [HEALTHY | {"reward/mean": reward * step} for step in range(every * (len(scores) - 1))]
    rows = [{}, *rows]
    for index, score in enumerate(scores):
        rows[every * index] = rows[every * index] | {"eval/gsm8k/avg_score": score}
    return rows


def test_evaluation_falls_from_first_or_much_earlier_score(tmp_path: Path):
    (found,) = findings(tmp_path / "first", evaluated(0.6, 0.5, 0.5, every=5), begin=-1)
    assert found["evidence"] == (
        "the evaluation score fell from 0.6 to 0.5 while the training reward rose from 0.02 to 0.07"
    )
    (found,) = findings(tmp_path / "long", evaluated(0.1, 0.6, 0.5, 0.5, every=50), begin=-1)
    assert found["since"] == 150
    assert findings(tmp_path / "close", evaluated(0.6, 0.56, 0.5, every=5), begin=-1) == []


def test_noise_of_many_evaluations_is_no_fall(tmp_path: Path):
    rng = random.Random(0)
    plateau = [0.6 + rng.gauss(0.0, 0.02) for _ in range(200)]
    assert findings(tmp_path / "plateau", evaluated(*plateau), begin=-1) == []
    (found,) = findings(tmp_path / "falls", evaluated(*plateau, 0.4, 0.4), begin=-1)
    assert found["since"] == 201
    rises = [0.05 * number for number in range(19)]
    (found,) = findings(tmp_path / "rises", evaluated(*rises, 0.7, 0.7, reward=0.05), begin=-1)
    assert found["since"] == 20
    equal = [HEALTHY | {"reward/mean": 0.1 * step, "eval/x/avg_score": 0.8} for step in range(8)]
    lower = [HEALTHY | {"reward/mean": 0.3, "eval/x/avg_score": 0.7}] * 4
    assert findings(tmp_path / "equal", [*equal, *lower]) == []  # the reward fell after the latest best evaluation


def test_minimum_fall_scales_with_scores(tmp_path: Path):
    assert findings(tmp_path / "noise", evaluated(60.0, 59.0, 58.0, every=5), begin=-1) == []
    (found,) = findings(tmp_path / "falls", evaluated(60.0, 50.0, 50.0, every=5), begin=-1)
    assert found["rule"] == "evaluation_falls"
    assert findings(tmp_path / "same", evaluated(0.6, 0.5, 0.5, every=5, reward=0.001), begin=-1) == []


def test_resumed_run_knows_earlier_evaluations(tmp_path: Path):
    rows = evaluated(0.6, 0.5, 0.5, every=5)
    run(tmp_path, rows[:-1], begin=-1)
    (found,) = run(tmp_path, rows[-1:], begin=9)
    assert found["rule"] == "evaluation_falls"


def test_gradients_without_training_signal_do_not_count(tmp_path: Path):
    nothing = HEALTHY | {"policy/grad_norm": 1e-4, "reward/zero_variance_groups": 1.0}
    begins, seldom = [nothing] * 20 + [HEALTHY] * 20, [nothing, nothing, HEALTHY] * 20
    for name, rows in (("begins", begins), ("seldom", seldom)):
        assert findings(tmp_path / name, rows, rules=[gradient_rule(uses_group_baseline=True)]) == []
        (found,) = findings(tmp_path / f"{name} alone", rows, rules=[gradient_rule(uses_group_baseline=False)])
        assert found["rule"] == "gradient_spikes"
    broken = [nothing | {"policy/grad_norm": float("nan")}] * 2
    (found,) = findings(tmp_path / "broken", [HEALTHY] * 20 + broken, rules=[gradient_rule(uses_group_baseline=True)])
    assert found["since"] == 22


def test_lasting_gradient_explosion_is_found(tmp_path: Path):
    for name, norms in (("grow", (50.0, 80.0, 200.0)), ("twice", (30.0, 30.0, 1.0))):
        (found,) = findings(tmp_path / name, steps(*({"policy/grad_norm": norm} for norm in norms)))
        assert found["rule"] == "gradient_spikes"


def test_single_slow_step_is_no_starvation(tmp_path: Path):
    """For example a step in which an engine restarted."""
    slow = {"async/trainer_idle": 0.95, "async/engines_idle": 0.95, "timing/step_s": 300.0}
    assert findings(tmp_path, steps(slow, *[{}] * 8)) == []


def test_early_ended_step_does_not_hide_starvation(tmp_path: Path):
    rows = bursts(waits_s=3.0)
    early = {name: value for name, value in HEALTHY.items() if not name.startswith("async/")}
    (found,) = findings(tmp_path, [*rows[:-3], early, *rows[-3:]])
    assert found["rule"] == "trainer_starved"


def test_entropy_is_compared_with_first_steps(tmp_path: Path):
    falls = [HEALTHY | {"policy/entropy": 0.985**step} for step in range(320)]
    (found,) = findings(tmp_path / "slowly", falls)
    assert (found["rule"], found["until"]) == ("entropy_collapse", None)
    unknown = HEALTHY | {"policy/entropy": float("nan")}
    (found,) = findings(tmp_path / "at once", [unknown] + [HEALTHY] * 20 + [HEALTHY | {"policy/entropy": 0.01}] * 100)
    assert (found["rule"], found["until"]) == ("entropy_collapse", None)


def test_deadline_failures_are_not_environment_failures(tmp_path: Path):
    cut = {"rollouts/failed": 8.0, "rollouts/failed/deadline": 8.0}
    assert [finding["rule"] for finding in findings(tmp_path / "cut", steps(cut, cut, cut))] == ["long_answers_are_cut"]
    both = cut | {"rollouts/failed": 12.0, "rollouts/failed/KeyError": 4.0}
    found = {finding["rule"]: finding["evidence"] for finding in findings(tmp_path / "both", steps(both, both, both))}
    assert found["episodes_fail"] == "6% of the episodes of the last 3 steps failed, mostly as KeyError"


def test_advice_names_keys_that_exist():
    key = re.compile(r"\b(?:trainer|generator|data|environment)\.[\w.]*\w")
    named = [(rule.name, found) for rule in EVERY for found in key.findall(rule.advice)]
    assert [(rule, found) for rule, found in named if found not in all_keys()] == []


def test_equal_rewards_of_a_step_are_found():
    equal, near_miss = (
        [{"step": float(step), **row} for step, row in enumerate(last(count, reward__std=0.0))] for count in (5, 4)
    )
    assert [finding.rule for finding in diagnose(equal, [NO_DIFFERENCE_IN_STEP])] == ["no_difference"]
    assert diagnose(near_miss, [NO_DIFFERENCE_IN_STEP]) == []


def test_finding_is_logged_once_and_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cut = HEALTHY | {"response/truncated_fraction": 0.8}
    with caplog.at_level(logging.WARNING):
        run(tmp_path, [HEALTHY, cut, cut, cut, cut, HEALTHY, HEALTHY])
    assert [record.message[:50] for record in caplog.records] == ["step 4: truncated: 80% of the responses were trunc"]
    (found,) = json.loads((tmp_path / DIAGNOSIS_FILE).read_text())["findings"]
    assert (found["since"], found["until"]) == (4, 5)


def test_resumed_run_continues_its_findings(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    cut = HEALTHY | {"response/truncated_fraction": 0.8}
    run(tmp_path, [cut, cut, cut, HEALTHY])  # the rule held until step 3, which is repeated
    caplog.clear()
    trackers = run(tmp_path, [cut, cut], begin=2)
    assert "truncated" in caplog.text  # at step 3, from the rows of both attempts
    (found,) = trackers
    assert (found["since"], found["until"]) == (3, None)
    caplog.clear()
    (found,) = run(tmp_path, [cut], begin=4)
    assert "truncated" not in caplog.text
    assert found["until"] is None


def test_restarted_run_drops_earlier_findings(tmp_path: Path):
    run(tmp_path, [HEALTHY | {"response/truncated_fraction": 0.8}] * 3)
    assert run(tmp_path, [HEALTHY]) == []
    assert json.loads((tmp_path / DIAGNOSIS_FILE).read_text()) == {"total_steps": 1000, "findings": []}


def test_repeated_step_counts_once(tmp_path: Path):
    cut = HEALTHY | {"response/truncated_fraction": 0.8}
    run(tmp_path, [cut, cut])
    diagnosis = Diagnosis(tmp_path, EVERY)
    diagnosis.begin(2, 100)
    diagnosis.log(cut, 2)
    assert diagnosis.findings == []
    diagnosis.log(cut, 3)
    assert [finding.since for finding in diagnosis.findings] == [3]


def test_invalid_diagnosis_file_is_ignored(tmp_path: Path):
    for text in ("{", "[]", '{"findings": [{"rule": 1}]}'):
        (tmp_path / DIAGNOSIS_FILE).write_text(text)
        diagnosis = Diagnosis(tmp_path, EVERY)
        diagnosis.begin(3, 10)
        assert diagnosis.findings == []


def run(
    folder: Path, rows: list[dict[str, float]], begin: int = 0, rules: Sequence[Rule] = EVERY, total: int = 1000
) -> list[dict[str, Any]]:
    """Return the findings of a run with these rows, which follow step `begin`; -1: the first row is before training."""
    folder.mkdir(exist_ok=True)
    diagnosis = Diagnosis(folder, rules)
    with Trackers({"jsonl": JsonlTracker(folder), "diagnosis": diagnosis}) as trackers:
        trackers.begin(max(0, begin), total)
        for step, row in enumerate(rows, begin + 1):
            trackers.log(row, step)
    return [vars(finding) for finding in diagnosis.findings]


findings = run
