from __future__ import annotations

import pytest
import torch

from skyrl_train.algorithms.losses import clipped_surrogate


def loss_of(log_ratio: float, advantage: float) -> tuple[float, float, float]:
    """Value, whether clipped, and the gradient wrt the log-probability, of one token."""
    old = torch.tensor([-1.5], dtype=torch.float64)
    logprobs = (old + log_ratio).requires_grad_()
    loss, clipped = clipped_surrogate(
        logprobs, old, torch.tensor([advantage]), torch.tensor([True]), eps_low=0.2, eps_high=0.3
    )
    (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    return loss.item(), clipped.item(), gradient.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "clipped", "gradient"),
    [
        (1.0, 2.0, -2.0, 0.0, -2.0),
        (1.5, 2.0, -2.6, 1.0, 0.0),  # better already: bounded by 1 + eps_high
        (0.5, 2.0, -1.0, 0.0, -1.0),  # worse: not bounded
        (0.5, -2.0, 1.6, 1.0, 0.0),  # rarer already: bounded by 1 - eps_low
        (1.5, -2.0, 3.0, 0.0, 3.0),
    ],
)
def test_value_clipping_and_gradient_in_every_regime(ratio, advantage, value, clipped, gradient):
    log_ratio = torch.tensor(ratio, dtype=torch.float64).log().item()
    assert loss_of(log_ratio, advantage) == pytest.approx((value, clipped, gradient))


def test_gradient_matches_finite_differences():
    generator = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(12, generator=generator, dtype=torch.float64) - 0.5
    old = logprobs + 0.4 * torch.randn(12, generator=generator, dtype=torch.float64)
    advantages = torch.randn(12, generator=generator, dtype=torch.float64)
    mask = torch.arange(12) % 4 > 0

    def loss(x: torch.Tensor) -> torch.Tensor:
        return clipped_surrogate(x, old, advantages, mask, eps_low=0.2, eps_high=0.2)[0]

    assert torch.autograd.gradcheck(loss, logprobs.requires_grad_())


@pytest.mark.parametrize("garbage", [torch.nan, -torch.inf, 1e30])
def test_what_is_outside_the_mask_has_no_value_and_no_gradient(garbage):
    logprobs = torch.tensor([-1.0, garbage], requires_grad=True)
    others = torch.tensor([-1.1, garbage])
    loss, clipped = clipped_surrogate(
        logprobs, others, torch.tensor([1.0, garbage]), torch.tensor([True, False]), eps_low=0.2, eps_high=0.2
    )
    loss.sum().backward()
    assert loss[1] == 0
    assert clipped[1] == 0
    assert logprobs.grad is not None
    assert logprobs.grad[1] == 0
    assert logprobs.grad[0] < 0


def test_a_stray_log_ratio_gives_a_finite_loss_and_gradient():
    for log_ratio in (300.0, -300.0):
        for advantage in (1.0, -1.0):
            value, _, gradient = loss_of(log_ratio, advantage)
            assert torch.tensor([value, gradient]).isfinite().all()
