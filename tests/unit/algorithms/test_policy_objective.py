from __future__ import annotations

import pickle
from dataclasses import replace
from functools import partial
from math import log

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms import registry
from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.losses import cispo, clipped_surrogate, gspo, importance_sampling
from skyrl_train.algorithms.policy_objective import POLICY_LOSS_TENSORS, PolicyObjective
from skyrl_train.algorithms.reductions import assign_loss_weights, sequence_mean, token_mean
from skyrl_train.algorithms.skyrl_adapters import SkyRLPolicyLoss
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.choices import KL_ESTIMATORS, POLICY_LOSSES
from skyrl_train.data.batch import TrainBatch
from skyrl_train.experiment.algorithm import algorithm_keywords
from skyrl_train.metrics import Metrics
from tests.support.edge_case_batches import current_logprobs, edge_case_batch

FULL = PolicyObjective(
    partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.2), k3, kl_loss_coef=0.3, entropy_loss_coef=0.05
)
SETTINGS = algorithm_keywords(AlgorithmConfig())


def make_weighted_batch(shape: str = "failed rows", seed: int = 0) -> TrainBatch:
    return assign_loss_weights(edge_case_batch(shape, seed), partial(token_mean, max_seq_len=1))


def gradients(objective: PolicyObjective, batch: TrainBatch, metrics: Metrics | None = None) -> tuple[float, Tensor]:
    """Return the loss, and its gradient with respect to the log-probs."""
    logprobs = current_logprobs(edge_case_batch("failed rows"))
    entropy = -logprobs.detach()
    loss = objective(batch, logprobs, entropy, int(batch.loss_mask.sum()), metrics or Metrics())
    return loss.item(), torch.autograd.grad(loss, logprobs)[0]


def test_loss_matches_the_documented_equation():
    batch = make_weighted_batch()
    assert batch.old_logprobs is not None
    batch = batch.with_tokens(importance_weights=batch.old_logprobs.exp() * 5)
    old, ref, advantages, corrections = (
        batch.old_logprobs,
        batch.ref_logprobs,
        batch.advantages,
        batch.importance_weights,
    )
    assert old is not None and ref is not None and advantages is not None and corrections is not None
    logprobs = current_logprobs(batch)
    entropy = torch.rand(len(logprobs), dtype=torch.float64, requires_grad=True)
    loss = FULL(batch, logprobs, entropy, int(batch.loss_mask.sum()), Metrics())
    actual = torch.autograd.grad(loss, (logprobs, entropy))
    mask = batch.loss_mask
    ratio = (logprobs - old)[mask].exp()
    surrogate = torch.minimum(ratio * advantages[mask], ratio.clamp(0.8, 1.2) * advantages[mask])
    log_ratio_to_ref = (ref - logprobs)[mask]
    corrected = corrections[mask] * surrogate
    expected = (-corrected + 0.3 * (log_ratio_to_ref.exp() - log_ratio_to_ref - 1) - 0.05 * entropy[mask]).mean()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(actual, torch.autograd.grad(expected, (logprobs, entropy)))
    torch.testing.assert_close(actual[1], -0.05 * mask.double() / mask.sum())


def test_gradients_match_finite_differences():
    batch = make_weighted_batch()
    entropy = torch.rand(len(batch.input_ids), dtype=torch.float64, requires_grad=True)
    tokens = int(batch.loss_mask.sum())
    inputs = (current_logprobs(batch), entropy)
    assert torch.autograd.gradcheck(lambda x, h: FULL(batch, x, h, tokens, Metrics()), inputs)


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_kl_in_the_loss_has_a_gradient(name: str):
    estimator = registry.kl_estimators.get(name)
    with_kl = gradients(replace(FULL, kl_estimator=estimator), make_weighted_batch())[1]
    without = gradients(replace(FULL, kl_estimator=None), make_weighted_batch())[1]
    difference = (with_kl - without)[make_weighted_batch().loss_mask]
    assert (difference.abs() > 1e-5).all()


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_masked_tokens_have_no_gradient(garbage: float):
    batch = make_weighted_batch()
    is_masked = ~batch.loss_mask
    names = ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages", "importance_weights")
    batch = batch.with_tokens(importance_weights=torch.full_like(batch.advantages, 0.5))  # type: ignore[arg-type]
    with_garbage = batch.with_tokens(**{name: getattr(batch, name).masked_fill(is_masked, garbage) for name in names})
    logprobs = current_logprobs(batch).detach().masked_fill(is_masked, garbage).requires_grad_()
    entropy = logprobs.detach().clone().requires_grad_()
    metrics = Metrics()
    loss = FULL(with_garbage, logprobs, entropy, int(batch.loss_mask.sum()), metrics)
    logprob_gradient, entropy_gradient = torch.autograd.grad(loss, (logprobs, entropy))
    clean = FULL(batch, current_logprobs(batch), current_logprobs(batch), int(batch.loss_mask.sum()), Metrics())
    assert loss.item() == clean.item()
    assert not logprob_gradient[is_masked].any()
    assert not entropy_gradient[is_masked].any()
    assert logprob_gradient[batch.loss_mask].all()
    assert all(abs(value) < 1e3 for value in metrics.flush().values())


