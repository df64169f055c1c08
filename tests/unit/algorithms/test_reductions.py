from __future__ import annotations

import pickle

import pytest
import torch

from skyrl_train.algorithms.reductions import Denominators, seq_mean_token_sum_norm, sequence_mean, token_mean

MASK = torch.tensor([0, 1, 1, 1, 0, 0, 1, 0, 0], dtype=torch.bool)
OFFSETS = torch.tensor([0, 5, 7, 9])
"""Three sequences with 3, 1 and 0 tokens that count."""
DENOMINATORS = Denominators(tokens=4, sequences=2)
VALUES = torch.arange(9, dtype=torch.float64)


def reduced(reduction, max_seq_len=None) -> float:
    return (VALUES * reduction(MASK, OFFSETS, DENOMINATORS, max_seq_len)).sum().item()


def test_token_mean_is_the_mean_over_tokens():
    assert reduced(token_mean) == pytest.approx((1 + 2 + 3 + 6) / 4)


def test_sequence_mean_is_the_mean_over_sequences_of_their_token_means():
    assert reduced(sequence_mean) == pytest.approx(((1 + 2 + 3) / 3 + 6) / 2)


def test_seq_mean_token_sum_norm_divides_sums_by_a_constant():
    assert reduced(seq_mean_token_sum_norm, 10) == pytest.approx(((1 + 2 + 3) / 10 + 6 / 10) / 2)


@pytest.mark.fault("F12")
@pytest.mark.parametrize("reduction", [token_mean, sequence_mean, seq_mean_token_sum_norm])
def test_everything_masked_weighs_nothing_and_divides_by_nothing(reduction):
    weights = reduction(torch.zeros(9, dtype=torch.bool), OFFSETS, Denominators(0, 0), 10)
    assert weights.tolist() == [0.0] * 9


def test_denominators_travel_and_add_up():
    assert pickle.loads(pickle.dumps(DENOMINATORS)) == DENOMINATORS
    assert DENOMINATORS + Denominators(1, 1) == Denominators(5, 3)
