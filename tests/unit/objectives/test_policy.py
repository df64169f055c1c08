from __future__ import annotations

import pickle
import random
from dataclasses import replace

import pytest
import torch

from skyrl_train.algorithms.kl import k1, k2, k3
from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.reductions import Denominators, seq_mean_token_sum_norm, sequence_mean, token_mean
from skyrl_train.data.batch import TrainBatch, cat
from skyrl_train.metrics import Metrics
from skyrl_train.objectives.policy import PolicyObjective

FULL = PolicyObjective(
    clipped_surrogate, 0.2, 0.2, token_mean, max_seq_len=16, kl_estimator=k3, kl_coef=0.3, entropy_coef=0.05
)
REDUCTIONS = [token_mean, sequence_mean, seq_mean_token_sum_norm]


def make_batch(rows: int = 9, seed: int = 0, *, on_policy: bool = False) -> TrainBatch:
    """Sequences of 2-12 tokens; the third has no token that counts."""
    torch.manual_seed(seed)
    lengths = torch.randint(2, 13, (rows,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = int(lengths.sum())
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    mask = (torch.rand(tokens) > 0.3) & (positions > 0)
    mask[offsets[2] : offsets[3]] = False
    ones = torch.ones(rows, dtype=torch.int64)
    nats = -torch.rand(4, tokens, dtype=torch.float64) - 0.2
    return TrainBatch(
        input_ids=torch.arange(tokens),  # each token knows its place, whatever happens to its row
        position_ids=positions,
        loss_mask=mask,
        offsets=offsets,
        prompt_lengths=ones,
        group_ids=torch.arange(rows) // 3,
        rewards=torch.zeros(rows),
        temperature=torch.ones(rows),
        status=ones.bool(),
        min_versions=ones,
        max_versions=ones,
        rollout_logprobs=nats[0],
        old_logprobs=None if on_policy else nats[1],
        ref_logprobs=nats[2],
        advantages=torch.randn(tokens, dtype=torch.float64),
    )


def loss_and_gradients(
    objective: PolicyObjective, parts: list[TrainBatch], whole: TrainBatch, metrics: Metrics | None = None
):
    """Accumulated over `parts`; gradients wrt the log-probs and entropies of `whole`'s tokens."""
    torch.manual_seed(99)
    tokens = len(whole.input_ids)
    logprobs = (-torch.rand(tokens, dtype=torch.float64) - 0.2).requires_grad_()
    entropy = torch.rand(tokens, dtype=torch.float64).requires_grad_()
    denominators = Denominators.of(whole)
    total = 0.0
    for part in parts:
        where = part.input_ids
        loss = objective(part, logprobs[where], entropy[where], denominators, metrics or Metrics())
        loss.backward()
        total += loss.item()
    return total, logprobs.grad, entropy.grad


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("on_policy", [False, True])
def test_gradient_does_not_depend_on_how_the_mini_batch_is_cut_or_ordered(reduction, on_policy):
    objective = replace(FULL, reduction=reduction)
    whole = make_batch(on_policy=on_policy)
    rows = list(range(len(whole)))
    shuffled = random.Random(0).sample(rows, len(rows))
    cuts = [whole.split(max_sequences=size) for size in (1, 2, 5)]
    cuts += [whole.split(token_budget=20), [whole.select(shuffled)]]
    cuts += [[whole.select(ranks) for ranks in whole.shard(2)]]  # what two ranks would see
    cuts += [[cat([whole.select([8, 0]), whole.select([3])]), whole.select([1, 2, 4, 5, 6, 7])]]
    expected = loss_and_gradients(objective, [whole], whole)
    for cut in cuts:
        for mine, other in zip(loss_and_gradients(objective, cut, whole), expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-15)


def test_loss_is_the_equation_of_the_docstring():
    whole = make_batch()
    loss, logprob_gradient, entropy_gradient = loss_and_gradients(FULL, [whole], whole)
    torch.manual_seed(99)
    logprobs = (-torch.rand(len(whole.input_ids), dtype=torch.float64) - 0.2).requires_grad_()
    entropy = torch.rand(len(whole.input_ids), dtype=torch.float64)
    chosen = whole.loss_mask
    assert whole.old_logprobs is not None
    assert whole.ref_logprobs is not None
    assert whole.advantages is not None
    ratio = (logprobs - whole.old_logprobs)[chosen].exp()
    advantages = whole.advantages[chosen]
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    back = (whole.ref_logprobs - logprobs)[chosen]
    by_hand = (-surrogate + 0.3 * (back.exp() - back - 1) - 0.05 * entropy[chosen]).mean()
    by_hand.backward()
    assert loss == pytest.approx(by_hand.item())
    torch.testing.assert_close(logprob_gradient, logprobs.grad)
    assert entropy_gradient[chosen].tolist() == pytest.approx([-0.05 / int(chosen.sum())] * int(chosen.sum()))


@pytest.mark.parametrize("estimator", [k1, k2, k3])
def test_kl_in_the_loss_has_a_gradient(estimator):
    whole = make_batch()
    with_kl = loss_and_gradients(replace(FULL, kl_estimator=estimator), [whole], whole)[1]
    without = loss_and_gradients(replace(FULL, kl_estimator=None), [whole], whole)[1]
    moved = (with_kl - without)[whole.loss_mask]
    assert moved.abs().max() > 1e-4


def test_nothing_outside_the_mask_has_a_gradient_even_where_it_is_not_a_number():
    whole = make_batch()
    outside = ~whole.loss_mask
    spoilt = {
        name: getattr(whole, name).masked_fill(outside, torch.nan)
        for name in ("rollout_logprobs", "old_logprobs", "ref_logprobs", "advantages")
    }
    metrics = Metrics()
    loss, logprob_gradient, entropy_gradient = loss_and_gradients(FULL, [whole.with_tokens(**spoilt)], whole, metrics)
    assert loss == pytest.approx(loss_and_gradients(FULL, [whole], whole)[0])
    assert (logprob_gradient[outside] == 0).all()
    assert (entropy_gradient[outside] == 0).all()
    assert (logprob_gradient[whole.loss_mask] != 0).all()
    assert all(value == value for value in metrics.flush().values())


def test_gradient_matches_finite_differences():
    whole = make_batch(rows=4)
    torch.manual_seed(5)
    logprobs = (-torch.rand(len(whole.input_ids), dtype=torch.float64) - 0.2).requires_grad_()
    entropy = torch.rand(len(whole.input_ids), dtype=torch.float64).requires_grad_()

    def loss(x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return FULL(whole, x, h, Denominators.of(whole), Metrics())

    assert torch.autograd.gradcheck(loss, (logprobs, entropy))


@pytest.mark.fault("F12")
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_batch_with_everything_masked_has_loss_zero_and_no_nan(reduction):
    whole = make_batch()
    masked = replace(whole, loss_mask=torch.zeros_like(whole.loss_mask))
    metrics = Metrics()
    loss, gradient, _ = loss_and_gradients(replace(FULL, reduction=reduction), [masked], masked, metrics)
    assert loss == 0
    assert (gradient == 0).all()
    assert metrics.flush() == {}


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_metrics_are_exact_however_the_mini_batch_is_cut(reduction):
    whole = make_batch()
    reports = []
    for parts in ([whole], whole.split(max_sequences=1), whole.split(max_sequences=4)):
        metrics = Metrics()
        loss = loss_and_gradients(replace(FULL, reduction=reduction), parts, whole, metrics)[0]
        reports.append(metrics.flush())
        assert reports[-1]["policy/loss"] == pytest.approx(loss)
    assert reports[1] == pytest.approx(reports[0])
    assert reports[2] == pytest.approx(reports[0])


def test_metrics_say_how_far_engine_and_trainer_are_apart():
    whole = make_batch()
    metrics = Metrics()
    loss_and_gradients(FULL, [whole], whole, metrics)
    report = metrics.flush()
    assert whole.rollout_logprobs is not None
    assert whole.old_logprobs is not None
    gap = (whole.old_logprobs - whole.rollout_logprobs)[whole.loss_mask]
    assert report["rollout/logprob_diff"] == pytest.approx(gap.abs().mean().item())
    assert report["rollout/logprob_diff_max"] == pytest.approx(gap.abs().max().item())
    assert report["rollout/kl"] == pytest.approx((gap.exp() - gap - 1).mean().item())


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped():
    whole = make_batch(on_policy=True)
    metrics = Metrics()
    plain = replace(FULL, kl_estimator=None, entropy_coef=None)
    gradient = loss_and_gradients(plain, [whole], whole, metrics)[1]
    report = metrics.flush()
    assert (report["policy/ratio"], report["policy/ratio_max"], report["policy/clip_ratio"]) == (1, 1, 0)
    assert whole.advantages is not None
    torch.testing.assert_close(gradient, -whole.advantages * whole.loss_mask / int(whole.loss_mask.sum()))


def test_what_it_needs_follows_from_its_terms_and_it_can_be_sent_to_a_worker():
    bare = replace(FULL, kl_estimator=None, entropy_coef=None)
    assert (FULL.wants_entropy, FULL.needs_reference) == (True, True)
    assert (bare.wants_entropy, bare.needs_reference) == (True, False)
    assert pickle.loads(pickle.dumps(FULL)) == FULL
