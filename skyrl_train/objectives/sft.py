"""What supervised fine-tuning minimises."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.reductions import Denominators, token_mean
from skyrl_train.algorithms.registry import Reduction
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics


@dataclass(frozen=True)
class SFTObjective:
    """Negative log-likelihood of the tokens in loss_mask, divided by the whole mini-batch's denominators."""

    reduction: Reduction = token_mean
    max_seq_len: int | None = None

    @property
    def wants_entropy(self) -> bool:
        return False

    @property
    def needs_reference(self) -> bool:
        return False

    def __call__(
        self,
        batch: TrainBatch,
        logprobs: Tensor,
        entropy: Tensor | None,
        denominators: Denominators,
        metrics: Metrics,
    ) -> Tensor:
        """A scalar to be backpropagated, added over micro-batches and ranks. logprobs [T], nats."""
        mask = batch.loss_mask
        weights = self.reduction(mask, batch.offsets, denominators, self.max_seq_len)
        values = torch.where(mask, -logprobs, 0.0)
        loss = (values * weights).sum()
        total, tokens = torch.stack([values.detach().sum().double(), mask.sum().double()]).tolist()
        metrics.add_sum("sft/loss", total, weight=tokens)
        return loss
