from __future__ import annotations

import pytest
import torch

from skyrl_train.algorithms.advantages import batch_normalised, grpo


def every(count: int) -> torch.Tensor:
    return torch.ones(count, dtype=torch.bool)


def test_grpo_is_the_distance_from_the_groups_mean_over_its_unbiased_std():
    rewards = torch.tensor([1.0, 0.0, 0.0, 4.0, 2.0])
    groups = torch.tensor([7, 7, 7, 3, 3])
    first, second = rewards[:3], rewards[3:]
    expected = torch.cat([(part - part.mean()) / (part.std() + 1e-6) for part in (first, second)])
    torch.testing.assert_close(grpo(rewards, groups, every(5), norm_by_std=True), expected)
    expected = torch.cat([first - first.mean(), second - second.mean()])
    torch.testing.assert_close(grpo(rewards, groups, every(5), norm_by_std=False), expected)


def test_grpo_does_not_depend_on_the_order_of_rows():
    generator = torch.Generator().manual_seed(0)
    rewards, groups = torch.randn(20, generator=generator), torch.arange(20) % 4
    order = torch.randperm(20, generator=generator)
    straight = grpo(rewards, groups, every(20), norm_by_std=True)
    torch.testing.assert_close(grpo(rewards[order], groups[order], every(20), norm_by_std=True), straight[order])


@pytest.mark.fault("F12")
@pytest.mark.parametrize("norm_by_std", [True, False])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3, -7.7])
def test_equal_rewards_give_exactly_zero(reward, norm_by_std):
    advantages = grpo(torch.full((7,), reward), torch.zeros(7, dtype=torch.int64), every(7), norm_by_std=norm_by_std)
    assert advantages.tolist() == [0.0] * 7


@pytest.mark.fault("F12")
@pytest.mark.parametrize("norm_by_std", [True, False])
def test_a_group_with_one_valid_row_or_none_gives_zero_and_no_nan(norm_by_std):
    rewards = torch.tensor([5.0, 1.0, 9.0, 9.0, 2.0])
    groups = torch.tensor([0, 0, 1, 1, 2])
    valid = torch.tensor([True, False, False, False, True])
    assert grpo(rewards, groups, valid, norm_by_std=norm_by_std).tolist() == [0.0] * 5


def test_failed_rows_do_not_move_the_advantages_of_others_whatever_their_reward():
    rewards = torch.tensor([1.0, 0.0, torch.nan, 1e9])
    valid = torch.tensor([True, True, False, False])
    advantages = grpo(rewards, torch.zeros(4, dtype=torch.int64), valid, norm_by_std=True)
    torch.testing.assert_close(advantages[:2], grpo(rewards[:2], torch.zeros(2).long(), every(2), norm_by_std=True))
    assert advantages[2:].tolist() == [0.0, 0.0]


def test_batch_normalised_has_mean_zero_and_variance_one_over_the_mask():
    generator = torch.Generator().manual_seed(1)
    advantages = torch.randn(50, generator=generator) * 3 + 2
    mask = torch.rand(50, generator=generator) > 0.4
    advantages[~mask] = torch.nan
    normalised = batch_normalised(advantages, mask)
    torch.testing.assert_close(normalised[mask].mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(normalised[mask].var(correction=0), torch.tensor(1.0))
    assert (normalised[~mask] == 0).all()
    assert batch_normalised(torch.full((3,), 2.0), torch.zeros(3, dtype=torch.bool)).tolist() == [0.0] * 3
