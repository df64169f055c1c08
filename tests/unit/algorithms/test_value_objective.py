from __future__ import annotations

import math

import pytest
import torch

from skyrl_train.algorithms.reductions import assign_loss_weights, token_mean
from skyrl_train.algorithms.value_objective import ValueObjective, explained_variance
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics
from tests.support.padded_reference import ragged_batch

OBJECTIVE = ValueObjective(value_clip=0.2)


def valued_batch(fill: float = 0.0) -> TrainBatch:
    """Old values and returns, `fill` outside the mask."""
    batch = ragged_batch((9, 4, 12, 2, 7))
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.where(batch.loss_mask, torch.randn(len(batch.input_ids), generator=generator), fill)

    batch = assign_loss_weights(batch, lambda *tensors: token_mean(*tensors, max_seq_len=1))
    return batch.with_tokens(values=noise(), returns=noise())


def current_values(batch: TrainBatch) -> torch.Tensor:
    """Half of them further from the old ones than the clip allows."""
    assert batch.values is not None
    generator = torch.Generator().manual_seed(1)
    return (batch.values + 0.3 * torch.randn(len(batch.input_ids), generator=generator)).detach().requires_grad_()


def test_the_loss_is_the_mean_of_the_worse_of_two_squared_errors() -> None:
    batch = valued_batch()
    values = current_values(batch)
    metrics = Metrics()
    loss = OBJECTIVE(batch, values, None, int(batch.loss_mask.sum()), metrics)
    errors, clipped, now = [], 0, 0.0
    assert batch.values is not None and batch.returns is not None
    for v, old, target, counts in zip(
        values.tolist(), batch.values.tolist(), batch.returns.tolist(), batch.loss_mask.tolist(), strict=True
    ):
        if counts:
            bounded = min(max(v, old - 0.2), old + 0.2)
            errors.append(max((v - target) ** 2, (bounded - target) ** 2) / 2)
            clipped += (bounded - target) ** 2 > (v - target) ** 2
            now += v
    expected = sum(errors) / len(errors)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    found = metrics.flush()
    assert found["critic/loss"] == pytest.approx(expected, rel=1e-6)
    assert found["critic/clip_ratio"] == pytest.approx(clipped / len(errors))
    assert found["critic/value_mean"] == pytest.approx(now / len(errors), rel=1e-5)


def test_without_a_clip_the_loss_is_the_squared_error_however_far_values_moved() -> None:
    batch = valued_batch()
    values = current_values(batch)
    metrics = Metrics()
    loss = ValueObjective(math.inf)(batch, values, None, int(batch.loss_mask.sum()), metrics)
    assert batch.returns is not None
    errors = (values - batch.returns)[batch.loss_mask].detach()
    assert loss.item() == pytest.approx(float(errors.square().mean() / 2), rel=1e-6)
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient[batch.loss_mask], errors / len(errors))
    assert metrics.flush()["critic/clip_ratio"] == 0


@pytest.mark.parametrize("size", [1, 2, 5])
def test_losses_gradients_and_metrics_of_micro_batches_add_up_to_those_of_the_mini_batch(size: int) -> None:
    batch = valued_batch()
    tokens = int(batch.loss_mask.sum())
    values = current_values(batch)
    whole, parts = Metrics(), Metrics()
    (expected,) = torch.autograd.grad(OBJECTIVE(batch, values, None, tokens, whole), values)
    loss = torch.zeros((), dtype=torch.float64)
    start = 0
    for micro_batch in batch.split_micro_batches(max_sequences=size):
        stop = start + len(micro_batch.input_ids)
        loss = loss + OBJECTIVE(micro_batch, values[start:stop], None, tokens, parts)
        start = stop
    (found,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert parts.flush() == pytest.approx(whole.flush(), rel=1e-6)


def test_nothing_outside_the_mask_is_read_or_moved() -> None:
    batch = valued_batch(fill=math.nan)
    values = current_values(valued_batch())
    loss = OBJECTIVE(batch, values, None, int(batch.loss_mask.sum()), Metrics())
    loss.backward()
    assert values.grad is not None
    assert bool(torch.isfinite(loss))
    assert not values.grad[~batch.loss_mask].any()
    assert values.grad[batch.loss_mask].any()


def test_explained_variance_is_1_for_the_returns_themselves_0_for_a_constant_and_nothing_without_variance() -> None:
    mask = torch.tensor([False, True, True, True])
    returns = torch.tensor([9.0, 1.0, 2.0, 6.0])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((4,), 5.0), returns, mask) == 0
    # Errors 0, 1, 2 have variance 2/3, returns 14/3.
    assert explained_variance(torch.tensor([0.0, 1.0, 1.0, 4.0]), returns, mask) == pytest.approx(1 - 2 / 14)
    assert explained_variance(returns, torch.ones(4), mask) is None
    assert explained_variance(returns, returns, torch.zeros(4, dtype=torch.bool)) is None
