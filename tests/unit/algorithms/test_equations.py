"""Compares every per-token term of a loss with its paper: value and gradient in plain Python, token by token."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import exp, inf, log
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms import policy_objective as policy, registry
from skyrl_train.algorithms.losses import cispo_rollout
from skyrl_train.algorithms.value_objective import clipped_value_loss
from skyrl_train.data.batch import TrainBatch
from tests.support.edge_case_batches import SHAPES, current_logprobs, edge_case_batch, select_masked, with_garbage

SETTINGS = {
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.3,
    "clip_ratio_c": 1.5,
    "cispo_eps_clip_low": 0.25,
    "cispo_eps_clip_high": 0.45,
    "tau_pos": 1.1,
    "tau_neg": 1.7,
    "delta_low": 0.015,
    "delta_high": 0.025,
    "kl_threshold": 0.004,
    "ppo_kl_coef": 0.7,
    "minor_beta": 0.3,
}
settings = SimpleNamespace(**SETTINGS)
Reference = Callable[[list[SimpleNamespace], list[float]], tuple[list[float], list[float]]]
"""Maps (loss tokens of one sequence, their weights) to (values, gradient of the weighted sum wrt log-probs)."""


def per_token(equation: Callable[[SimpleNamespace], tuple[float, float]]) -> Reference:
    """Return a reference from the equation of a single token, with its derivative."""

    def of_sequence(tokens: list[SimpleNamespace], weights: list[float]) -> tuple[list[float], list[float]]:
        pairs = [equation(token) for token in tokens]
        return [value for value, _ in pairs], [w * slope for w, (_, slope) in zip(weights, pairs, strict=True)]

    return of_sequence


def surrogate(ratio: float, advantage: float) -> tuple[float, float]:
    """Evaluate PPO, eq. 7: it is pessimistic, so only a move that is already rewarded is bounded."""
    if advantage > 0 and ratio > 1 + settings.eps_clip_high:
        return -(1 + settings.eps_clip_high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - settings.eps_clip_low:
        return -(1 - settings.eps_clip_low) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def dual_clip(t: SimpleNamespace) -> tuple[float, float]:
    if t.adv < 0 and t.r > settings.clip_ratio_c:
        return -settings.clip_ratio_c * t.adv, 0.0
    return surrogate(t.r, t.adv)


def gspo(tokens: list[SimpleNamespace], weights: list[float]) -> tuple[list[float], list[float]]:
    s = exp(sum(t.lp - t.old for t in tokens) / max(len(tokens), 1))
    return per_token(lambda t: surrogate(s, t.adv))(tokens, weights)


def gmpo(tokens: list[SimpleNamespace], weights: list[float]) -> tuple[list[float], list[float]]:
    logs, free = [], []
    for t in tokens:
        x = t.lp - t.old
        bounded = min(x, settings.eps_clip_high) if t.adv > 0 else max(x, -settings.eps_clip_low)
        logs.append(bounded)
        free.append(bounded == x)
    n = max(len(tokens), 1)
    value = -sum(t.adv for t in tokens) / n * exp(sum(logs) / n)
    return [value] * len(tokens), [sum(weights) * value / n if is_free else 0.0 for is_free in free]


def cispo(t: SimpleNamespace, ratio: float) -> tuple[float, float]:
    weight = min(max(ratio, 1 - settings.cispo_eps_clip_low), 1 + settings.cispo_eps_clip_high)
    return -weight * t.adv * t.lp, -weight * t.adv


def rollout_is(t: SimpleNamespace) -> tuple[float, float]:
    weight = t.u if 1 - settings.eps_clip_low < t.u < 1 + settings.eps_clip_high else 0.0
    return -weight * t.adv * t.lp, -weight * t.adv


def sapo(t: SimpleNamespace) -> tuple[float, float]:
    tau = settings.tau_pos if t.adv > 0 else settings.tau_neg
    gate = 1 / (1 + exp(-tau * (t.r - 1)))
    return -4 / tau * gate * t.adv, -4 * gate * (1 - gate) * t.r * t.adv


def inside_trust_region(t: SimpleNamespace, is_far: bool) -> tuple[float, float]:
    if is_far and ((t.adv > 0 and t.u > 1) or (t.adv < 0 and t.u < 1)):
        return 0.0, 0.0
    return -t.u * t.adv, -t.u * t.adv


def dppo_kl(t: SimpleNamespace) -> tuple[float, float]:
    p, q = exp(t.lp), exp(t.rollout)
    return inside_trust_region(t, q * log(q / p) + (1 - q) * log((1 - q) / (1 - p)) > settings.kl_threshold)


def kl_cov(t: SimpleNamespace) -> tuple[float, float]:
    x = t.lp - t.old
    sign = 1 if x > 0 else -1
    extra = settings.ppo_kl_coef if t.selected else 0.0
    return -t.r * t.adv + extra * abs(x), -t.r * t.adv + extra * sign


def value_loss(t: SimpleNamespace, clip: float) -> tuple[float, float]:
    """Evaluate the value loss.

    Log-probs stand for values, old log-probs for old values, and the reference's for returns.
    """
    bounded = min(max(t.lp, t.old - clip), t.old + clip)
    unclipped, clipped = (t.lp - t.ref) ** 2, (bounded - t.ref) ** 2
    return max(unclipped, clipped) / 2, t.lp - t.ref if unclipped >= clipped else 0.0


def minor_sft(tokens: list[SimpleNamespace], weights: list[float]) -> tuple[list[float], list[float]]:
    margin = settings.minor_beta * sum(t.lp - t.ref for t in tokens)
    slope = -settings.minor_beta / (1 + exp(margin))
    return [log(1 + exp(-margin))] * len(tokens), [sum(weights) * slope] * len(tokens)


POLICY: dict[str, Reference] = {
    "regular": per_token(lambda t: surrogate(t.r, t.adv)),
    "dual_clip": per_token(dual_clip),
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": per_token(lambda t: cispo(t, t.r)),
    "rollout_is": per_token(rollout_is),
    "importance_sampling": per_token(lambda t: (-t.r * t.adv, -t.r * t.adv)),
    "cross_entropy": per_token(lambda t: (-t.lp, -1.0)),
    "sapo": per_token(sapo),
    "dppo_tv": per_token(
        lambda t: inside_trust_region(t, not -settings.delta_low <= exp(t.lp) - exp(t.rollout) <= settings.delta_high)
    ),
    "dppo_kl": per_token(dppo_kl),
    "clip_cov": per_token(lambda t: (0.0, 0.0) if t.selected else surrogate(t.r, t.adv)),
    "kl_cov": per_token(kl_cov),
}
KL: dict[str, Reference] = {
    "k1": per_token(lambda t: (t.d, 1.0)),
    "abs": per_token(lambda t: (abs(t.d), 1.0 if t.d > 0 else -1.0)),
    "k2": per_token(lambda t: (t.d**2 / 2, t.d)),
    "k3": per_token(lambda t: (t.k3, 1 - exp(-t.d))),
    "k1+": per_token(lambda t: (t.d, t.d)),
    "k3+": per_token(lambda t: (t.k3, t.d)),
    "k3_ratio": per_token(lambda t: (t.r * t.k3, t.r * (t.k3 + 1 - exp(-t.d)))),
}
SFT: dict[str, Reference] = {"sft": per_token(lambda t: (-t.lp, -1.0)), "minor_sft": minor_sft}
ANCHORED: dict[str, Reference] = {"cispo_rollout": per_token(lambda t: cispo(t, t.u))}
"""The loss of a key's value: `cispo.cispo_anchor: rollout`."""
VALUE_CLIPS = {"value": 0.2, "value, not clipped": inf}
VALUE = {name: per_token(partial(value_loss, clip=clip)) for name, clip in VALUE_CLIPS.items()}
ALL = {**POLICY, **ANCHORED, **KL, **SFT, **VALUE}


