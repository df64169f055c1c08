from __future__ import annotations

import pytest
import torch

from skyrl_train.algorithms import registry
from skyrl_train.algorithms.kl import MAX_K3, AdaptiveKLController, FixedKLController, k3


def test_k3_stays_finite_where_the_exponential_would_not():
    logprobs = torch.tensor([-500.0, -3.5, -3.7, -0.1], requires_grad=True)
    estimate = k3(logprobs, torch.tensor([-1.0, -1.0, -1.0, -12.0]), torch.ones(4, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    assert (estimate[[0, 2]] == MAX_K3).all()
    assert (gradient == 0).tolist() == [True, False, True, True]


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+", "k3_ratio"])
def test_the_mean_over_samples_is_the_divergence_and_where_promised_so_is_the_gradient(name: str):
    """Over all tokens of a small vocabulary, weighted by the probability under the policy that sampled."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64).requires_grad_()
    reference, older = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    policy_now = logits.log_softmax(-1)
    exact = (policy_now.exp() * (policy_now - reference)).sum()
    (steepest,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampler = older if name == "k3_ratio" else policy_now.detach()
    estimator, mask = registry.kl_estimators.get(name), torch.ones(6, dtype=torch.bool)
    tensors = {"frozen_logprobs": policy_now.detach(), "old_logprobs": older}
    values = estimator(policy_now, reference, mask, **registry.select_keyword_arguments(estimator, tensors))
    mean = (sampler.exp() * values).sum()
    torch.testing.assert_close(mean.detach(), exact.detach())
    (gradient,) = torch.autograd.grad(mean, logits)
    if name in ("k1", "k3"):
        assert (gradient - steepest).abs().max() > 1e-3
    else:
        torch.testing.assert_close(gradient, steepest)


def test_k3_is_never_negative():
    policy, reference = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert (k3(policy, reference, torch.ones(1000, dtype=torch.bool)) >= 0).all()


def test_controllers_move_the_coefficient_towards_the_target():
    fixed, adaptive = FixedKLController(0.01), AdaptiveKLController(0.01, kl_target=0.1, horizon=1000)
    fixed.update(5.0, num_sequences=100)
    assert fixed.coef == 0.01
    adaptive.update(5.0, num_sequences=100)  # far above: bounded to +0.2
    assert adaptive.coef == pytest.approx(0.01 * 1.02)
    adaptive.update(0.09, num_sequences=100)
    assert adaptive.coef == pytest.approx(0.01 * 1.02 * (1 - 0.1 * 0.1))


def test_a_coefficient_keeps_its_sign_however_many_sequences_a_step_has():
    adaptive = AdaptiveKLController(0.01, kl_target=0.1, horizon=1000)
    adaptive.update(0.0, num_sequences=100_000)
    assert adaptive.coef == pytest.approx(0.008)
