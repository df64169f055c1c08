"""The objective of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.algorithms.registry import SFTLoss, asked_for
from skyrl_train.algorithms.sft import sft
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics

TENSORS = frozenset({"ref_logprobs", "sequence_ids"})
"""The tensors that supervised losses may take as keywords."""


@dataclass(frozen=True)
class SFTObjective:
    """loss = sum_t w_t loss_t over the tokens in loss_mask, where w are the batch's `token_weights`."""

    sft_loss: SFTLoss = sft

    @property
    def wants_entropy(self) -> bool:
        return False

    def __call__(
        self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, mini_batch_tokens: int, metrics: Metrics
    ) -> Tensor:
        """Return the scalar to backpropagate, to be summed over micro-batches and ranks. logprobs [T], nats."""
        mask, weights = batch.loss_mask, batch.token_weights
        assert weights is not None, "weights come before the update"
        tensors = {"ref_logprobs": batch.ref_logprobs, "sequence_ids": batch.sequence_ids}
        values = self.sft_loss(logprobs, mask, **asked_for(self.sft_loss, tensors))
        loss = (values * weights).sum()
        total, tokens = torch.stack([values.detach().sum().double(), mask.sum().double()]).tolist()
        metrics.add_sum("sft/loss", total, weight=tokens)
        return loss
