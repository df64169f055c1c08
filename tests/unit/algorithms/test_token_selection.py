from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from skyrl_train.algorithms.losses import clip_cov, kl_cov, sapo
from skyrl_train.algorithms.token_selection import get_token_selector, select_clip_cov_tokens, select_kl_cov_tokens

CLIP_COV = partial(
    select_clip_cov_tokens, eps_clip_low=0.2, eps_clip_high=0.2, clip_ratio=0.01, clip_cov_lb=0.5, clip_cov_ub=3.0
)
KL_COV = partial(select_kl_cov_tokens, kl_cov_frac=0.02)


def tokens(count: int = 2000) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    old, noise, advantages = torch.randn(3, count, generator=generator, dtype=torch.float64)
    mask = torch.rand(count, generator=generator) < 0.7
    return old + 0.15 * noise, old, advantages, mask


def covariances(logprobs: Tensor, advantages: Tensor, mask: Tensor) -> dict[int, float]:
    """arXiv:2505.22617: of each token that counts, by its place."""
    places = mask.nonzero().flatten().tolist()
    x, a = logprobs.tolist(), advantages.tolist()
    mean_x, mean_a = sum(x[i] for i in places) / len(places), sum(a[i] for i in places) / len(places)
    return {i: (x[i] - mean_x) * (a[i] - mean_a) for i in places}


def test_kl_cov_takes_the_tokens_with_the_largest_covariance():
    logprobs, old, advantages, mask = tokens()
    by_size = sorted((value, place) for place, value in covariances(logprobs, advantages, mask).items())
    number = int(0.02 * int(mask.sum()))
    chosen = KL_COV(logprobs, old, advantages, mask)
    assert set(chosen.nonzero().flatten().tolist()) == {place for _, place in by_size[-number:]}


def test_clip_cov_takes_its_share_of_tokens_within_the_bounds_that_ppo_does_not_clip():
    logprobs, old, advantages, mask = tokens()
    chosen = CLIP_COV(logprobs, old, advantages, mask).nonzero().flatten().tolist()
    covariance, ratio = covariances(logprobs, advantages, mask), (logprobs - old).exp()
    assert len(chosen) == int(0.01 * int(mask.sum()))
    for place in chosen:
        assert mask[place]
        assert 0.5 < covariance[place] < 3.0
        assert ratio[place] <= 1.2 if advantages[place] > 0 else ratio[place] >= 0.8
    values = sorted(covariance[place] for place in chosen)
    assert values[0] < 1.0 < 1.5 < values[-1]  # spread over the candidates, not the largest


def test_at_least_one_token_is_chosen_and_none_where_nothing_counts_or_nothing_is_a_candidate():
    logprobs, old, advantages, _ = tokens(20)
    everything = torch.ones(20, dtype=torch.bool)
    assert KL_COV(logprobs, old, advantages, everything).sum() == 1
    assert CLIP_COV(logprobs, old, advantages, everything).sum() == 1
    for choose in (CLIP_COV, KL_COV):
        assert not choose(logprobs, old, advantages, ~everything).any()
    assert not CLIP_COV(logprobs, old, torch.ones(20), everything).any()  # equal advantages: covariance 0


def test_a_share_of_0_chooses_nothing():
    logprobs, old, advantages, mask = tokens()
    assert not CLIP_COV(logprobs, old, advantages, mask, clip_ratio=0.0).any()
    assert not KL_COV(logprobs, old, advantages, mask, kl_cov_frac=0.0).any()


def test_a_choice_depends_neither_on_order_nor_on_masked_tokens_nor_on_rounding():
    logprobs, old, advantages, mask = tokens()
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(mask), generator=generator)
    outside = [x.masked_fill(~mask, torch.nan) for x in (logprobs, old, advantages)]
    rounding = 1e-6 * torch.randn(len(mask), generator=generator)
    for choose in (CLIP_COV, KL_COV):
        chosen = choose(logprobs, old, advantages, mask)
        assert torch.equal(choose(logprobs[order], old[order], advantages[order], mask[order]), chosen[order])
        assert torch.equal(choose(*outside, mask), chosen)
        assert torch.equal(choose(logprobs + rounding, old, advantages, mask), chosen)


def test_a_loss_declares_its_choice():
    assert get_token_selector(clip_cov) is select_clip_cov_tokens
    assert get_token_selector(kl_cov) is select_kl_cov_tokens
    assert get_token_selector(sapo) is None
