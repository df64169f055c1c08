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
    """Return the covariance (arXiv:2505.22617) of each loss token by its index."""
    indices = mask.nonzero().flatten().tolist()
    x, a = logprobs.tolist(), advantages.tolist()
    mean_x, mean_a = sum(x[i] for i in indices) / len(indices), sum(a[i] for i in indices) / len(indices)
    return {i: (x[i] - mean_x) * (a[i] - mean_a) for i in indices}


def test_kl_cov_selects_largest_covariances():
    logprobs, old, advantages, mask = tokens()
    by_size = sorted((value, index) for index, value in covariances(logprobs, advantages, mask).items())
    number = int(0.02 * int(mask.sum()))
    selected = KL_COV(logprobs, old, advantages, mask)
    assert set(selected.nonzero().flatten().tolist()) == {index for _, index in by_size[-number:]}


def test_clip_cov_selects_unclipped_tokens_within_bounds():
    logprobs, old, advantages, mask = tokens()
    selected = CLIP_COV(logprobs, old, advantages, mask).nonzero().flatten().tolist()
    covariance, ratio = covariances(logprobs, advantages, mask), (logprobs - old).exp()
    assert len(selected) == int(0.01 * int(mask.sum()))
    for index in selected:
        assert mask[index]
        assert 0.5 < covariance[index] < 3.0
        assert ratio[index] <= 1.2 if advantages[index] > 0 else ratio[index] >= 0.8
    values = sorted(covariance[index] for index in selected)
    assert values[0] < 1.0 < 1.5 < values[-1]  # spread over the candidates, not the largest


def test_selection_has_a_token_only_with_candidates():
    logprobs, old, advantages, _ = tokens(20)
    all_tokens = torch.ones(20, dtype=torch.bool)
    assert KL_COV(logprobs, old, advantages, all_tokens).sum() == 1
    assert CLIP_COV(logprobs, old, advantages, all_tokens).sum() == 1
    for select in (CLIP_COV, KL_COV):
        assert not select(logprobs, old, advantages, ~all_tokens).any()
    assert not CLIP_COV(logprobs, old, torch.ones(20), all_tokens).any()  # equal advantages: covariance 0


def test_fraction_of_zero_selects_nothing():
    logprobs, old, advantages, mask = tokens()
    assert not CLIP_COV(logprobs, old, advantages, mask, clip_ratio=0.0).any()
    assert not KL_COV(logprobs, old, advantages, mask, kl_cov_frac=0.0).any()


def test_selection_ignores_order_masked_tokens_and_rounding():
    logprobs, old, advantages, mask = tokens()
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(len(mask), generator=generator)
    with_nan = [x.masked_fill(~mask, torch.nan) for x in (logprobs, old, advantages)]
    rounding = 1e-6 * torch.randn(len(mask), generator=generator)
    for select in (CLIP_COV, KL_COV):
        selected = select(logprobs, old, advantages, mask)
        assert torch.equal(select(logprobs[order], old[order], advantages[order], mask[order]), selected[order])
        assert torch.equal(select(*with_nan, mask), selected)
        assert torch.equal(select(logprobs + rounding, old, advantages, mask), selected)


def test_loss_declares_its_selection():
    assert get_token_selector(clip_cov) is select_clip_cov_tokens
    assert get_token_selector(kl_cov) is select_kl_cov_tokens
    assert get_token_selector(sapo) is None
