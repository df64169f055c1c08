"""One table for every term of a loss: splitting, ordering, sharding and padding a mini-batch change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms import policy_objective as policy, registry, sft
from skyrl_train.algorithms.losses import cross_entropy
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.reductions import assign_loss_weights
from skyrl_train.algorithms.sft import SFTObjective
from skyrl_train.algorithms.skyrl_adapters import SkyRLPolicyLoss
from skyrl_train.algorithms.token_selection import get_token_selector
from skyrl_train.algorithms.value_objective import ValueObjective
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.choices import KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS, SFT_LOSSES
from skyrl_train.data.batch import TrainBatch
from skyrl_train.experiment.algorithm import algorithm_keywords
from skyrl_train.metrics import Metrics
from tests.support.edge_case_batches import SHAPES, as_padded, current_logprobs, edge_case_batch
from tests.support.table_cases import check_each

CONFIG = AlgorithmConfig()
CONFIG.clip_cov.clip_ratio, CONFIG.clip_cov.clip_cov_lb = 0.3, 0.0
CONFIG.dppo.tv_threshold, CONFIG.dppo.kl_threshold = 0.02, 0.004
SETTINGS = algorithm_keywords(CONFIG)
INVARIANT = sorted(REDUCTIONS.keys() - {"token_mean_legacy"})
"""Reductions that do not depend on the order of sequences."""
Objective = Callable[[TrainBatch, Tensor, Tensor, int, Metrics], Tensor]


def skyrl_token_mean(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs=None):  # type: ignore[no-untyped-def]
    """Compute a loss as SkyRL's users write it: padded tensors, and the mean over the micro-batch's tokens."""
    ratio = (log_probs - old_log_probs).exp()
    bounded = ratio.clamp(1 - config.eps_clip_low, 1 + config.eps_clip_high)
    loss = -torch.min(ratio * advantages, bounded * advantages)
    loss = torch.where(loss_mask > 0, loss, 0.0)
    return loss.sum() / loss_mask.sum(), {"clip_ratio": 0.25}


def skyrl_sequence_mean(log_probs, old_log_probs, advantages, config, loss_mask):  # type: ignore[no-untyped-def]
    values = torch.where(loss_mask > 0, -log_probs * advantages, 0.0)
    counted = loss_mask.sum(-1) > 0
    return (values.sum(-1) / loss_mask.sum(-1).clamp(min=1))[counted].mean(), 0.0


def policy_objective(name: str) -> PolicyObjective:
    return PolicyObjective(
        registry.bind_settings(registry.policy_losses.get(name), name, SETTINGS, policy.POLICY_LOSS_TENSORS)
    )


def kl_objective(name: str) -> PolicyObjective:
    bound = registry.bind_settings(registry.kl_estimators.get(name), name, SETTINGS, policy.POLICY_LOSS_TENSORS)
    return PolicyObjective(cross_entropy, bound, kl_loss_coef=0.3, entropy_loss_coef=0.05)


def sft_objective(name: str) -> SFTObjective:
    return SFTObjective(registry.bind_settings(registry.sft_losses.get(name), name, SETTINGS, sft.SFT_LOSS_TENSORS))


OBJECTIVES: dict[str, Objective] = {
    **{name: policy_objective(name) for name in POLICY_LOSSES},
    **{f"KL {name}": kl_objective(name) for name in KL_ESTIMATORS},
    **{name: sft_objective(name) for name in SFT_LOSSES},
    "value": ValueObjective(value_clip=0.2),
    "skyrl_token_mean": PolicyObjective(partial(SkyRLPolicyLoss(skyrl_token_mean, CONFIG))),
    "skyrl_sequence_mean": PolicyObjective(partial(SkyRLPolicyLoss(skyrl_sequence_mean, CONFIG))),
}
MATCHING_REDUCTIONS = {"skyrl_token_mean": ["token_mean"], "skyrl_sequence_mean": ["sequence_mean"]}
"""A loss that computes its own mean needs the reduction of that name."""


@dataclass
class Measured:
    """Loss of a mini-batch, and its gradients with respect to log-probs and entropy."""

    loss: float
    logprob_gradient: Tensor
    entropy_gradient: Tensor | None
    metrics: dict[str, float]


def measure(objective: Objective, micro_batches: list[TrainBatch], mini_batch: TrainBatch) -> Measured:
    """Measure a mini-batch that is split into `parts`.

    `input_ids` are the indices of tokens in `whole`; -1 is padding.
    """
    logprob_values = current_logprobs(mini_batch).detach()
    padding = logprob_values.new_full((1,), torch.nan)
    logprobs = torch.cat([logprob_values, padding]).requires_grad_()
    entropy = torch.cat([-logprob_values, padding]).requires_grad_()
    tokens, total, metrics = int(mini_batch.loss_mask.sum()), 0.0, Metrics()
    for micro_batch in micro_batches:
        loss = objective(micro_batch, logprobs[micro_batch.input_ids], entropy[micro_batch.input_ids], tokens, metrics)
        loss.backward()
        total += loss.item()
    assert logprobs.grad is not None
    return Measured(total, logprobs.grad, entropy.grad, metrics.flush())


def prepare(name: str, batch: TrainBatch, full_batch: TrainBatch, reduction: Callable[..., Tensor]) -> TrainBatch:
    """Prepare a mini-batch as the driver does before it is split: weights, and the token selection of the loss."""
    batch = assign_loss_weights(batch, reduction)
    select = get_token_selector(registry.policy_losses.get(name)) if name in POLICY_LOSSES else None
    if select is None:
        return batch
    scores = torch.cat([current_logprobs(full_batch).detach(), torch.full((1,), torch.nan)])[batch.input_ids]
    bound = registry.bind_settings(select, name, SETTINGS, frozenset())
    return batch.with_tokens(selected=bound(scores, batch.old_logprobs, batch.advantages, batch.loss_mask))


def split_variants(
    name: str, batch: TrainBatch, reduction: Callable[..., Tensor]
) -> Iterator[tuple[str, list[TrainBatch]]]:
    """Yield the same mini-batch in several splits, each with a name."""
    prepared = prepare(name, batch, batch, reduction)
    yield "one by one", prepared.split_micro_batches(max_sequences=1)
    yield "by tokens", prepared.split_micro_batches(token_budget=16)
    ranks = [prepared.select(rows) for rows in prepared.partition(2)]
    yield "two ranks", [micro_batch for rank in ranks for micro_batch in rank.split_micro_batches(max_sequences=2)]
    order = random.Random(0).sample(range(len(batch)), len(batch))
    yield "another order", prepare(name, batch.select(order), batch, reduction).split_micro_batches(max_sequences=3)
    yield "padded", [prepare(name, as_padded(batch, torch.nan), batch, reduction)]
    yield (
        "padded, one by one",
        prepare(name, as_padded(batch, torch.inf), batch, reduction).split_micro_batches(max_sequences=1),
    )


@pytest.mark.parametrize("name", OBJECTIVES)
def test_loss_ignores_splits_order_and_padding(name: str):
    objective = OBJECTIVES[name]
    for reduction_name in MATCHING_REDUCTIONS.get(name, INVARIANT):
        reduction = partial(registry.reductions.get(reduction_name), max_seq_len=16)
        for shape in SHAPES:
            batch = edge_case_batch(shape)
            expected = measure(objective, [prepare(name, batch, batch, reduction)], batch)
            assert torch.isfinite(expected.logprob_gradient).all()
            assert (expected.logprob_gradient[:-1][~batch.loss_mask] == 0).all()
            for split, parts in split_variants(name, batch, reduction):
                actual = measure(objective, parts, batch)
                message = f"{reduction_name}, {shape}, {split}"
                assert actual.loss == pytest.approx(expected.loss, rel=1e-12, abs=1e-13), message
                for actual_gradient, expected_gradient in (
                    (actual.logprob_gradient, expected.logprob_gradient),
                    (actual.entropy_gradient, expected.entropy_gradient),
                ):
                    torch.testing.assert_close(actual_gradient, expected_gradient, rtol=1e-12, atol=1e-14, msg=message)
                assert actual.metrics == pytest.approx(expected.metrics, rel=1e-9), message


def test_objectives_have_gradients_on_loss_tokens():
    """Check that the test above does not compare zeros."""
    reduction = partial(registry.reductions.get("token_mean"), max_seq_len=16)

    def has_gradient(name: str) -> None:
        for shape in SHAPES:
            batch = edge_case_batch(shape)
            gradient = measure(OBJECTIVES[name], [prepare(name, batch, batch, reduction)], batch).logprob_gradient
            assert bool(gradient.abs().max() > 1e-3) is bool(batch.loss_mask.any()), shape

    check_each(sorted({*OBJECTIVES} - {"cross_entropy", "sft"}), has_gradient)


@pytest.mark.fault("F12")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_mini_batch_without_loss_tokens_is_zero(name: str):
    batch = edge_case_batch("nothing counts")
    for reduction in INVARIANT:
        bound = partial(registry.reductions.get(reduction), max_seq_len=16)
        result = measure(OBJECTIVES[name], [prepare(name, batch, batch, bound)], batch)
        assert (result.loss, result.metrics) == (0, {}) or name in SFT_LOSSES
        assert (result.logprob_gradient == 0).all()
