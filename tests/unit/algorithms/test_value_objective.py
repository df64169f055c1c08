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
    """Return a batch with old values and returns, which are `fill` outside the mask."""
    batch = ragged_batch((9, 4, 12, 2, 7))
    generator = torch.Generator().manual_seed(0)

    def noise() -> torch.Tensor:
        return torch.where(batch.loss_mask, torch.randn(len(batch.input_ids), generator=generator), fill)

    batch = assign_loss_weights(batch, lambda *tensors: token_mean(*tensors, max_seq_len=1))
    return batch.with_tokens(values=noise(), returns=noise())


def current_values(batch: TrainBatch) -> torch.Tensor:
    """Return values of which half differ from the old ones by more than the clip."""
    assert batch.values is not None
    generator = torch.Generator().manual_seed(1)
    return (batch.values + 0.3 * torch.randn(len(batch.input_ids), generator=generator)).detach().requires_grad_()


def test_loss_is_the_larger_of_two_errors() -> None:
    batch = valued_batch()
    values = current_values(batch)
    metrics = Metrics()
    loss = OBJECTIVE(batch, values, None, int(batch.loss_mask.sum()), metrics)
    errors, clipped, value_sum = [], 0, 0.0
    assert batch.values is not None and batch.returns is not None
    for v, old, target, is_loss_token in zip(
        values.tolist(), batch.values.tolist(), batch.returns.tolist(), batch.loss_mask.tolist(), strict=True
    ):
        if is_loss_token:
            bounded = min(max(v, old - 0.2), old + 0.2)
            errors.append(max((v - target) ** 2, (bounded - target) ** 2) / 2)
            clipped += (bounded - target) ** 2 > (v - target) ** 2
            value_sum += v
    expected = sum(errors) / len(errors)
    assert loss.item() == pytest.approx(expected, rel=1e-6)
    report = metrics.flush()
    assert report["critic/loss"] == pytest.approx(expected, rel=1e-6)
    assert report["critic/clip_ratio"] == pytest.approx(clipped / len(errors))
    assert report["critic/value_mean"] == pytest.approx(value_sum / len(errors), rel=1e-5)


def test_infinite_clip_is_the_squared_error() -> None:
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
def test_micro_batches_sum_to_the_mini_batch(size: int) -> None:
    batch = valued_batch()
    tokens = int(batch.loss_mask.sum())
    values = current_values(batch)
    expected_metrics, metrics = Metrics(), Metrics()
    (expected,) = torch.autograd.grad(OBJECTIVE(batch, values, None, tokens, expected_metrics), values)
    loss = torch.zeros((), dtype=torch.float64)
    start = 0
    for micro_batch in batch.split_micro_batches(max_sequences=size):
        stop = start + len(micro_batch.input_ids)
        loss = loss + OBJECTIVE(micro_batch, values[start:stop], None, tokens, metrics)
        start = stop
    (gradient,) = torch.autograd.grad(loss, values)
    torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=0)
    assert metrics.flush() == pytest.approx(expected_metrics.flush(), rel=1e-6)


def test_masked_tokens_are_not_read() -> None:
    batch = valued_batch(fill=math.nan)
    values = current_values(valued_batch())
    loss = OBJECTIVE(batch, values, None, int(batch.loss_mask.sum()), Metrics())
    loss.backward()
    assert values.grad is not None
    assert bool(torch.isfinite(loss))
    assert not values.grad[~batch.loss_mask].any()
    assert values.grad[batch.loss_mask].any()


def test_explained_variance() -> None:
    mask = torch.tensor([False, True, True, True])
    returns = torch.tensor([9.0, 1.0, 2.0, 6.0])
    assert explained_variance(returns, returns, mask) == 1
    assert explained_variance(torch.full((4,), 5.0), returns, mask) == 0
    # Errors 0, 1, 2 have variance 2/3, returns 14/3.
    assert explained_variance(torch.tensor([0.0, 1.0, 1.0, 4.0]), returns, mask) == pytest.approx(1 - 2 / 14)
    assert explained_variance(returns, torch.ones(4), mask) is None
    assert explained_variance(returns, returns, torch.zeros(4, dtype=torch.bool)) is None
