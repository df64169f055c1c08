"""Rules and real runs: tiny ones with and without each illness, the quickstart's, and the presets'.

`scripts/recordings/record.py` makes the recordings.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyrl_train.algorithms import registry as algorithms
from skyrl_train.assembly.services import rules_of
from skyrl_train.config.prepare import prepare
from skyrl_train.registry import import_plugins
from skyrl_train.report.diagnosis import ASYNC, NO_DIFFERENCE, RULES, Diagnosis, Rule, memory_rule

RECORDED = Path(__file__).parent / "recorded"
EXAMPLES = Path(__file__).parents[3] / "examples"
PRESETS = sorted(path.stem for path in (EXAMPLES / "algorithms").glob("*.yaml") if path.stem != "gsm8k")

MEMORY = memory_rule(1.0, "memory/learner_peak_rss_gib")
"""As if the machine had 1 GiB."""
EVERY = [NO_DIFFERENCE, *ASYNC, *RULES, MEMORY]
READS = {
    "no_difference": "reward/zero_variance_groups",
    "trainer_starved": "async/trainer_idle",
    "engines_starved": "async/engines_idle",
    "truncated": "response/truncated_fraction",
    "format_never_met": "environment/no_answer",
    "entropy_collapse": "policy/entropy",
    "kl_runs_away": "policy/kl",
    "engine_and_trainer_disagree": "mismatch/ratio_mean",
    "gradient_spikes": "policy/grad_norm",
    "episodes_fail": "rollouts/failed",
    "long_answers_are_cut": "rollouts/failed",
    "evaluation_falls": "eval/arithmetic/avg_score",
    "memory_near_its_limit": "memory/learner_peak_rss_gib",
}
"""What a run without an illness must have measured to say that it has not got it."""
ALSO = {
    "format_never_met": {"no_difference"},  # where nothing is an answer, all get the same reward
    "entropy_collapse": {"truncated"},  # the best answer is "4 4 4 4", without an end
    "kl_runs_away": {"truncated"},  # the same answer, on the way to it
}
"""What else ails a run that has an illness."""


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.name)
def test_a_rule_notices_a_real_run_that_has_its_illness(rule: Rule, tmp_path: Path):
    found = findings(f"{rule.name}_ill", EVERY, tmp_path)
    assert set(found) == {rule.name} | ALSO.get(rule.name, set()), found


@pytest.mark.parametrize("rule", EVERY, ids=lambda rule: rule.name)
def test_a_rule_says_nothing_of_a_real_run_that_is_well(rule: Rule, tmp_path: Path):
    name = "well_async" if rule in ASYNC else "well"
    assert sum(READS[rule.name] in row for row in recorded(name)) >= 3
    assert findings(name, EVERY, tmp_path) == {}


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules that presets name can be imported; what they register is forgotten."""
    monkeypatch.syspath_prepend(EXAMPLES / "algorithms")
    yield
    algorithms.advantage_estimators.forget("centred_rank")
    algorithms.policy_losses.forget("reinforce")


@pytest.mark.parametrize("name", ["quickstart", *(f"preset_{preset}" for preset in PRESETS)])
def test_nothing_is_said_of_the_quickstart_and_the_presets(name: str, plugins: None, tmp_path: Path):
    folder, preset = ("quickstart", "grpo") if name == "quickstart" else ("algorithms", name.removeprefix("preset_"))
    arguments = ["--config-dir", str(EXAMPLES / folder), "--config-name", preset, "trainer.policy.model.path=model"]
    cfg = prepare(arguments, has_accelerator=False).config
    import_plugins(cfg.trainer.plugins)
    assert findings(name, rules_of(cfg), tmp_path) == {}


def test_recordings_are_small_and_hold_numbers_alone():
    files = sorted(RECORDED.iterdir())
    assert len(files) == len(EVERY) + len(PRESETS) + 3
    for file in files:
        assert file.stat().st_size < 20_000
        assert {type(value) for row in recorded(file.stem) for value in row.values()} <= {int, float}


def recorded(name: str) -> list[dict[str, float]]:
    return [json.loads(line) for line in (RECORDED / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def findings(name: str, rules: list[Rule], folder: Path) -> dict[str, str]:
    """What the rules say of a recorded run: the evidence by the rule's name."""
    diagnosis = Diagnosis(folder, rules)
    for row in recorded(name):
        diagnosis.log(row, int(row["step"]))
    return {finding.rule: f"step {finding.since}: {finding.evidence}" for finding in diagnosis.findings}