def test_stop_gradient_terms_have_no_gradient():
    """Check that CISPO's weight and GSPO's sequence ratio have no gradient, though the policy's log-probs determine
    them.
    """
    batch = make_weighted_batch()
    mask, weights = batch.loss_mask, batch.token_weights
    assert batch.advantages is not None and batch.old_logprobs is not None and weights is not None
    log_ratio = (current_logprobs(batch).detach() - batch.old_logprobs) * mask
    cispo_objective = PolicyObjective(partial(cispo, cispo_eps_clip_low=10.0, cispo_eps_clip_high=10.0))
    expected = -weights * batch.advantages * log_ratio.exp()
    torch.testing.assert_close(gradients(cispo_objective, batch)[1], expected)
    lengths = batch.sum_per_sequence(mask.double()).clamp(min=1)
    ratio = batch.expand_to_tokens(batch.sum_per_sequence(log_ratio) / lengths).exp()
    gspo_objective = PolicyObjective(partial(gspo, eps_clip_low=10.0, eps_clip_high=10.0))
    torch.testing.assert_close(gradients(gspo_objective, batch)[1], -weights * batch.advantages * ratio)


@pytest.mark.parametrize("name", sorted({*POLICY_LOSSES} - {"cross_entropy"}))
def test_on_policy_losses_equal_the_policy_gradient(name: str):
    """At ratio 1, every loss has the gradient of a token's weight times its sequence's advantage."""
    batch = assign_loss_weights(edge_case_batch("failed rows"), partial(sequence_mean, max_seq_len=1))
    loss = registry.bind_settings(registry.policy_losses.get(name), name, SETTINGS, POLICY_LOSS_TENSORS)
    advantages = batch.expand_to_tokens(torch.linspace(-1, 1, len(batch), dtype=torch.float64) + 0.1)
    unselected = torch.zeros_like(batch.loss_mask)
    current = current_logprobs(batch).detach()
    batch = batch.with_tokens(advantages=advantages, rollout_logprobs=current, old_logprobs=None, selected=unselected)
    metrics = Metrics()
    _, gradient = gradients(PolicyObjective(loss), batch, metrics)
    assert batch.token_weights is not None
    torch.testing.assert_close(gradient, -advantages * batch.token_weights)
    report = metrics.flush()
    ratios = {key: value for key, value in report.items() if key.startswith("policy/ratio")}
    needs_old_logprobs = "old_logprobs" in registry.get_keyword_parameters(loss)
    assert ratios == ({"policy/ratio": 1, "policy/ratio_max": 1} if needs_old_logprobs else {})
    assert report["policy/clip_ratio"] == 0


def test_metrics_report_engine_mismatch():
    batch = make_weighted_batch()
    metrics = Metrics()
    loss, _ = gradients(FULL, batch, metrics)
    report = metrics.flush()
    assert batch.rollout_logprobs is not None and batch.old_logprobs is not None
    difference = (batch.old_logprobs - batch.rollout_logprobs)[batch.loss_mask]
    assert report["policy/loss"] == pytest.approx(loss)
    assert report["rollout/logprob_diff"] == pytest.approx(difference.abs().mean().item())
    assert report["rollout/logprob_diff_max"] == pytest.approx(difference.abs().max().item())
    assert (
        report["rollout/kl"]
        == report["mismatch/kl"]
        == pytest.approx((difference.exp() - difference - 1).mean().item())
    )
    assert report["mismatch/ratio_mean"] == pytest.approx(difference.exp().mean().item())
    assert report["mismatch/ratio_max"] == pytest.approx(difference.exp().max().item())
    without_mismatch = Metrics()
    gradients(replace(FULL, report_mismatch=False), batch, without_mismatch)
    assert not [key for key in without_mismatch.flush() if key.startswith("mismatch/")], "the correction reports them"


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_loss_reports_the_engine_ratio(name: str):
    """`trainer.guards.max_ratio` checks both."""
    batch = make_weighted_batch()
    current = current_logprobs(edge_case_batch("failed rows")).detach()
    stray = torch.zeros_like(current)
    stray[batch.loss_mask.nonzero()[0]] = log(1e8)
    batch = batch.with_tokens(rollout_logprobs=current - stray, old_logprobs=None)
    metrics = Metrics()
    loss = registry.bind_settings(registry.policy_losses.get(name), name, SETTINGS, POLICY_LOSS_TENSORS)
    gradients(PolicyObjective(loss), batch, metrics)
    report = metrics.flush()
    assert report["mismatch/ratio_max"] == pytest.approx(1e8)
    assert report.get("policy/ratio_max", 1.0) == 1.0


def custom_loss(log_probs, old_log_probs, advantages, config, loss_mask):  # type: ignore[no-untyped-def]
    return (-log_probs * advantages * loss_mask).sum() / loss_mask.sum(), 0.0


@pytest.mark.parametrize("name", [*POLICY_LOSSES, *KL_ESTIMATORS, "custom_loss"])
def test_objective_survives_pickling(name: str):
    kl = (
        registry.bind_settings(registry.kl_estimators.get(name), name, SETTINGS, POLICY_LOSS_TENSORS)
        if name in KL_ESTIMATORS
        else k3
    )
    loss = SkyRLPolicyLoss(custom_loss, AlgorithmConfig()) if name == "custom_loss" else importance_sampling
    if name in POLICY_LOSSES:
        loss = registry.policy_losses.get(name)  # type: ignore[assignment]
    objective = PolicyObjective(registry.bind_settings(loss, name, SETTINGS, POLICY_LOSS_TENSORS), kl, 0.1)
    unpickled = pickle.loads(pickle.dumps(objective))
    original, copy = gradients(objective, make_weighted_batch()), gradients(unpickled, make_weighted_batch())
    assert original[0] == copy[0]
    assert torch.equal(original[1], copy[1])
    assert unpickled.needs_entropy
