"""Demonstrations: conversations from whose assistant messages the model learns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_train.data.batch import TrainBatch


@dataclass(frozen=True, slots=True)
class Demonstration:
    """One conversation as L tokens."""

    input_ids: list[int]
    """[L]"""
    loss_mask: list[bool]
    """[L], True on the assistant's tokens, including the token that ends its turn."""


def demonstration_batch(rows: Sequence[Demonstration]) -> TrainBatch:
    """Concatenate demonstrations; each is a separate group, with temperature 1 and no rewards."""
    count = len(rows)
    lengths = torch.tensor([len(row.input_ids) for row in rows])
    first = [row.loss_mask.index(True) if any(row.loss_mask) else len(row.loss_mask) for row in rows]
    zeros = torch.zeros(count, dtype=torch.int64)
    return TrainBatch(
        input_ids=torch.tensor([token for row in rows for token in row.input_ids], dtype=torch.int32),
        loss_mask=torch.tensor([learn for row in rows for learn in row.loss_mask], dtype=torch.bool),
        offsets=torch.cat([zeros[:1], lengths.cumsum(0)]),
        prompt_lengths=torch.tensor(first),
        group_ids=torch.arange(count),
        rewards=torch.zeros(count),
        temperature=torch.ones(count),
        status=torch.ones(count, dtype=torch.bool),
        min_versions=zeros,
        max_versions=zeros,
    )
