from __future__ import annotations

import pytest
import torch

from skyrl_train.algorithms.kl import (
    MAX_K3,
    AdaptiveKLController,
    FixedKLController,
    abs_kl,
    k1,
    k2,
    k3,
    kl_penalised_rewards,
)

CLOSED_FORMS = {
    "k1": (k1, lambda d: d, lambda d: torch.ones_like(d)),
    "abs": (abs_kl, lambda d: d.abs(), lambda d: d.sign()),
    "k2": (k2, lambda d: d * d / 2, lambda d: d),
    "k3": (k3, lambda d: (-d).exp() - 1 + d, lambda d: 1 - (-d).exp()),
}


@pytest.mark.parametrize("name", CLOSED_FORMS)
def test_value_and_gradient_are_the_closed_form(name):
    estimator, value, derivative = CLOSED_FORMS[name]
    reference = torch.linspace(-4, -0.1, 9, dtype=torch.float64)
    difference = torch.linspace(-2, 3, 9, dtype=torch.float64) + 0.01
    logprobs = (reference + difference).requires_grad_()
    mask = torch.ones(9, dtype=torch.bool)
    estimate = estimator(logprobs, reference, mask)
    torch.testing.assert_close(estimate.detach(), value(difference))
    estimate.sum().backward()
    torch.testing.assert_close(logprobs.grad, derivative(difference))
    assert torch.autograd.gradcheck(lambda x: estimator(x, reference, mask), logprobs)


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("garbage", [torch.nan, -torch.inf])
def test_nothing_outside_the_mask(name, garbage):
    logprobs = torch.tensor([-1.0, garbage], requires_grad=True)
    estimate = CLOSED_FORMS[name][0](logprobs, torch.tensor([-2.0, garbage]), torch.tensor([True, False]))
    estimate.sum().backward()
    assert estimate[1] == 0
    assert logprobs.grad is not None
    assert logprobs.grad[1] == 0
    assert logprobs.grad[0] != 0


def test_k3_averages_to_the_divergence_and_is_never_negative():
    torch.manual_seed(0)
    policy, reference = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    exact = (policy.exp() * (policy - reference)).sum()
    everything = torch.ones(6, dtype=torch.bool)
    torch.testing.assert_close((policy.exp() * k3(policy, reference, everything)).sum(), exact)
    torch.testing.assert_close((policy.exp() * k1(policy, reference, everything)).sum(), exact)
    assert (k3(policy, reference, everything) >= 0).all()


def test_k3_stays_finite_where_the_exponential_would_not():
    logprobs = torch.tensor([-500.0], requires_grad=True)
    estimate = k3(logprobs, torch.tensor([-1.0]), torch.tensor([True]))
    estimate.sum().backward()
    assert estimate.item() == MAX_K3
    assert logprobs.grad is not None
    assert logprobs.grad.item() == 0


def test_kl_in_the_reward_is_summed_over_each_sequences_tokens():
    kl = torch.tensor([0.0, 0.5, 0.25, 0.0, 1.0])
    rewards = kl_penalised_rewards(torch.tensor([1.0, 2.0]), kl, torch.tensor([0, 0, 0, 1, 1]), coef=0.1)
    torch.testing.assert_close(rewards, torch.tensor([1 - 0.075, 2 - 0.1]))


def test_controllers_move_the_coefficient_towards_the_target():
    fixed, adaptive = FixedKLController(0.01), AdaptiveKLController(0.01, target=0.1, horizon=1000)
    fixed.update(5.0, num_sequences=100)
    assert fixed.coef == 0.01
    adaptive.update(5.0, num_sequences=100)  # far above: bounded to +0.2
    assert adaptive.coef == pytest.approx(0.01 * 1.02)
    adaptive.update(0.09, num_sequences=100)
    assert adaptive.coef == pytest.approx(0.01 * 1.02 * (1 - 0.1 * 0.1))
