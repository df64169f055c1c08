"""Losses and estimators with SkyRL's signatures. test_invariance.py checks that micro-batches do not change them."""

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


def centered(token_level_rewards, response_mask, index, **kwargs):  # type: ignore[no-untyped-def]
    scores = token_level_rewards.sum(-1)
    means = torch.stack([scores[torch.from_numpy(index == group)].mean() for group in index])
    result = (scores - means).unsqueeze(-1) * response_mask
    return result, result


def check_all_arguments(token_level_rewards, response_mask, index, values, config, gamma, lambd, grpo_norm_by_std):  # type: ignore[no-untyped-def]
    assert token_level_rewards.shape == response_mask.shape == values.shape
    assert isinstance(index, np.ndarray)
    assert (config, gamma, lambd, grpo_norm_by_std) == (CONFIG, 0.9, 0.5, True)
    return values * response_mask, token_level_rewards


def token_mean_loss(log_probs, old_log_probs, advantages, config, loss_mask=None, rollout_logprobs=None):  # type: ignore[no-untyped-def]
    assert log_probs.shape == old_log_probs.shape == advantages.shape == loss_mask.shape == rollout_logprobs.shape
    assert config is CONFIG
    return (-log_probs * advantages * loss_mask).sum() / loss_mask.sum(), {"clip_ratio": 0.25, "other": 1.0}


def make_calculator(function) -> AdvantageCalculator:  # type: ignore[no-untyped-def]
    return AdvantageCalculator(
        registry.bind_settings(
            SkyRLAdvantageEstimator(function, CONFIG), "test", algorithm_keywords(CONFIG), advantages.ESTIMATOR_TENSORS
        )
    )


def test_skyrl_signatures_are_recognized():
    assert has_skyrl_signature(centered)
    assert has_skyrl_signature(token_mean_loss)
    assert not has_skyrl_signature(clipped_surrogate)
    assert not has_skyrl_signature(dr_grpo)


@pytest.mark.parametrize("shape", SHAPES)
def test_estimator_gets_only_valid_samples(shape: str):
    batch = edge_case_batch(shape)
    built_in = AdvantageCalculator(dr_grpo)(batch, Metrics())
    result = make_calculator(centered)(with_garbage(batch, torch.nan), Metrics())
    torch.testing.assert_close(result.token_advantages, built_in.token_advantages, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(result.returns, result.token_advantages)


def test_response_without_loss_tokens_counts_in_its_group():
    batch = edge_case_batch("regular")
    mask = batch.loss_mask & (batch.sequence_ids != 0)
    assert batch.token_rewards is not None
    token_rewards = torch.where(mask, batch.token_rewards, 0.0)
    masked = batch.with_tokens(loss_mask=mask, token_rewards=token_rewards)
    built_in = AdvantageCalculator(dr_grpo)(masked, Metrics())
    result = make_calculator(centered)(masked, Metrics())
    torch.testing.assert_close(result.token_advantages, built_in.token_advantages, rtol=1e-12, atol=1e-13)


def test_estimator_gets_all_skyrl_arguments():
    batch = edge_case_batch("failed rows")
    result = make_calculator(check_all_arguments)(batch, Metrics())
    assert result.token_advantages is not None and batch.values is not None and batch.token_rewards is not None
    torch.testing.assert_close(result.token_advantages, batch.values * batch.loss_mask)
    torch.testing.assert_close(result.returns, batch.token_rewards * batch.loss_mask)


def test_loss_gets_padded_tensors_and_is_expanded():
    batch = edge_case_batch("failed rows")
    logprobs = current_logprobs(batch)
    loss = registry.bind_settings(
        SkyRLPolicyLoss(token_mean_loss, CONFIG), "test", algorithm_keywords(CONFIG), policy.POLICY_LOSS_TENSORS
    )
    tensors = {name: getattr(batch, name) for name in ("old_logprobs", "sequence_ids", "rollout_logprobs")}
    values, clipped = loss(logprobs, batch.advantages, batch.loss_mask, **tensors)
    assert batch.advantages is not None
    expected = (-logprobs * batch.advantages)[batch.loss_mask].mean()
    assert values[batch.loss_mask].tolist() == pytest.approx([expected.item()] * int(batch.loss_mask.sum()))
    assert clipped.sum() == 0.25 * batch.loss_mask.sum()
    assert not values[~batch.loss_mask].any()


def test_loss_is_not_called_without_loss_tokens():
    batch = edge_case_batch("nothing counts")
    logprobs = current_logprobs(batch)
    values, clipped = SkyRLPolicyLoss(token_mean_loss, CONFIG)(
        logprobs, logprobs, batch.loss_mask, old_logprobs=logprobs, sequence_ids=batch.sequence_ids
    )
    assert torch.autograd.grad(values.sum(), logprobs)[0].tolist() == [0.0] * len(logprobs)
    assert not clipped.any()


def test_intermediate_reward_stays_on_its_token():
    batch = edge_case_batch("regular")
    assert batch.token_rewards is not None
    rewards = [np.count_nonzero(row) for row in select_masked(batch, batch.token_rewards)]
    assert max(rewards) == 2
    result = make_calculator(check_all_arguments)(replace(batch, values=batch.token_rewards), Metrics())
    torch.testing.assert_close(result.token_advantages, batch.token_rewards)
