"""Policy and value losses on both sides of every bound."""

from __future__ import annotations

from math import exp, log

import pytest
import torch

from skyrl_train.algorithms import policy_objective as policy, registry
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.value_objective import clipped_value_loss

SETTINGS = {
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.3,
    "clip_ratio_c": 1.5,
    "cispo_eps_clip_low": 0.25,
    "cispo_eps_clip_high": 0.45,
    "delta_low": 0.02,
    "delta_high": 0.02,
}


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, 0.0, -2.0),
        (1.5, 2.0, -2.6, 1.0, 0.0),  # already more likely: bounded by 1 + eps_clip_high
        (0.5, 2.0, -1.0, 0.0, -1.0),  # less likely: not bounded
        (0.5, -2.0, 1.6, 1.0, 0.0),  # already less likely: bounded by 1 - eps_clip_low
        (1.5, -2.0, 3.0, 0.0, 3.0),
    ],
)
def test_clipped_surrogate_in_every_regime(ratio, advantage, value, clipped, gradient):
    old = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (old + log(ratio)).requires_grad_()
    loss, was_clipped = clipped_surrogate(
        logprobs, torch.tensor([advantage]), torch.tensor([True]), old_logprobs=old, eps_clip_low=0.2, eps_clip_high=0.3
    )
    (slope,) = torch.autograd.grad(loss.sum(), logprobs)
    assert (loss.item(), was_clipped.item(), slope.item()) == pytest.approx((value, clipped, gradient))


KINKS = [
    # loss, the bound on the ratio, sign of the advantage, is the gradient zero (below the bound, above it)
    ("regular", 1.3, 1, (False, True)),
    ("regular", 0.8, -1, (True, False)),
    ("regular", 0.8, 1, (False, False)),
    ("regular", 1.3, -1, (False, False)),
    ("dual_clip", 1.5, -1, (False, True)),
    ("dual_clip", 1.5, 1, (True, True)),
    ("gspo", 1.3, 1, (False, True)),
    ("gspo", 0.8, -1, (True, False)),
    ("gmpo", exp(0.3), 1, (False, True)),
    ("gmpo", exp(-0.2), -1, (True, False)),
    ("cispo", 1.45, 1, (False, False)),
    ("cispo", 0.75, -1, (False, False)),
    ("rollout_is", 1.3, 1, (False, True)),
    ("rollout_is", 0.8, 1, (True, False)),
    ("dppo_tv", 1 + 0.02 / 0.2, 1, (False, True)),
    ("dppo_tv", 1 - 0.02 / 0.2, -1, (True, False)),
    ("dppo_tv", 1 + 0.02 / 0.2, -1, (False, False)),
    ("clip_cov", 1.3, 1, (False, True)),
]


@pytest.mark.parametrize(("name", "bound", "sign", "is_zero"), KINKS)
@pytest.mark.parametrize("side", [0, 1])
def test_clipped_token_is_counted_and_has_no_gradient(name, bound, sign, is_zero, side):
    ones = torch.ones(1, dtype=torch.float64)
    old = log(0.2) * ones
    logprobs = (old + log(bound) + (1e-9 if side else -1e-9)).requires_grad_()
    function = registry.bind_settings(registry.policy_losses.get(name), name, SETTINGS, policy.POLICY_LOSS_TENSORS)
    tensors = {"frozen_logprobs": logprobs.detach(), "rollout_logprobs": old, "sequence_ids": torch.tensor([0])}
    tensors |= {"old_logprobs": old, "selected": torch.tensor([False])}
    loss, clipped = function(
        logprobs, sign * ones, torch.tensor([True]), **registry.select_keyword_arguments(function, tensors)
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    assert (gradient.item() == 0) is is_zero[side]
    if name == "cispo":
        assert bool(clipped) is (side == (bound > 1))
    elif name != "clip_cov":
        assert bool(clipped) is is_zero[side]
    if not is_zero[side]:
        assert gradient.item() * sign < 0  # descent raises the probability of good tokens


def test_value_is_clipped_only_if_loss_increases():
    values = torch.tensor([1.1, 1.3, 1.3, 0.7], dtype=torch.float64, requires_grad=True)
    old, returns = torch.ones(4, dtype=torch.float64), torch.tensor([5.0, 5.0, -5.0, -5.0], dtype=torch.float64)
    loss, clipped = clipped_value_loss(values, old, returns, torch.ones(4, dtype=torch.bool), value_clip=0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert loss.tolist() == pytest.approx([3.9**2 / 2, 3.8**2 / 2, 6.3**2 / 2, 5.8**2 / 2])
    assert clipped.tolist() == [0, 1, 0, 1]
    assert gradient.tolist() == pytest.approx([-3.9, 0, 6.3, 0])
