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


def test_sampled_tokens_get_their_sequence_advantage():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    result = AdvantageCalculator(dr_grpo)(batch, Metrics())
    expected = torch.tensor([0.5, -0.5, 0.0, 0.0])[batch.sequence_ids] * batch.loss_mask
    torch.testing.assert_close(result.token_advantages, expected)
    assert result.returns is None
    assert result.advantages is None, "token advantages would waste 4 bytes a token"


def test_previous_advantages_are_replaced():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    token_calculator, sequence_calculator = AdvantageCalculator(reinforce_pp_baseline), AdvantageCalculator(dr_grpo)
    for first, second in ((token_calculator, sequence_calculator), (sequence_calculator, token_calculator)):
        result = second(first(batch, Metrics()), Metrics())
        torch.testing.assert_close(result.token_advantages, second(batch, Metrics()).token_advantages)
        assert (result.advantages is None) is not (result.sequence_advantages is None)


def test_statistics_are_over_tokens():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    from_sequences, from_tokens = Metrics(), Metrics()
    result = AdvantageCalculator(dr_grpo)(batch, from_sequences)
    record_advantage_metrics(replace(result, advantages=result.token_advantages, sequence_advantages=None), from_tokens)
    assert from_sequences.flush() == from_tokens.flush() != {}


def test_estimator_can_return_any_dtype():
    batch = batch_with([1.0, 0.0, 1.0, 1.0])
    expected = torch.tensor([1.0, 0.0, 1.0, 1.0])[batch.sequence_ids] * batch.loss_mask
    for dtype in (torch.bool, torch.int64, torch.bfloat16, torch.float64):
        result = AdvantageCalculator(lambda rewards, groups, valid, dtype=dtype: rewards.to(dtype))(batch, Metrics())
        assert result.token_advantages is not None
        assert result.token_advantages.is_floating_point()
        torch.testing.assert_close(result.token_advantages.float(), expected)


def test_kl_in_reward_lowers_sequence_advantage():
    batch = batch_with([1.0, 1.0, 0.0, 0.0])
    has_kl = (batch.sequence_ids == 0) & batch.loss_mask
    batch = batch.with_tokens(old_logprobs=has_kl * 2.0, ref_logprobs=torch.zeros(len(has_kl)))
    metrics = Metrics()
    result = AdvantageCalculator(dr_grpo, kl=KLInReward(k1, FixedKLController(0.1)))(batch, metrics)
    penalty = 0.1 * 2.0 * int(has_kl.sum())
    assert result.token_advantages is not None
    torch.testing.assert_close(result.token_advantages[has_kl], torch.full((int(has_kl.sum()),), -penalty / 2))
    assert metrics.flush()["policy/kl_in_reward"] == pytest.approx(2.0 / 4)


def test_kl_in_reward_is_charged_per_token():
    """Token estimators see the penalty from its token on. Without discount, the first return is the full penalized
    reward.
    """
    batch = edge_case_batch("failed rows")
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    calculator = AdvantageCalculator(partial(reinforce_pp, gamma=1.0), kl=KLInReward(k3, FixedKLController(0.1)))
    returns = calculator(with_garbage(batch, torch.nan), Metrics()).returns
    assert returns is not None and batch.token_rewards is not None
    log_ratios = batch.old_logprobs - batch.ref_logprobs
    rows = zip(
        select_masked(batch, returns),
        select_masked(batch, batch.token_rewards),
        select_masked(batch, log_ratios),
        strict=True,
    )
    for row_returns, rewards, row_log_ratios in rows:
        penalized = [
            r - 0.1 * (torch.tensor(-d).exp().item() - 1 + d) for r, d in zip(rewards, row_log_ratios, strict=True)
        ]
        assert row_returns == pytest.approx([sum(penalized[t:]) for t in range(len(penalized))], rel=1e-6)


def test_k3_ratio_in_reward_uses_rollout_logprobs():
    batch = edge_case_batch("regular")
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None and batch.rollout_logprobs is not None
    metrics = Metrics()
    AdvantageCalculator(dr_grpo, kl=KLInReward(k3_ratio, FixedKLController(0.1)))(batch, metrics)
    gap = batch.old_logprobs - batch.ref_logprobs
    kl = (batch.old_logprobs - batch.rollout_logprobs).exp() * ((-gap).exp() - 1 + gap)
    rows = [sum(row) / len(row) for row in select_masked(batch, kl)]
    assert metrics.flush()["policy/kl_in_reward"] == pytest.approx(sum(rows) / len(rows))


def test_batch_normalization_keeps_returns():
    batch = edge_case_batch("failed rows")
    estimator = partial(gae, gamma=0.9, lambd=0.8)
    unnormalized = AdvantageCalculator(estimator)(batch, Metrics())
    normalized = AdvantageCalculator(estimator, advantage_batch_normalize=True)(batch, Metrics())
    assert unnormalized.token_advantages is not None
    torch.testing.assert_close(
        normalized.token_advantages, batch_normalize(unnormalized.token_advantages, batch.loss_mask)
    )
    torch.testing.assert_close(normalized.returns, unnormalized.returns)


def test_advantage_metrics_are_over_loss_tokens():
    batch = edge_case_batch("failed rows")
    metrics = Metrics()
    result = AdvantageCalculator(partial(grpo, grpo_norm_by_std=True))(batch, metrics)
    assert result.token_advantages is not None
    token_advantages = result.token_advantages[batch.loss_mask]
    report = metrics.flush()
    assert report["advantages/mean"] == pytest.approx(token_advantages.mean().item(), abs=1e-12)
    assert report["advantages/abs_mean"] == pytest.approx(token_advantages.abs().mean().item())
    assert report["advantages/abs_max"] == pytest.approx(token_advantages.abs().max().item())
    assert report["advantages/zero_fraction"] == pytest.approx((token_advantages == 0).double().mean().item())


def test_kl_coefficient_survives_resuming():
    batch = batch_with([1.0, 0.0, 1.0, 0.0])
    zeros = torch.zeros(len(batch.input_ids))
    batch = batch.with_tokens(old_logprobs=zeros + 1.0, ref_logprobs=zeros)

    def make_calculator() -> AdvantageCalculator:
        return AdvantageCalculator(dr_grpo, kl=KLInReward(k1, AdaptiveKLController(0.1, kl_target=0.01, horizon=10)))

    calculator, resumed = make_calculator(), make_calculator()
    calculator(batch, Metrics())
    assert calculator.state_dict()["kl_coef"] > 0.1
    resumed.load_state_dict(calculator.state_dict())
    assert resumed.state_dict() == calculator.state_dict()
    with pytest.raises(ValueError, match="high"):
        resumed.load_state_dict({"kl_coef": "high"})  # type: ignore[dict-item]
