"""Small float64 batches with everything that an algorithm may read, in shapes that break careless ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from skyrl_train.data.batch import SEQUENCE_FIELDS, TOKEN_FIELDS, TrainBatch

SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "regular": ((5, 3, 7), (4, 6)),
    "failed rows": ((5, -4, 6), (-3, -2), (1, 7)),
    "length-1 responses": ((1, 1, 4), (1, 1)),
    "one-sample groups": ((5,), (3,), (6, 2, 1)),
    "nothing counts": ((-3,), (-2, -1)),
}
"""Response lengths of the samples of every group. A negative length is a failed episode, of which nothing counts."""


def edge_case_batch(shape: str, seed: int = 0) -> TrainBatch:
    """One of SHAPES. `input_ids` number the tokens, so that each knows its place whatever happens to its row.

    Responses of 5 tokens and more have two turns, with one token of the environment between them; each turn has its
    reward. Log-probs differ by about 0.4 from one another, so that ratios are on both sides of usual bounds.
    """
    generator = torch.Generator().manual_seed(seed)
    groups = SHAPES[shape]
    responses = torch.tensor([length for group in groups for length in group])
    ok, sizes = responses > 0, responses.abs()
    prompts = torch.randint(1, 4, sizes.shape, generator=generator)
    lengths = prompts + sizes
    positions = torch.cat([torch.arange(int(length)) for length in lengths])
    tokens = len(positions)
    place = positions - prompts.repeat_interleave(lengths)  # in the response
    two_turns = (sizes >= 5).repeat_interleave(lengths)
    sampled = (place >= 0) & ~(two_turns & (place == 2))
    ends = (positions == (lengths - 1).repeat_interleave(lengths)) | (two_turns & (place == 1))
    mask = sampled & ok.repeat_interleave(lengths)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    old = -2 - 2 * torch.rand(tokens, generator=generator, dtype=torch.float64)
    token_rewards = torch.rand(tokens, generator=generator, dtype=torch.float64) * (mask & ends)
    versions = torch.zeros(len(sizes), dtype=torch.int64)
    batch = TrainBatch(
        input_ids=torch.arange(tokens),
        loss_mask=mask,
        offsets=torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]),
        prompt_lengths=prompts,
        group_ids=torch.repeat_interleave(torch.tensor([len(group) for group in groups])) * 3,
        rewards=torch.zeros(len(sizes), dtype=torch.float64),
        temperature=torch.ones(len(sizes)),
        status=ok,
        min_versions=versions,
        max_versions=versions,
        rollout_logprobs=old + noise(0.4),
        old_logprobs=old,
        ref_logprobs=old + noise(0.4),
        values=noise(1.0),
        advantages=noise(1.0),
        returns=noise(1.0),
        token_rewards=token_rewards,
        selected=torch.rand(tokens, generator=generator) < 0.3,
    )
    return replace(batch, rewards=batch.sum_per_sequence(token_rewards))


def current_logprobs(batch: TrainBatch, seed: int = 1) -> Tensor:
    """Return [T] log-probs of the trained policy: about 0.4 from the old ones, with a gradient."""
    assert batch.old_logprobs is not None
    generator = torch.Generator().manual_seed(seed)
    noise = 0.4 * torch.randn(len(batch.input_ids), generator=generator, dtype=torch.float64)
    return (batch.old_logprobs + noise).requires_grad_()


def with_garbage(batch: TrainBatch, garbage: float) -> TrainBatch:
    """Return the batch with `garbage` outside the mask and as rewards of failed episodes, which must not be read."""
    outside = ~batch.loss_mask
    changed: dict[str, Any] = {"rewards": batch.rewards.masked_fill(~batch.status, garbage)}
    for name in TOKEN_FIELDS:
        value = getattr(batch, name)
        if value is not None and value.is_floating_point() and name != "loss_weights":
            changed[name] = value.masked_fill(outside, garbage)
    if batch.selected is not None:
        changed["selected"] = batch.selected | outside
    return replace(batch, **changed)


def as_padded(batch: TrainBatch, garbage: float) -> TrainBatch:
    """Return the same sequences, padded to the longest. Padding has mask 0, and `garbage` in every other tensor.

    Its input_ids are -1: the last element of any tensor that they index.
    """
    width = int(batch.lengths.max())
    fills: dict[str, float] = {"input_ids": -1, "loss_mask": False, "selected": True}
    changed: dict[str, Any] = {}
    for name in TOKEN_FIELDS:
        value = getattr(batch, name)
        if value is not None and name not in changed:
            changed[name] = batch.padded(value, fills.get(name, garbage)).flatten()
    return TrainBatch(
        offsets=torch.arange(len(batch) + 1) * width,
        **{name: getattr(batch, name) for name in SEQUENCE_FIELDS},
        **changed,
    )


def select_masked(batch: TrainBatch, per_token: Tensor) -> list[list[float]]:
    """Split [T] into a list for every sequence of the values of its tokens that count."""
    rows: Sequence[int] = range(len(batch))
    ids = batch.sequence_ids
    return [per_token[batch.loss_mask & (ids == row)].tolist() for row in rows]
