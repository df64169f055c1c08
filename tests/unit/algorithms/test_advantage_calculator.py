from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from skyrl_train.algorithms.advantages import (
    AdvantageCalculator,
    KLInReward,
    batch_normalize,
    dr_grpo,
    gae,
    grpo,
    record_advantage_metrics,
    reinforce_pp,
    reinforce_pp_baseline,
)
from skyrl_train.algorithms.kl import AdaptiveKLController, FixedKLController, k1, k3, k3_ratio
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics
from tests.support.edge_case_batches import edge_case_batch, select_masked, with_garbage
from tests.support.padded_reference import ragged_batch


def batch_with(rewards: list[float]) -> TrainBatch:
    return replace(ragged_batch([4, 5, 6, 3]), rewards=torch.tensor(rewards))


def test_every_sampled_token_gets_its_sequence_s_advantage_and_prompts_get_none():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    result = AdvantageCalculator(dr_grpo)(batch, Metrics())
    expected = torch.tensor([0.5, -0.5, 0.0, 0.0])[batch.sequence_ids] * batch.loss_mask
    torch.testing.assert_close(result.token_advantages, expected)
    assert result.returns is None
    assert result.advantages is None, "4 bytes a token that say nothing"


def test_what_a_batch_had_before_is_replaced():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    of_tokens, of_sequences = AdvantageCalculator(reinforce_pp_baseline), AdvantageCalculator(dr_grpo)
    for first, second in ((of_tokens, of_sequences), (of_sequences, of_tokens)):
        again = second(first(batch, Metrics()), Metrics())
        torch.testing.assert_close(again.token_advantages, second(batch, Metrics()).token_advantages)
        assert (again.advantages is None) is not (again.sequence_advantages is None)


def test_statistics_are_those_of_tokens():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    once, spread = Metrics(), Metrics()
    found = AdvantageCalculator(dr_grpo)(batch, once)
    record_advantage_metrics(replace(found, advantages=found.token_advantages, sequence_advantages=None), spread)
    assert once.flush() == spread.flush() != {}


def test_an_estimator_may_return_numbers_of_any_kind():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    wanted = torch.tensor([1.0, 0.0, 1.0, 1.0])[batch.sequence_ids] * batch.loss_mask
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float64):
        result = AdvantageCalculator(lambda rewards, groups, valid, dtype=dtype: rewards.to(dtype))(batch, Metrics())
        assert result.token_advantages is not None
        assert result.token_advantages.is_floating_point()
        torch.testing.assert_close(result.token_advantages.float(), wanted)


def test_kl_in_the_reward_lowers_the_reward_of_the_sequence_that_strayed():
    batch = batch_with([1.0, 1.0, 0.0, 0.0])
    strayed = (batch.sequence_ids == 0) & batch.loss_mask
    batch = batch.with_tokens(old_logprobs=strayed * 2.0, ref_logprobs=torch.zeros(len(strayed)))
    metrics = Metrics()
    result = AdvantageCalculator(dr_grpo, kl=KLInReward(k1, FixedKLController(0.1)))(batch, metrics)
    penalty = 0.1 * 2.0 * int(strayed.sum())
    assert result.token_advantages is not None
    torch.testing.assert_close(result.token_advantages[strayed], torch.full((int(strayed.sum()),), -penalty / 2))
    assert metrics.flush()["policy/kl_in_reward"] == pytest.approx(2.0 / 4)


def test_kl_in_the_reward_is_paid_on_the_token_that_strayed():
    """Estimators of tokens see it from that token on; undiscounted, the first return is the whole penalised reward."""
    batch = edge_case_batch("failed rows")
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    step = AdvantageCalculator(partial(reinforce_pp, gamma=1.0), kl=KLInReward(k3, FixedKLController(0.1)))
    returns = step(with_garbage(batch, torch.nan), Metrics()).returns
    assert returns is not None and batch.token_rewards is not None
    gaps = batch.old_logprobs - batch.ref_logprobs
    rows = zip(
        select_masked(batch, returns),
        select_masked(batch, batch.token_rewards),
        select_masked(batch, gaps),
        strict=True,
    )
    for found, rewards, of_row in rows:
        paid = [r - 0.1 * (torch.tensor(-d).exp().item() - 1 + d) for r, d in zip(rewards, of_row, strict=True)]
        assert found == pytest.approx([sum(paid[t:]) for t in range(len(paid))], rel=1e-6)


def test_k3_ratio_in_the_reward_corrects_for_the_policy_that_sampled():
    batch = edge_case_batch("regular")
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None and batch.rollout_logprobs is not None
    metrics = Metrics()
    AdvantageCalculator(dr_grpo, kl=KLInReward(k3_ratio, FixedKLController(0.1)))(batch, metrics)
    gap = batch.old_logprobs - batch.ref_logprobs
    kl = (batch.old_logprobs - batch.rollout_logprobs).exp() * ((-gap).exp() - 1 + gap)
    rows = [sum(row) / len(row) for row in select_masked(batch, kl)]
    assert metrics.flush()["policy/kl_in_reward"] == pytest.approx(sum(rows) / len(rows))


def test_batch_normalisation_comes_after_the_estimator_and_leaves_returns_alone():
    batch = edge_case_batch("failed rows")
    estimator = partial(gae, gamma=0.9, lambd=0.8)
    plain = AdvantageCalculator(estimator)(batch, Metrics())
    normalised = AdvantageCalculator(estimator, advantage_batch_normalize=True)(batch, Metrics())
    assert plain.token_advantages is not None
    torch.testing.assert_close(normalised.token_advantages, batch_normalize(plain.token_advantages, batch.loss_mask))
    torch.testing.assert_close(normalised.returns, plain.returns)


def test_metrics_of_advantages_are_over_the_tokens_that_count():
    batch = edge_case_batch("failed rows")
    metrics = Metrics()
    result = AdvantageCalculator(partial(grpo, grpo_norm_by_std=True))(batch, metrics)
    assert result.token_advantages is not None
    chosen = result.token_advantages[batch.loss_mask]
    report = metrics.flush()
    assert report["advantages/mean"] == pytest.approx(chosen.mean().item(), abs=1e-12)
    assert report["advantages/abs_mean"] == pytest.approx(chosen.abs().mean().item())
    assert report["advantages/abs_max"] == pytest.approx(chosen.abs().max().item())
    assert report["advantages/zero_fraction"] == pytest.approx((chosen == 0).double().mean().item())


def test_an_adapted_coefficient_survives_a_resume():
    batch = batch_with([1.0, 0.0, 1.0, 0.0])
    zeros = torch.zeros(len(batch.input_ids))
    batch = batch.with_tokens(old_logprobs=zeros + 1.0, ref_logprobs=zeros)

    def made() -> AdvantageCalculator:
        return AdvantageCalculator(dr_grpo, kl=KLInReward(k1, AdaptiveKLController(0.1, kl_target=0.01, horizon=10)))

    step, resumed = made(), made()
    step(batch, Metrics())
    assert step.state_dict()["kl_coef"] > 0.1
    resumed.load_state_dict(step.state_dict())
    assert resumed.state_dict() == step.state_dict()
    with pytest.raises(ValueError, match="high"):
        resumed.load_state_dict({"kl_coef": "high"})  # type: ignore[dict-item]
