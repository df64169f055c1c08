from __future__ import annotations

import asyncio
from contextlib import nullcontext

import pytest

from skyrl_train.algorithms.advantages import ComparisonScope
from skyrl_train.config.schema import GuardsConfig
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.errors import EnginesLost, GuardTriggered
from skyrl_train.trainer.guards import Guards
from tests.support.fake_trainer_parts import FakeTrainerParts, fails_at, trainer_of

UNHEALTHY = {
    "equal_rewards": {"reward/zero_variance_groups": 1.0},
    "ratio": {"policy/ratio_max": 1e5},
    "cut": {"response/truncated_fraction": 0.95},
}
HEALTHY = {"reward/zero_variance_groups": 0.9, "policy/ratio_max": 3.0, "response/truncated_fraction": 0.4}
MESSAGES = {
    "equal_rewards": "same reward for 1 steps",
    "ratio": "before the step was 1e",
    "cut": "95% of the responses",
}


@pytest.mark.parametrize("name", sorted(UNHEALTHY))
def test_only_named_guards_stop_the_run(name: str, caplog: pytest.LogCaptureFixture):
    with pytest.raises(GuardTriggered, match=rf"{MESSAGES[name]}.*trainer\.guards\.stop names {name}"):
        Guards(GuardsConfig(equal_rewards_steps=1, stop=[name]), ComparisonScope.GROUP).check(UNHEALTHY[name], 7)
    off = GuardsConfig(equal_rewards_steps=None, max_ratio=None, max_cut_fraction=None, stop=list(UNHEALTHY))
    Guards(off, ComparisonScope.GROUP).check(UNHEALTHY[name], 7)
    Guards(GuardsConfig(equal_rewards_steps=1), ComparisonScope.GROUP).check(UNHEALTHY[name], 7)
    assert not caplog.records, "the diagnosis warns"


def test_truncation_advice_names_the_end_of_turn():
    with pytest.raises(GuardTriggered, match=r"end-of-turn token of the chat template, '<\|im_end\|>'"):
        Guards(GuardsConfig(stop=["cut"]), None, "<|im_end|>").check(UNHEALTHY["cut"], 7)


def test_equal_rewards_count_steps_in_a_row():
    guards = Guards(GuardsConfig(equal_rewards_steps=3, stop=["equal_rewards"]), ComparisonScope.GROUP)
    for step, metrics in enumerate([UNHEALTHY["equal_rewards"]] * 2 + [HEALTHY] + [UNHEALTHY["equal_rewards"]] * 2):
        guards.check(metrics, step)
    with pytest.raises(GuardTriggered, match="for 3 steps"):
        guards.check(UNHEALTHY["equal_rewards"], 5)


ONE_SAMPLE_PER_PROMPT = {"reward/zero_variance_groups": 1.0, "reward/std": 0.4}
ALL_EQUAL = {"reward/zero_variance_groups": 1.0, "reward/std": 0.0}
ONE_SAMPLE = {"reward/zero_variance_groups": 1.0}  # the standard deviation of one sample is undefined


@pytest.mark.defect("false-equal-reward-warnings")
@pytest.mark.parametrize(
    ("scope", "metrics", "stops"),
    [
        (ComparisonScope.GROUP, ONE_SAMPLE_PER_PROMPT, True),
        (ComparisonScope.GROUP, ALL_EQUAL, True),
        (ComparisonScope.STEP, ONE_SAMPLE_PER_PROMPT, False),
        (ComparisonScope.STEP, ALL_EQUAL, True),
        (ComparisonScope.STEP, ONE_SAMPLE, False),
        (None, ALL_EQUAL, False),
    ],
)
def test_equal_rewards_use_the_comparison_scope(scope: ComparisonScope | None, metrics: dict[str, float], stops: bool):
    guards = Guards(GuardsConfig(equal_rewards_steps=1, stop=["equal_rewards"]), scope)
    description = f"all samples of a {'prompt' if scope == 'group' else 'step'} had the same"
    with pytest.raises(GuardTriggered, match=description) if stops else nullcontext():
        guards.check(metrics, 1)


