from __future__ import annotations

import pickle

import pytest
import torch

from skyrl_train.algorithms.reductions import Denominators, sequence_mean, token_mean
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics
from skyrl_train.objectives.sft import SFTObjective


def make_batch() -> TrainBatch:
    rows = torch.ones(3, dtype=torch.int64)
    return TrainBatch(
        input_ids=torch.arange(9),
        position_ids=torch.tensor([0, 1, 2, 3, 0, 1, 0, 1, 2]),
        loss_mask=torch.tensor([0, 1, 1, 1, 0, 1, 0, 0, 1], dtype=torch.bool),
        offsets=torch.tensor([0, 4, 6, 9]),
        prompt_lengths=rows,
        group_ids=torch.arange(3),
        rewards=torch.zeros(3),
        temperature=torch.ones(3),
        status=rows.bool(),
        min_versions=rows,
        max_versions=rows,
    )


def test_loss_is_the_mean_negative_log_likelihood_of_the_mask():
    batch = make_batch()
    logprobs = -torch.arange(9, dtype=torch.float64)
    logprobs[~batch.loss_mask] = torch.nan
    logprobs.requires_grad_()
    metrics = Metrics()
    loss = SFTObjective()(batch, logprobs, None, Denominators.of(batch), metrics)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 + 3 + 5 + 8) / 5)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -batch.loss_mask.double() / 5)
    assert metrics.flush() == {"sft/loss": pytest.approx(loss.item())}


@pytest.mark.parametrize("reduction", [token_mean, sequence_mean])
def test_gradient_does_not_depend_on_micro_batches(reduction):
    batch = make_batch()
    objective = SFTObjective(reduction)
    gradients = []
    for size in (1, 2, 3):
        logprobs = torch.full((9,), -1.0, dtype=torch.float64, requires_grad=True)
        for part in batch.split(max_sequences=size):
            objective(part, logprobs[part.input_ids], None, Denominators.of(batch), Metrics()).backward()
        gradients.append(logprobs.grad)
    torch.testing.assert_close(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[1], gradients[2])


def test_it_asks_for_neither_entropy_nor_reference_and_travels():
    objective = pickle.loads(pickle.dumps(SFTObjective()))
    assert objective == SFTObjective()
    assert (objective.wants_entropy, objective.needs_reference) == (False, False)
