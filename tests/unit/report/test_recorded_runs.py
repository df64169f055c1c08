"""Diagnosis rules on recorded runs: healthy and unhealthy tiny runs, the quickstart and the presets.

`scripts/recordings/record.py` makes the recordings.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.algorithms import registry as algorithms
from skyrl_train.config.prepare import prepare_config
from skyrl_train.experiment.run_resources import diagnosis_rules
from skyrl_train.registry import import_plugins
from skyrl_train.report.diagnosis import (
    NO_DIFFERENCE,
    RULES,
    Diagnosis,
    Finding,
    Rule,
    async_rules,
    gradient_rule,
    memory_rule,
)
from tests.support.doc_pages import find_commands

RECORDED = Path(__file__).parent / "recorded"
EXAMPLES = Path(__file__).parents[3] / "examples"
PRESETS = sorted(path.stem for path in (EXAMPLES / "algorithms").glob("*.yaml") if path.stem != "gsm8k")

MEMORY = memory_rule(1.0, "memory/learner_peak_rss_gib")
"""The rule for a machine with 1 GiB."""
STARVED_RULES = async_rules(max_staleness_steps=1)
"""Rules with the staleness bound of the unhealthy runs."""
EVERY = [NO_DIFFERENCE, gradient_rule(uses_group_baseline=True), *STARVED_RULES, *RULES, MEMORY]
METRICS_READ = {
    "no_difference": ("reward/zero_variance_groups", 5),
    "large_policy_ratio": ("policy/ratio_max", 1),
    "large_engine_ratio": ("mismatch/ratio_max", 1),
    "trainer_starved": ("async/trainer_idle", 21),
    "engines_starved": ("async/engines_idle", 21),
    "truncated": ("response/truncated_fraction", 3),
    "format_never_met": ("environment/no_answer", 5),
    "entropy_collapse": ("policy/entropy", 10),
    "kl_runs_away": ("policy/kl", 6),
    "engine_and_trainer_disagree": ("mismatch/ratio_mean", 3),
    "gradient_spikes": ("policy/grad_norm", 20),
    "episodes_fail": ("rollouts/failed", 3),
    "long_answers_are_cut": ("rollouts/failed", 3),
    "evaluation_falls": ("eval/arithmetic/avg_score", 3),
    "memory_near_its_limit": ("memory/learner_peak_rss_gib", 1),
}
"""Rule -> metric and number of steps that a healthy run must have, so that the absence of a finding means something."""
NOT_RECORDED = {"large_policy_ratio", "large_engine_ratio"}
"""Rules whose metrics the recordings lack."""
NOT_IN_PRESETS = {"gradient_spikes", "evaluation_falls"}
"""Rules that recorded presets cannot show: they have 12 steps and no evaluation. Most have no reference model, too."""
ALSO_FOUND = {
    "format_never_met": {"no_difference"},  # without answers all rewards are equal
    "entropy_collapse": {"truncated"},  # the best response is "4 4 4 4", without an end-of-turn token
    "kl_runs_away": {"truncated"},  # the policy moves towards the same response
}
"""Rule -> other rules that its unhealthy run triggers."""


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.name)
def test_rule_finds_recorded_unhealthy_run(rule: Rule, tmp_path: Path):
    found = findings(f"{rule.name}_ill", EVERY, tmp_path)
    assert set(found) == {rule.name} | ALSO_FOUND.get(rule.name, set()), found


@pytest.mark.parametrize("name", ["evaluation_falls", "engines_starved"])
def test_lasting_finding_stays_active(name: str, tmp_path: Path):
    (found,) = diagnosed(f"{name}_ill", [rule for rule in EVERY if rule.name == name], tmp_path)
    assert found.until is None


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.name)
def test_rule_ignores_recorded_healthy_run(rule: Rule, tmp_path: Path):
    name = "well_async" if rule in STARVED_RULES else "well"
    assert measured(name, rule)
    assert (
        findings(
            name,
            [*async_rules(max_staleness_steps=6), *(rule for rule in EVERY if rule not in STARVED_RULES)],
            tmp_path,
        )
        == {}
    )


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the presets' modules importable, and unregister what they register afterwards."""
    monkeypatch.syspath_prepend(EXAMPLES / "algorithms")
    yield
    algorithms.advantage_estimators.unregister("centred_rank")
    algorithms.policy_losses.unregister("reinforce")