def compute_losses(name: str, batch: TrainBatch, logprobs: Tensor, frozen: Tensor) -> Tensor:
    """Return the losses [T] of the code under test."""
    mask = batch.loss_mask
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None
    if name in VALUE:
        clip = VALUE_CLIPS[name]
        return clipped_value_loss(logprobs, batch.old_logprobs, batch.ref_logprobs, mask, value_clip=clip)[0]
    unbound, arguments = (
        (cispo_rollout, (batch.advantages, mask))
        if name in ANCHORED
        else (registry.policy_losses.get(name), (batch.advantages, mask))
        if name in POLICY
        else (registry.kl_estimators.get(name), (batch.ref_logprobs, mask))
        if name in KL
        else (registry.sft_losses.get(name), (mask,))
    )
    tensors = {
        name: getattr(batch, name) for name in (*policy.POLICY_LOSS_TENSORS - {"frozen_logprobs"}, "ref_logprobs")
    }
    function = registry.bind_settings(unbound, name, SETTINGS, policy.POLICY_LOSS_TENSORS | {"ref_logprobs"})
    result = function(
        logprobs, *arguments, **registry.select_keyword_arguments(function, {**tensors, "frozen_logprobs": frozen})
    )
    return result[0] if name in POLICY or name in ANCHORED else result


