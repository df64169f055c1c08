"""Compares off-policy corrections with their equations, token by token in plain Python."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import exp, prod
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.corrections import (
    OffPolicyCorrection,
    effective_sample_size,
    sequence_ratios,
    within_bounds,
)
from skyrl_train.algorithms.losses import importance_sampling
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.ratios import importance_ratios
from skyrl_train.algorithms.reductions import assign_loss_weights, token_mean
from skyrl_train.config.algorithm import OffPolicyCorrectionConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics
from tests.support.edge_case_batches import (
    SHAPES,
    as_padded,
    current_logprobs,
    edge_case_batch,
    select_masked,
    with_garbage,
)

Rows = list[list[float]]


def compute_ratios(batch: TrainBatch) -> Rows:
    """Return exp(old - rollout) of every sequence's loss tokens."""
    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    logs = select_masked(batch, batch.old_logprobs - batch.rollout_logprobs)
    return [[exp(x) for x in row] for row in logs]


def geometric_mean(row: list[float]) -> float:
    return prod(row) ** (1 / len(row)) if row else 1.0


def broadcast(rows: Rows, keep: Any) -> Rows:
    """Return keep(row) on all tokens of each sequence."""
    return [[float(keep(row))] * len(row) for row in rows]


CASES: dict[str, tuple[dict[str, Any], Any, Any]] = {
    # settings, mask of kept tokens, weights of tokens
    "token TIS": (
        {"tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
        None,
        lambda rows: [[min(w, 1.2) for w in row] for row in rows],
    ),
    "sequence TIS": (
        {"tis_ratio_type": "sequence", "sequence_tis_ratio_clip_high": 1.1},
        None,
        lambda rows: broadcast(rows, lambda row: min(prod(row), 1.1)),
    ),
    "product mask": (
        {"sequence_mask_metric": "product", "product_mask_low": 0.6, "product_mask_high": 1.8},
        lambda rows: broadcast(rows, lambda row: 0.6 <= prod(row) <= 1.8),
        None,
    ),
    "geometric mask": (
        {"sequence_mask_metric": "geometric", "geo_mask_low": 0.9, "geo_mask_high": 1.1},
        lambda rows: broadcast(rows, lambda row: 0.9 <= geometric_mean(row) <= 1.1),
        None,
    ),
    "outliers": (
        {"outlier_token_is_threshold_low": 0.6, "outlier_token_is_threshold_high": 2.0},
        lambda rows: broadcast(rows, lambda row: all(0.6 <= w <= 2.0 for w in row)),
        None,
    ),
    "outliers above": (
        {"outlier_token_is_threshold_high": 1.6},
        lambda rows: broadcast(rows, lambda row: all(w <= 1.6 for w in row)),
        None,
    ),
    "outliers, though prompts have a ratio of 1": (
        {"outlier_token_is_threshold_low": 1.05},
        lambda rows: broadcast(rows, lambda row: all(w >= 1.05 for w in row)),
        None,
    ),
    "token mask": (
        {"token_mask_eps_low": 0.3, "token_mask_eps_high": 0.5},
        lambda rows: [[float(0.7 <= w <= 1.5) for w in row] for row in rows],
        None,
    ),
    "token mask by the ratio itself": (
        {"token_mask_is_threshold_low": 0.7, "token_mask_is_threshold_high": 1.5},
        lambda rows: [[float(0.7 <= w <= 1.5) for w in row] for row in rows],
        None,
    ),
    "both ways to write a bound": (
        {"token_mask_is_threshold_low": 0.7, "token_mask_eps_low": 0.1, "token_mask_is_threshold_high": 2.0},
        lambda rows: [[float(0.9 <= w <= 2.0) for w in row] for row in rows],
        None,
    ),
    "a mask and TIS": (
        {"token_mask_eps_low": 0.3, "tis_ratio_type": "token", "token_tis_ratio_clip_high": 1.2},
        lambda rows: [[float(w >= 0.7) for w in row] for row in rows],
        lambda rows: [[min(w, 1.2) for w in row] for row in rows],
    ),
}


def apply_correction(batch: TrainBatch, metrics: Metrics | None = None, **settings: Any) -> TrainBatch:
    return OffPolicyCorrection(OffPolicyCorrectionConfig(**settings))(batch, metrics or Metrics())


@pytest.mark.parametrize("name", CASES)
def test_masks_and_weights_match_the_equations(name: str):
    settings, keep, weight = CASES[name]
    has_effect = False
    for seed, shape in enumerate([*SHAPES, *SHAPES]):
        batch = edge_case_batch(shape, seed)
        result = apply_correction(with_garbage(batch, torch.nan), **settings)
        rows = compute_ratios(batch)
        expected_mask = keep(rows) if keep else broadcast(rows, lambda row: 1)
        assert select_masked(batch, result.loss_mask.double()) == expected_mask
        assert not result.loss_mask[~batch.loss_mask].any()
        has_effect |= any(0.0 in row for row in expected_mask) or weight is not None
        if weight is None:
            assert result.importance_weights is None
        else:
            assert result.importance_weights is not None
            for actual, expected in zip(select_masked(batch, result.importance_weights), weight(rows), strict=True):
                assert actual == pytest.approx(expected, rel=1e-10)
    assert has_effect


def test_metrics_are_over_loss_tokens():
    batch = edge_case_batch("failed rows")
    metrics = Metrics()
    apply_correction(with_garbage(batch, torch.nan), metrics, **CASES["token TIS"][0])
    report = metrics.flush()
    rows = compute_ratios(batch)
    flat = [w for row in rows for w in row]
    mean = sum(flat) / len(flat)

    def ess(weights: list[float]) -> float:
        return sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights))

    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    log_ratios = [x for row in select_masked(batch, batch.rollout_logprobs - batch.old_logprobs) for x in row]
    expected = {
        "mismatch/ratio_mean": mean,
        "mismatch/ratio_std": (sum((w - mean) ** 2 for w in flat) / len(flat)) ** 0.5,
        "mismatch/ratio_max": max(flat),
        "mismatch/ratio_min": min(flat),
        "mismatch/kl": sum(exp(-d) - 1 + d for d in log_ratios) / len(log_ratios),
        "mismatch/ess_tokens": ess(flat),
        "mismatch/ess_sequences": ess([prod(row) for row in rows if row]),
        "correction/truncated_tokens": sum(w > 1.2 for w in flat) / len(flat),
    }
    assert report == pytest.approx(expected, rel=1e-9)