@pytest.mark.parametrize("name", ["quickstart", *(f"preset_{preset}" for preset in PRESETS)])
def test_quickstart_and_presets_have_no_findings(name: str, plugins: None, tmp_path: Path):
    folder, preset = ("quickstart", "grpo") if name == "quickstart" else ("algorithms", name.removeprefix("preset_"))
    arguments = ["--config-dir", str(EXAMPLES / folder), "--config-name", preset, "trainer.policy.model.path=model"]
    cfg = prepare_config(arguments, has_accelerator=False).config
    import_plugins(cfg.trainer.plugins)
    rules = diagnosis_rules(cfg)
    assert (
        f"`skyrl-train env try {cfg.environment.env_class} --data " in rules[0].advice or name == "preset_distillation"
    )
    unread = {rule.name for rule in rules if not measured(name, rule)}
    assert unread <= NOT_RECORDED | {"kl_runs_away", *(() if name == "quickstart" else NOT_IN_PRESETS)}
    assert findings(name, rules, tmp_path) == {}


def test_recordings_are_small_and_numeric():
    files = sorted(RECORDED.iterdir())
    assert len(files) == len(EVERY) + len(PRESETS) + 3
    for file in files:
        assert file.stat().st_size < 20_000
        assert {type(value) for row in recorded(file.stem) for value in row.values()} <= {int, float}


@pytest.mark.on_demand
@pytest.mark.slow
def test_recording_can_be_repeated(tmp_path: Path):
    """The command of docs/contributing/testing.md records the same metrics again, from a model without warm-up."""
    (command,) = find_commands("python scripts/recordings/record.py ")
    words = [str(tmp_path / "work") if word == "/tmp/recordings" else word for word in command.words[1:]]
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    make = [sys.executable, "-c", NO_WARM_UP, str(EXAMPLES / "quickstart"), str(tmp_path / "work" / "warm")]
    record = [sys.executable, *words, "--output", str(tmp_path / "recorded")]
    for each in (make, record):
        done = subprocess.run(each, cwd=EXAMPLES.parent, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    (file,) = (tmp_path / "recorded").iterdir()
    found = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    before = recorded("well")
    assert [row["step"] for row in found] == [row["step"] for row in before]
    assert all(set(one) <= set(other) for one, other in zip(before, found, strict=True))


NO_WARM_UP = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from quickstart import OPERATIONS, save_model, write_data
folder = Path(sys.argv[2])
save_model(folder / "sft" / "export" / "global_step_0" / "policy", write_data(folder / "data", 0, OPERATIONS), 0)
"""
"""Script that writes the files of the quickstart's warm-up without training."""


def measured(name: str, rule: Rule) -> bool:
    metric, steps = METRICS_READ[rule.name]
    return sum(metric in row for row in recorded(name)) >= steps


def recorded(name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def diagnosed(name: str, rules: list[Rule], folder: Path) -> list[Finding]:
    diagnosis, rows = Diagnosis(folder, rules), recorded(name)
    diagnosis.begin(0, int(rows[-1]["step"]))
    for row in rows:
        diagnosis.log(row, int(row["step"]))
    return diagnosis.findings


def findings(name: str, rules: list[Rule], folder: Path) -> dict[str, str]:
    """Return the findings of a recorded run: rule -> first step and evidence."""
    found = diagnosed(name, rules, folder)
    return {finding.rule: f"step {finding.since}: {finding.evidence}" for finding in found}
