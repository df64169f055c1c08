from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from skyrl_train.algorithms.advantages import grpo
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, k1
from skyrl_train.metrics import Metrics
from skyrl_train.testing.padded_reference import ragged_batch
from skyrl_train.trainer.advantages import AdvantageStep, KLInReward


def batch_with(rewards: list[float]):  # type: ignore[no-untyped-def]
    return replace(ragged_batch([4, 5, 6, 3]), rewards=torch.tensor(rewards))


def test_every_sampled_token_gets_its_sequence_s_advantage_and_prompts_get_none():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    result = AdvantageStep(grpo, norm_by_std=False, normalise_batch=False)(batch, Metrics())
    expected = torch.tensor([0.5, -0.5, 0.0, 0.0])[batch.sequence_ids] * batch.loss_mask
    torch.testing.assert_close(result.advantages, expected)


def test_kl_in_the_reward_lowers_the_reward_of_the_sequence_that_strayed():
    batch = batch_with([1.0, 1.0, 0.0, 0.0])
    strayed = (batch.sequence_ids == 0) & batch.loss_mask
    batch = batch.with_tokens(old_logprobs=strayed * 2.0, ref_logprobs=torch.zeros(len(strayed)))
    metrics = Metrics()
    step = AdvantageStep(grpo, False, False, KLInReward(k1, FixedKLController(0.1)))
    result = step(batch, metrics)
    penalty = 0.1 * 2.0 * int(strayed.sum())
    assert result.advantages is not None
    torch.testing.assert_close(result.advantages[strayed], torch.full((int(strayed.sum()),), -penalty / 2))
    assert metrics.flush()["policy/kl_in_reward"] == pytest.approx(2.0 / 4)


def test_an_adapted_coefficient_survives_a_resume():
    batch = batch_with([1.0, 0.0, 1.0, 0.0])
    zeros = torch.zeros(len(batch.input_ids))
    batch = batch.with_tokens(old_logprobs=zeros + 1.0, ref_logprobs=zeros)
    step = AdvantageStep(grpo, True, False, KLInReward(k1, AdaptiveKLController(0.1, target=0.01, horizon=10)))
    step(batch, Metrics())
    assert step.state()["kl_coef"] > 0.1
    resumed = AdvantageStep(grpo, True, False, KLInReward(k1, AdaptiveKLController(0.1, target=0.01, horizon=10)))
    resumed.load_state(step.state())
    assert resumed.state() == step.state()
