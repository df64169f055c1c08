from __future__ import annotations

import pickle
from itertools import chain

import pytest
import torch

from skyrl_train.algorithms import registry
from skyrl_train.algorithms.reductions import assign_loss_weights
from skyrl_train.config.choices import REDUCTIONS
from skyrl_train.data.batch import TrainBatch
from tests.support.edge_case_batches import SHAPES, edge_case_batch, select_masked

MAX_SEQ_LEN, MICRO_BATCH_SIZE = 10, 2
SETTINGS = {"max_seq_len": MAX_SEQ_LEN, "micro_train_batch_size_per_gpu": MICRO_BATCH_SIZE}


def mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def reference_loss(name: str, batch: TrainBatch, per_token: torch.Tensor) -> float:
    sequences = select_masked(batch, per_token)
    groups: dict[int, list[float]] = {}
    for group, values in zip(batch.group_ids.tolist(), sequences, strict=True):
        groups.setdefault(group, []).extend(values)
    nonempty = [values for values in sequences if values]
    return {
        "token_mean": mean([x for values in nonempty for x in values]),
        "token_mean_legacy": mean(
            [
                mean([*chain(*nonempty[first : first + MICRO_BATCH_SIZE])])
                for first in range(0, len(nonempty), MICRO_BATCH_SIZE)
            ]
        ),
        "sequence_mean": mean([mean(values) for values in nonempty]),
        "seq_mean_token_sum_norm": mean([sum(values) / MAX_SEQ_LEN for values in nonempty]),
        "prompt_mean": mean([mean(values) for values in groups.values() if values]),
    }[name]


def compute_weights(name: str, batch: TrainBatch) -> torch.Tensor:
    bound = registry.bind_settings(registry.reductions.get(name), name, SETTINGS, frozenset())
    weights = assign_loss_weights(batch, bound).token_weights
    assert weights is not None
    return weights


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reduction_is_the_mean_of_its_name(name: str):
    for shape in SHAPES:
        batch = edge_case_batch(shape)
        weights = compute_weights(name, batch)
        values = torch.randn(len(weights), generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        assert (weights * values).sum().item() == pytest.approx(reference_loss(name, batch, values), rel=1e-12)
        assert (weights[~batch.loss_mask] == 0).all()


@pytest.mark.parametrize("name", REDUCTIONS)
def test_sequence_weights_expand_to_tokens(name: str):
    for shape in SHAPES:
        batch = edge_case_batch(shape)
        reduction = registry.reductions.get(name)
        bound = registry.bind_settings(reduction, name, SETTINGS, frozenset())
        weighted = assign_loss_weights(batch, bound)
        assert weighted.loss_weights is None
        ids = batch.episodes.token_to_episode, batch.expand_to_tokens(batch.group_ids)
        called = bound(batch.loss_mask, *ids)
        assert weighted.token_weights is not None
        assert torch.equal(weighted.token_weights, called)
        assert pickle.loads(pickle.dumps(reduction)) is reduction


def test_custom_reduction_can_weight_each_token():
    batch = edge_case_batch("failed rows")

    def first_half(mask: torch.Tensor, sequence_ids: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
        return mask.double() * (torch.arange(len(mask)) < len(mask) // 2)

    weighted = assign_loss_weights(batch, first_half)
    assert weighted.sequence_weights is None
    assert weighted.token_weights is not None
    assert torch.equal(weighted.token_weights, first_half(batch.loss_mask, batch.loss_mask, batch.loss_mask))


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", REDUCTIONS)
def test_weights_are_zero_without_loss_tokens(name: str):
    assert not compute_weights(name, edge_case_batch("nothing counts")).any()


def test_failed_sample_does_not_change_other_weights():
    batch = edge_case_batch("failed rows")
    valid_rows = batch.status.nonzero().flatten()
    for name in REDUCTIONS:
        weights = compute_weights(name, batch)
        expected = compute_weights(name, batch.select(valid_rows))
        torch.testing.assert_close(weights[batch.expand_to_tokens(batch.status)], expected, rtol=1e-15, atol=0)
