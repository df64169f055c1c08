"""Losses and estimators as SkyRL's users write them. test_invariance.py holds what micro-batches do to them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from skyrl_train.algorithms import advantages, policy_objective as policy, registry
from skyrl_train.algorithms.advantages import AdvantageCalculator, dr_grpo
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.skyrl_adapters import SkyRLAdvantageEstimator, SkyRLPolicyLoss, has_skyrl_signature
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.experiment.algorithm import algorithm_keywords
from skyrl_train.metrics import Metrics
from tests.support.edge_case_batches import SHAPES, current_logprobs, edge_case_batch, select_masked, with_garbage

CONFIG = AlgorithmConfig(gamma=0.9, lambd=0.5)


def centred(token_level_rewards, response_mask, index, **kwargs):  # type: ignore[no-untyped-def]
    scores = token_level_rewards.sum(-1)
    means = torch.stack([scores[torch.from_numpy(index == group)].mean() for group in index])
    result = (scores - means).unsqueeze(-1) * response_mask
    return result, result


def reads_everything(token_level_rewards, response_mask, index, values, config, gamma, lambd, grpo_norm_by_std):  # type: ignore[no-untyped-def]
    assert token_level_rewards.shape == response_mask.shape == values.shape
    assert isinstance(index, np.ndarray)
    assert (config, gamma, lambd, grpo_norm_by_std) == (CONFIG, 0.9, 0.5, True)
    return values * response_mask, token_level_rewards


def mean_of_rows(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):  # type: ignore[no-untyped-def]
    assert log_probs.shape == old_log_probs.shape == advantages.shape == loss_mask.shape == rollout_logprobs.shape
    assert config is CONFIG
    return (-log_probs * advantages * loss_mask).sum() / loss_mask.sum(), {"clip_ratio": 0.25, "other": 1.0}


def make_calculator(function) -> AdvantageCalculator:  # type: ignore[no-untyped-def]
    return AdvantageCalculator(
        registry.bind_settings(
            SkyRLAdvantageEstimator(function, CONFIG), "test", algorithm_keywords(CONFIG), advantages.ESTIMATOR_TENSORS
        )
    )


def test_they_are_recognised_by_their_arguments():
    assert has_skyrl_signature(centred)
    assert has_skyrl_signature(mean_of_rows)
    assert not has_skyrl_signature(clipped_surrogate)
    assert not has_skyrl_signature(dr_grpo)


@pytest.mark.parametrize("shape", SHAPES)
def test_an_estimator_compares_the_samples_that_did_not_fail(shape: str):
    batch = edge_case_batch(shape)
    built_in = AdvantageCalculator(dr_grpo)(batch, Metrics())
    found = make_calculator(centred)(with_garbage(batch, torch.nan), Metrics())
    torch.testing.assert_close(found.token_advantages, built_in.token_advantages, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(found.returns, found.token_advantages)


def test_a_response_kept_out_of_the_loss_counts_in_its_group_s_statistics():
    batch = edge_case_batch("regular")
    kept = batch.loss_mask & (batch.sequence_ids != 0)
    assert batch.token_rewards is not None
    token_rewards = torch.where(kept, batch.token_rewards, 0.0)
    masked = batch.with_tokens(loss_mask=kept, token_rewards=token_rewards)
    built_in = AdvantageCalculator(dr_grpo)(masked, Metrics())
    found = make_calculator(centred)(masked, Metrics())
    torch.testing.assert_close(found.token_advantages, built_in.token_advantages, rtol=1e-12, atol=1e-13)


def test_an_estimator_gets_the_rest_by_skyrl_s_names():
    batch = edge_case_batch("failed rows")
    found = make_calculator(reads_everything)(batch, Metrics())
    assert found.token_advantages is not None and batch.values is not None and batch.token_rewards is not None
    torch.testing.assert_close(found.token_advantages, batch.values * batch.loss_mask)
    torch.testing.assert_close(found.returns, batch.token_rewards * batch.loss_mask)


def test_a_loss_gets_rectangles_and_its_scalar_counts_once_for_every_token():
    batch = edge_case_batch("failed rows")
    logprobs = current_logprobs(batch)
    loss = registry.bind_settings(
        SkyRLPolicyLoss(mean_of_rows, CONFIG), "test", algorithm_keywords(CONFIG), policy.POLICY_LOSS_TENSORS
    )
    tensors = {name: getattr(batch, name) for name in ("old_logprobs", "sequence_ids", "rollout_logprobs")}
    values, clipped = loss(logprobs, batch.advantages, batch.loss_mask, **tensors)
    assert batch.advantages is not None
    by_hand = (-logprobs * batch.advantages)[batch.loss_mask].mean()
    assert values[batch.loss_mask].tolist() == pytest.approx([by_hand.item()] * int(batch.loss_mask.sum()))
    assert clipped.sum() == 0.25 * batch.loss_mask.sum()
    assert not values[~batch.loss_mask].any()


def test_a_mini_batch_without_a_token_that_counts_is_not_shown_to_a_loss_that_would_divide_by_zero():
    batch = edge_case_batch("nothing counts")
    logprobs = current_logprobs(batch)
    values, clipped = SkyRLPolicyLoss(mean_of_rows, CONFIG)(
        logprobs, logprobs, batch.loss_mask, old_logprobs=logprobs, sequence_ids=batch.sequence_ids
    )
    assert torch.autograd.grad(values.sum(), logprobs)[0].tolist() == [0.0] * len(logprobs)
    assert not clipped.any()


def test_a_reward_in_the_middle_stays_on_its_token():
    batch = edge_case_batch("regular")
    assert batch.token_rewards is not None
    rewards = [np.count_nonzero(row) for row in select_masked(batch, batch.token_rewards)]
    assert max(rewards) == 2
    found = make_calculator(reads_everything)(replace(batch, values=batch.token_rewards), Metrics())
    torch.testing.assert_close(found.token_advantages, batch.token_rewards)
