"""Supervised losses: per-token values over the ragged tokens [T]; a reduction weighs and sums them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def sft(logprobs: Tensor, mask: Tensor) -> Tensor:
    """-logprobs, 0 outside the mask: the negative log-likelihood."""
    return torch.where(mask, -logprobs, 0.0)


def minor_sft(
    logprobs: Tensor, mask: Tensor, *, ref_logprobs: Tensor, sequence_ids: Tensor, minor_beta: float
) -> Tensor:
    """-log sigmoid(beta * sum over the sequence of (logprobs - ref_logprobs)), on every token of the sequence.

    MinorSFT (arXiv:2408.10642): a sequence that the policy already prefers over the reference has less influence. Meant
    for `sequence_mean`, which makes it one value per sequence. This is TorchRL's form; the paper's gradient is
    2 / (beta * n) times this one, where n is the number of tokens of the sequence.
    """
    difference = torch.where(mask, logprobs - ref_logprobs, 0.0)
    margin = difference.new_zeros(len(mask)).index_add(0, sequence_ids, difference)
    return torch.where(mask, -logsigmoid(minor_beta * margin)[sequence_ids], 0.0)
