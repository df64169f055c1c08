from __future__ import annotations

import pickle
from functools import partial

import pytest
import torch

from skyrl_train.algorithms.reductions import assign_loss_weights, token_mean
from skyrl_train.algorithms.registry import select_keyword_arguments
from skyrl_train.algorithms.sft import SFTObjective, minor_sft
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics


def make_batch() -> TrainBatch:
    rows = torch.ones(3, dtype=torch.int64)
    return TrainBatch(
        input_ids=torch.arange(9),
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


def test_loss_is_mean_negative_log_likelihood():
    batch = make_batch()
    logprobs = -torch.arange(9, dtype=torch.float64)
    logprobs[~batch.loss_mask] = torch.nan
    logprobs.requires_grad_()
    metrics = Metrics()
    loss = SFTObjective()(assign_loss_weights(batch, partial(token_mean, max_seq_len=1)), logprobs, None, 5, metrics)
    loss.backward()
    assert loss.item() == pytest.approx((1 + 2 + 3 + 5 + 8) / 5)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -batch.loss_mask.double() / 5)
    assert metrics.flush() == {"sft/loss": pytest.approx(loss.item())}


def test_objectives_need_no_entropy_and_survive_pickling():
    for objective in (SFTObjective(), SFTObjective(partial(minor_sft, minor_beta=0.2))):
        unpickled = pickle.loads(pickle.dumps(objective))
        assert unpickled.needs_entropy is False
        assert unpickled.sft_loss(torch.zeros(0), torch.zeros(0).bool(), **loss_arguments(objective)).shape == (0,)


def loss_arguments(objective: SFTObjective) -> dict[str, torch.Tensor]:
    empty = {"ref_logprobs": torch.zeros(0), "sequence_ids": torch.zeros(0).long()}
    return select_keyword_arguments(objective.sft_loss, empty)