RATIOS = {
    "policy/ratio_max": "probability during the update to its probability before the step was",
    "mismatch/ratio_max": "in the engine was",
}


@pytest.mark.defect("engine-ratio-not-checked")
@pytest.mark.parametrize("metric", RATIOS)
def test_ratio_guard_names_the_compared_policies(metric: str):
    with pytest.raises(GuardTriggered) as error:
        Guards(GuardsConfig(stop=["ratio"]), None).check({"policy/ratio_max": 1.0, metric: 1e8}, 1)
    assert f"{RATIOS[metric]} 1e+08 ({metric}, trainer.guards.max_ratio=100)" in str(error.value)


@pytest.mark.parametrize("metric", RATIOS)
def test_nan_ratio_triggers_the_guard(metric: str):
    with pytest.raises(GuardTriggered, match="was nan"):
        Guards(GuardsConfig(stop=["ratio"]), None).check({metric: float("nan")}, 1)


@pytest.mark.defect("skipped-updates-not-reported")
def test_skipped_updates_warn_at_powers_of_ten(caplog: pytest.LogCaptureFixture):
    guards = Guards(GuardsConfig(), None)
    for step in range(1, 201):
        skipped = {"policy/skipped": 0.0 if step % 5 == 0 else 1.0, "critic/skipped": 0.0}
        guards.check(skipped, step)
    assert [record.message.partition(":")[0] for record in caplog.records] == ["step 1", "step 12", "step 124"]
    first = caplog.records[0].message
    assert "100% of the policy's updates were skipped" in first and "critic" not in first
    assert "ends after 5 consecutive skipped updates (trainer.guards.max_skipped_updates)" in first


def test_skipped_updates_of_both_models_share_a_warning(caplog: pytest.LogCaptureFixture):
    guards = Guards(GuardsConfig(), None)
    guards.check({"policy/skipped": 0.0}, 1)
    assert not caplog.records
    guards.check({"policy/skipped": 0.25, "critic/skipped": 0.5}, 2)
    (record,) = caplog.records
    assert record.message.startswith("step 2: 25% of the policy's updates and 50% of the critic's updates were skipped")


def saved_after_two_steps(resumed: dict[str, int], expect: type[Exception]) -> dict[str, int]:
    """Return the guards' state in the checkpoint of a run that ends with `expect` after two steps of equal rewards."""
    fakes, states = FakeTrainerParts(), [resumed]
    trainer = trainer_of(fakes)
    trainer.guards = guards = Guards(GuardsConfig(equal_rewards_steps=4, stop=["equal_rewards"]), ComparisonScope.STEP)
    guards.load_state_dict(resumed)
    original = fakes.rollout

    async def rollout_with_equal_rewards(prompt: Prompt, position: int) -> TrajectoryGroup:
        group = await original(prompt, position)
        for item in group.trajectories:
            item.reward = 1.0
        return group

    trainer.collector.rollout = rollout_with_equal_rewards
    fakes.capture_state = lambda: states.append(guards.state_dict())  # type: ignore[method-assign]
    fails_at(trainer, "learner", "add_logprobs_and_values", 2, EnginesLost("none"))
    with pytest.raises(expect):
        asyncio.run(trainer.fit())
    assert [event for event in fakes.events if event.startswith("save")] == ["save 2"]
    return states[-1]


@pytest.mark.defect("resume-resets-guards")
def test_equal_reward_count_survives_resuming():
    first = saved_after_two_steps({"equal_steps": 0}, EnginesLost)
    assert first == {"equal_steps": 2}, "the saved step counts, too"
    saved_after_two_steps(first, GuardTriggered)


def test_run_stopped_by_guard_is_saved():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    trainer.guards = Guards(GuardsConfig(max_ratio=1.0, stop=["ratio"]), None)
    original = fakes.update

    async def update(batch: object) -> dict[str, float]:
        return await original(batch) | {"policy/ratio_max": 2.0}

    fakes.update = update  # type: ignore[method-assign]
    with pytest.raises(GuardTriggered):
        asyncio.run(trainer.fit())
    assert fakes.events[-1] == "save 1"
    assert set(fakes.logged) == {0, 1}