def to_token_lists(batch: TrainBatch, logprobs: Tensor) -> list[list[SimpleNamespace]]:
    """Return the loss tokens of every sequence."""
    names = {"old": "old_logprobs", "rollout": "rollout_logprobs", "ref": "ref_logprobs", "adv": "advantages"}
    columns = {short: select_masked(batch, getattr(batch, name)) for short, name in names.items()}
    columns |= {"lp": select_masked(batch, logprobs.detach()), "selected": select_masked(batch, batch.selected)}  # type: ignore[arg-type]
    sequences = []
    for row in range(len(batch)):
        tokens = [
            SimpleNamespace(**dict(zip(columns, values, strict=True)))
            for values in zip(*(column[row] for column in columns.values()), strict=True)
        ]
        for t in tokens:
            t.r, t.u, t.d = exp(t.lp - t.old), exp(t.lp - t.rollout), t.lp - t.ref
            t.k3 = exp(-t.d) - 1 + t.d
        sequences.append(tokens)
    return sequences


def compute_weights(batch: TrainBatch) -> Tensor:
    return torch.rand(len(batch.input_ids), generator=torch.Generator().manual_seed(5), dtype=torch.float64) + 0.1


def value_and_gradient(name: str, batch: TrainBatch, logprobs: Tensor) -> tuple[Tensor, Tensor]:
    values = compute_losses(name, batch, logprobs, logprobs.detach())
    (gradient,) = torch.autograd.grad((values * compute_weights(batch)).sum(), logprobs)
    return values.detach(), gradient


def test_every_listed_algorithm_has_a_reference():
    assert POLICY.keys() == registry.policy_losses.table.keys()
    assert KL.keys() == registry.kl_estimators.table.keys()
    assert SFT.keys() == registry.sft_losses.table.keys()


@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients_match_the_paper(name: str):
    for seed, shape in enumerate([*SHAPES, *SHAPES]):
        batch = edge_case_batch(shape, seed)
        logprobs = current_logprobs(batch, seed + 100)
        values, gradient = value_and_gradient(name, batch, logprobs)
        weights = select_masked(batch, compute_weights(batch))
        expected = [ALL[name](*pair) for pair in zip(to_token_lists(batch, logprobs), weights, strict=True)]
        for actual, reference in (values, [v for v, _ in expected]), (gradient, [g for _, g in expected]):
            flat = torch.tensor([x for row in reference for x in row], dtype=torch.float64)
            torch.testing.assert_close(actual[batch.loss_mask], flat, rtol=1e-11, atol=1e-13)
            assert (actual[~batch.loss_mask] == 0).all()


@pytest.mark.parametrize("name", ALL)
def test_gradients_match_finite_differences(name: str):
    batch = edge_case_batch("failed rows", seed=3)
    logprobs = current_logprobs(batch)
    frozen = logprobs.detach().clone()
    assert torch.autograd.gradcheck(lambda x: compute_losses(name, batch, x, frozen), logprobs)


@pytest.mark.parametrize("name", ALL)
def test_masked_tokens_have_no_influence(name: str):
    batch = edge_case_batch("failed rows", seed=4)
    clean = current_logprobs(batch)
    expected = value_and_gradient(name, batch, clean)
    for garbage in (torch.nan, torch.inf, -torch.inf, 1e300, -1e300):
        logprobs = clean.detach().masked_fill(~batch.loss_mask, garbage).requires_grad_()
        for actual, expected_tensor in zip(
            value_and_gradient(name, with_garbage(batch, garbage), logprobs), expected, strict=True
        ):
            assert (actual[~batch.loss_mask] == 0).all()
            assert torch.equal(actual[batch.loss_mask], expected_tensor[batch.loss_mask])


@pytest.mark.parametrize("name", [*POLICY, *ANCHORED])
@pytest.mark.parametrize("log_ratio", [300.0, -300.0])
def test_outlier_log_ratio_is_finite(name: str, log_ratio: float):
    batch = edge_case_batch("regular")
    assert batch.old_logprobs is not None and batch.rollout_logprobs is not None
    is_outlier = torch.arange(len(batch.input_ids)) % 4 == 0
    batch = batch.with_tokens(
        old_logprobs=batch.old_logprobs - log_ratio * is_outlier,
        rollout_logprobs=batch.rollout_logprobs - log_ratio * is_outlier,
    )
    for result in value_and_gradient(name, batch, current_logprobs(edge_case_batch("regular"))):
        assert result.isfinite().all()
