from __future__ import annotations

import pytest
import torch

from skyrl_train.algorithms import registry
from skyrl_train.algorithms.kl import MAX_K3, AdaptiveKLController, FixedKLController, k3


def test_k3_stays_finite():
    logprobs = torch.tensor([-500.0, -3.5, -3.7, -0.1], requires_grad=True)
    estimate = k3(logprobs, torch.tensor([-1.0, -1.0, -1.0, -12.0]), torch.ones(4, dtype=torch.bool))
    (gradient,) = torch.autograd.grad(estimate.sum(), logprobs)
    assert (estimate[[0, 2]] == MAX_K3).all()
    assert (gradient == 0).tolist() == [True, False, True, True]


@pytest.mark.parametrize("name", ["k1", "k3", "k1+", "k3+", "k3_ratio"])
def test_mean_and_gradient_estimate_the_divergence(name: str):
    """Average over all tokens of a small vocabulary, weighted by the probability under the policy that sampled."""
    torch.manual_seed(0)
    logits = torch.randn(6, dtype=torch.float64).requires_grad_()
    reference, old_logprobs = torch.randn(2, 6, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    exact = (logprobs.exp() * (logprobs - reference)).sum()
    (exact_gradient,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampler = old_logprobs if name == "k3_ratio" else logprobs.detach()
    estimator, mask = registry.kl_estimators.get(name), torch.ones(6, dtype=torch.bool)
    tensors = {"frozen_logprobs": logprobs.detach(), "old_logprobs": old_logprobs}
    values = estimator(logprobs, reference, mask, **registry.select_keyword_arguments(estimator, tensors))
    mean = (sampler.exp() * values).sum()
    torch.testing.assert_close(mean.detach(), exact.detach())
    (gradient,) = torch.autograd.grad(mean, logits)
    if name in ("k1", "k3"):
        assert (gradient - exact_gradient).abs().max() > 1e-3
    else:
        torch.testing.assert_close(gradient, exact_gradient)


def test_k3_is_never_negative():
    policy, reference = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    assert (k3(policy, reference, torch.ones(1000, dtype=torch.bool)) >= 0).all()


def test_controllers_adapt_the_coefficient():
    fixed, adaptive = FixedKLController(0.01), AdaptiveKLController(0.01, kl_target=0.1, horizon=1000)
    fixed.update(5.0, num_sequences=100)
    assert fixed.coef == 0.01
    adaptive.update(5.0, num_sequences=100)  # far above: bounded to +0.2
    assert adaptive.coef == pytest.approx(0.01 * 1.02)
    adaptive.update(0.09, num_sequences=100)
    assert adaptive.coef == pytest.approx(0.01 * 1.02 * (1 - 0.1 * 0.1))


def test_coefficient_keeps_its_sign():
    adaptive = AdaptiveKLController(0.01, kl_target=0.1, horizon=1000)
    adaptive.update(0.0, num_sequences=100_000)
    assert adaptive.coef == pytest.approx(0.008)
