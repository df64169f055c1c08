"""How per-token values become one number: a weight per token whose denominators belong to the whole mini-batch.

`loss = (values * weights).sum()`. A micro-batch or a rank sees only its own tokens but divides by everybody's, so sums
of losses and of gradients are those of one large batch, however it was cut. Sequences are never cut.

mask is [T] bool, offsets [B+1]; weights are [T] float64: cheap beside the model, and sums keep their digits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.data.batch import TrainBatch


@dataclass(frozen=True, slots=True)
class Denominators:
    """What a whole mini-batch divides by, over all ranks. Plain numbers: they travel."""

    tokens: int
    """Tokens that count."""
    sequences: int
    """Sequences with a token that counts: a failed episode does not dilute the others."""

    @classmethod
    def of(cls, batch: TrainBatch) -> Denominators:
        per_sequence = batch.per_sequence_sum(batch.loss_mask.long())
        return cls(tokens=int(per_sequence.sum()), sequences=int((per_sequence > 0).sum()))

    def __add__(self, other: Denominators) -> Denominators:
        return Denominators(self.tokens + other.tokens, self.sequences + other.sequences)


def token_mean(mask: Tensor, offsets: Tensor, denominators: Denominators, max_seq_len: int | None) -> Tensor:
    """Every token weighs the same: 1 / tokens (DAPO, arXiv:2503.14476, eq. 12)."""
    return mask.double() / max(denominators.tokens, 1)


def sequence_mean(mask: Tensor, offsets: Tensor, denominators: Denominators, max_seq_len: int | None) -> Tensor:
    """Every sequence weighs the same: 1 / (its tokens * sequences) (GRPO, arXiv:2402.03300, eq. 3)."""
    lengths = offsets[1:] - offsets[:-1]
    ids = torch.repeat_interleave(torch.arange(len(lengths), device=mask.device), lengths)
    counts = torch.zeros(len(lengths), dtype=torch.float64, device=mask.device).index_add(0, ids, mask.double())
    return mask.double() / (counts.clamp(min=1)[ids] * max(denominators.sequences, 1))


def seq_mean_token_sum_norm(
    mask: Tensor, offsets: Tensor, denominators: Denominators, max_seq_len: int | None
) -> Tensor:
    """A token weighs 1 / (max_seq_len * sequences), however long its sequence (Dr. GRPO, arXiv:2503.20783)."""
    assert max_seq_len, "seq_mean_token_sum_norm needs max_seq_len"
    return mask.double() / (max_seq_len * max(denominators.sequences, 1))
