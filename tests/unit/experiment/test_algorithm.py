"""Bound functions of the configured names, and errors for unknown names and double corrections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.registry import advantage_estimators, get_keyword_parameters, policy_losses
from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS
from skyrl_train.config.hydra import load_preset
from skyrl_train.config.predicates import needs_reference
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.algorithm import (
    algorithm_keywords,
    build_advantage_step,
    build_correction_steps,
    build_objective,
    build_policy_objective_spec,
    comparison_scope,
    get_off_policy_correction,
    reads_old_logprobs_before_loss,
)
from skyrl_train.metrics import Metrics
from tests.support.edge_case_batches import edge_case_batch
from tests.support.table_cases import check_each

BELOW = "trainer.algorithm."


ANCHOR = "cispo.cispo_anchor=rollout"


def algorithm(*overrides: str) -> AlgorithmConfig:
    return load_preset([BELOW + override for override in overrides]).trainer.algorithm


@pytest.fixture
def custom_functions() -> Iterator[None]:
    """Register a loss and an estimator of a user; unregister them after the test."""

    @policy_losses.register("unknown_argument")
    def unknown_argument(logprobs, advantages, mask, *, moon_phase): ...

    @policy_losses.register("like_skyrl")
    def like_skyrl(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None): ...

    yield
    for name in ("unknown_argument", "like_skyrl"):
        del policy_losses.loaded[name]


def bound(objective: PolicyObjective) -> dict[str, Any]:
    """Return the keywords that the policy loss received."""
    return objective.policy_loss.keywords  # type: ignore[attr-defined, no-any-return]


def rewarded(*group_rewards: float) -> TrainBatch:
    """Return a batch of two prompts. All samples of a prompt get its reward at their last token."""
    batch = edge_case_batch("regular")
    rewards = torch.tensor(group_rewards, dtype=torch.float64)[batch.group_ids // 3]
    token_rewards = torch.zeros_like(batch.token_rewards)  # type: ignore[arg-type]
    token_rewards[batch.offsets[1:] - 1] = rewards
    return replace(batch, rewards=rewards, token_rewards=token_rewards)


@pytest.mark.defect("false-equal-reward-warnings")
@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_comparison_scope_matches_advantages(name: str):
    chosen = algorithm(f"advantage_estimator={name}")
    step, compared = build_advantage_step(chosen), comparison_scope(chosen)
    first, second = (step(rewarded(*rewards), Metrics()).token_advantages for rewards in ((0.0, 1.0), (1.0, 0.5)))
    assert first is not None and second is not None
    assert (not first.any() and not second.any()) is (compared == "group")
    assert torch.equal(first, second) is (compared != "step")


def test_comparison_scope_of_custom_estimator_and_imitation(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(advantage_estimators.loaded, "mine", lambda rewards, group_ids, valid: rewards)
    assert comparison_scope(algorithm("advantage_estimator=mine")) == "step"
    assert comparison_scope(algorithm("policy_loss_type=cross_entropy")) is None


def test_every_loss_can_be_built():
    check_each(POLICY_LOSSES, lambda name: build_objective(algorithm(f"policy_loss_type={name}")))


def test_every_estimator_can_be_built():
    check_each(ADVANTAGE_ESTIMATORS, lambda name: build_advantage_step(algorithm(f"advantage_estimator={name}")))


def test_estimators_that_need_token_rewards():
    steps = {name: build_advantage_step(algorithm(f"advantage_estimator={name}")) for name in ADVANTAGE_ESTIMATORS}
    assert {name for name, step in steps.items() if step.needs_token_rewards} == {"gae", "reinforce++"}


def test_every_kl_estimator_can_be_built():
    check_each(KL_ESTIMATORS, lambda name: build_objective(algorithm(f"kl_estimator_type={name}", "use_kl_loss=true")))


@pytest.mark.parametrize("name", REDUCTIONS)
def test_every_reduction_gives_weights(name: str):
    reduction = build_policy_objective_spec(
        load_preset([f"{BELOW}loss_reduction={name}", f"{BELOW}max_seq_len=4"])
    ).reduction
    ids = torch.tensor([0, 0, 1, 1])
    assert reduction(torch.ones(4, dtype=torch.bool), ids, ids).sum() == pytest.approx(0.5 if "norm" in name else 1.0)


def test_loss_with_unknown_argument_is_named(custom_functions: None):
    with pytest.raises(ConfigError, match="policy_loss_type=unknown_argument requires moon_phase"):
        build_objective(algorithm("policy_loss_type=unknown_argument"))


def test_cispo_and_dppo_keys_select_arguments():
    against_old = get_keyword_parameters(build_objective(algorithm("policy_loss_type=cispo")).policy_loss)
    against_engine = get_keyword_parameters(build_objective(algorithm("policy_loss_type=cispo", ANCHOR)).policy_loss)
    assert against_old.keys() - against_engine.keys() == {"old_logprobs"}
    assert against_engine.keys() - against_old.keys() == {"rollout_logprobs"}
    both = build_objective(algorithm("policy_loss_type=dppo_tv", "dppo.delta_low=0.1", "dppo.delta_high=0.3"))
    assert (bound(both)["delta_low"], bound(both)["delta_high"]) == (0.1, 0.3)
    one = build_objective(algorithm("policy_loss_type=dppo_tv", "dppo.tv_threshold=0.05"))
    logprobs, mask, seen = torch.tensor([0.5, 0.7]).log(), torch.ones(2, dtype=torch.bool), torch.tensor([0.4, 0.68])
    _, blocked = one.policy_loss(logprobs, torch.ones(2), mask, frozen_logprobs=logprobs, rollout_logprobs=seen.log())
    assert blocked.tolist() == [1.0, 0.0]  # 0.1 is inside the default bounds, and outside 0.05
    with pytest.raises(ConfigError, match=r"tv_threshold=0\.05: must be null with delta_low or delta_high"):
        prepare_config(["trainer.algorithm.dppo.tv_threshold=0.05", "trainer.algorithm.dppo.delta_low=0.1"])


@pytest.mark.parametrize("name", ["rollout_is", "dppo_tv", "dppo_kl", "like_skyrl"])
@pytest.mark.parametrize("key", ["off_policy_correction.tis_ratio_type=token", "use_tis=true"])
def test_second_off_policy_correction_is_refused(name: str, key: str, custom_functions: None):
    chosen = algorithm(f"policy_loss_type={name}", key, "tis_imp_ratio_cap=2.0")
    with pytest.raises(ConfigError, match=f"must be null with policy_loss_type={name}"):
        build_objective(chosen)


def test_older_tis_keys_are_equivalent():
    found = get_off_policy_correction(algorithm("use_tis=true", "tis_imp_ratio_cap=3.0"))
    assert (found.tis_ratio_type, found.token_tis_ratio_clip_high) == ("token", 3.0)
    chosen = algorithm("use_tis=true", "tis_imp_ratio_cap=3.0", "off_policy_correction.tis_ratio_type=token")
    assert get_off_policy_correction(chosen).token_tis_ratio_clip_high == 2.0


@pytest.mark.parametrize(
    ("overrides", "reference", "old"),
    [
        (["use_kl_loss=false"], False, False),
        (["use_kl_loss=true", "kl_loss_coef=0.0"], False, False),
        (["use_kl_loss=true"], True, False),
        (["use_kl_loss=false", "use_kl_in_reward=true"], True, True),
        (["use_kl_loss=false", "advantage_estimator=distillation"], True, True),
        (["use_kl_loss=false", "off_policy_correction.token_mask_eps_low=0.1"], False, True),
        (
            ["use_kl_loss=false", "policy_loss_type=clip_cov"],
            False,
            False,
        ),  # the learner computes them for token selection
    ],
)
def test_passes_that_nothing_reads_are_not_run(overrides: list[str], reference: bool, old: bool):
    chosen = algorithm(*overrides)
    assert (needs_reference(chosen), reads_old_logprobs_before_loss(chosen)) == (reference, old)


def test_correction_is_built_only_if_configured():
    assert build_correction_steps(algorithm()) == []
    assert len(build_correction_steps(algorithm("off_policy_correction.sequence_mask_metric=product"))) == 1


def test_estimators_of_plugins_are_known_after_their_import():
    with pytest.raises(ConfigError, match="Unknown advantage estimator 'nobodys'"):
        advantage_estimators.get("nobodys")


@pytest.mark.parametrize(
    ("keys", "needed"),
    [
        (["policy_loss_type=regular"], None),
        (["policy_loss_type=dppo_tv"], False),
        (["policy_loss_type=cispo", ANCHOR], False),
        (["policy_loss_type=cross_entropy"], False),
        (["policy_loss_type=cross_entropy", "use_kl_loss=true", "kl_estimator_type=k3_ratio"], None),
        (["policy_loss_type=cross_entropy", "use_kl_in_reward=true"], True),
        (["policy_loss_type=regular", "use_tis=true", "tis_imp_ratio_cap=2.0"], True),
    ],
)
def test_old_logprobs_are_needed_if_read(keys: list[str], needed: bool | None):
    cfg = load_preset([*(f"trainer.algorithm.{key}" for key in ["use_kl_loss=false", *keys])])
    assert build_policy_objective_spec(cfg).needs_old_logprobs is needed


def test_algorithm_keywords_are_unique():
    algorithm = AlgorithmConfig()
    losses = (algorithm.sapo, algorithm.clip_cov, algorithm.kl_cov, algorithm.cispo, algorithm.dppo, algorithm.sft)
    names = [key.name for section in (algorithm, *losses) for key in fields(section)]
    assert len(names) == len(set(names))
    assert algorithm_keywords(algorithm).keys() <= {"config", *names}