def test_effective_sample_size():
    assert float(effective_sample_size(torch.full((7,), 3.0))) == pytest.approx(1.0)
    assert float(effective_sample_size(torch.tensor([0.0, 5.0, 0.0, 0.0]))) == pytest.approx(0.25)
    assert float(effective_sample_size(torch.zeros(0))) == 0.0


def test_on_policy_samples_are_not_corrected():
    batch = edge_case_batch("failed rows")
    batch = batch.with_tokens(rollout_logprobs=batch.old_logprobs)
    around_one = [case for case in CASES.values() if case[0].get("outlier_token_is_threshold_low", 0) < 1]
    for settings, _, weight in around_one:
        result = apply_correction(batch, **settings)
        assert torch.equal(result.loss_mask, batch.loss_mask)
        if weight is not None:
            assert result.importance_weights is not None
            assert (result.importance_weights == 1).all()


def test_unchanged_mask_is_the_same_tensor():
    batch = edge_case_batch("failed rows")
    batch = batch.with_tokens(rollout_logprobs=batch.old_logprobs)
    assert apply_correction(batch, tis_ratio_type="token").loss_mask is batch.loss_mask


def test_missing_logprobs_leave_batch_unchanged():
    batch = edge_case_batch("regular").with_tokens(old_logprobs=None)
    assert apply_correction(batch, **CASES["token TIS"][0]) is batch


def test_outlier_ratios_stay_finite():
    batch = edge_case_batch("regular")
    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    for distance in (500.0, -500.0):
        old_logprobs = batch.old_logprobs + distance
        assert importance_ratios(old_logprobs, batch.rollout_logprobs, batch.loss_mask).isfinite().all()
        assert (
            sequence_ratios(old_logprobs, batch.rollout_logprobs, batch.loss_mask, batch.sequence_ids, len(batch))
            .isfinite()
            .all()
        )


@pytest.mark.parametrize("name", CASES)
def test_corrected_update_ignores_splits_order_and_padding(name: str):
    """Masked tokens and sequences are in no denominator, however the mini-batch is split."""
    objective = PolicyObjective(importance_sampling)
    for shape in SHAPES:
        batch = edge_case_batch(shape)
        logprob_values = current_logprobs(batch).detach()
        order = list(range(len(batch)))[::-1]
        gradients = []
        for variant, size in ((batch, 99), (batch, 1), (batch.select(order), 2), (as_padded(batch, torch.nan), 99)):
            weighted = assign_loss_weights(
                apply_correction(variant, **CASES[name][0]), partial(token_mean, max_seq_len=1)
            )
            logprobs = torch.cat([logprob_values, logprob_values.new_full((1,), torch.nan)]).requires_grad_()
            for micro_batch in weighted.split_micro_batches(max_sequences=size):
                objective(
                    micro_batch, logprobs[micro_batch.input_ids], None, int(weighted.loss_mask.sum()), Metrics()
                ).backward()
            gradients.append(logprobs.grad)
        for gradient in gradients[1:]:
            torch.testing.assert_close(gradient, gradients[0], rtol=1e-12, atol=1e-14)


def test_masked_sequence_is_like_a_missing_one():
    batch = edge_case_batch("regular")
    settings = CASES["product mask"][0]
    corrected = apply_correction(batch, **settings)
    rows = (corrected.sum_per_sequence(corrected.loss_mask.long()) > 0).nonzero().flatten()
    assert 0 < len(rows) < len(batch)
    masked = assign_loss_weights(corrected, partial(token_mean, max_seq_len=1)).select(rows)
    selected = assign_loss_weights(replace(batch).select(rows), partial(token_mean, max_seq_len=1))
    torch.testing.assert_close(masked.token_weights, selected.token_weights, rtol=1e-15, atol=0)


def test_correction_bounds_are_inclusive():
    ratios = torch.tensor([0.25, 0.5, 1.0, 2.0, 4.0])
    assert within_bounds(ratios, 0.5, 2.0).tolist() == [False, True, True, True, False]
