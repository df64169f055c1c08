"""Losses of supervised fine-tuning: per-token values over the ragged tokens [T]. A reduction weights and sums them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from skyrl_train.algorithms.registry import SFTLoss, select_keyword_arguments
from skyrl_train.data.batch import TrainBatch
from skyrl_train.metrics import Metrics


def sft(logprobs: Tensor, mask: Tensor) -> Tensor:
    """Return -logprobs [T], 0 outside the mask [T]: the negative log-likelihood."""
    return torch.where(mask, -logprobs, 0.0)


def minor_sft(
    logprobs: Tensor, mask: Tensor, *, ref_logprobs: Tensor, sequence_ids: Tensor, minor_beta: float
) -> Tensor:
    """Return -log sigmoid(minor_beta * sum over the sequence of (logprobs - ref_logprobs)), on every loss token [T].

    In MinorSFT (arXiv:2408.10642), a sequence that the policy already prefers over the reference has less influence.
    Use it with `sequence_mean`, which makes it one value per sequence. This is TorchRL's form; the paper's gradient is
    2 / (beta * n) times this one, where n is the number of tokens of the sequence.

    Args:
        logprobs: The policy's log-probs, nats [T].
        mask: Loss tokens [T] bool; the result is 0 elsewhere.
        ref_logprobs: The reference model's log-probs, nats [T].
        sequence_ids: Sequence of each token [T].
        minor_beta: The factor beta.
    """
    difference = torch.where(mask, logprobs - ref_logprobs, 0.0)
    margin = difference.new_zeros(len(mask)).index_add(0, sequence_ids, difference)
    return torch.where(mask, -logsigmoid(minor_beta * margin)[sequence_ids], 0.0)


SFT_LOSS_TENSORS = frozenset({"ref_logprobs", "sequence_ids"})
"""Names of the tensors that supervised losses may take as keyword-only parameters."""


@dataclass(frozen=True)
class SFTObjective:
    """The function that a supervised update minimizes.

    loss = sum_t w_t loss_t over the loss tokens, where w are the batch's `token_weights`
    """

    sft_loss: SFTLoss = sft

    @property
    def needs_entropy(self) -> bool:
        """False: no entropy is computed."""
        return False

    def __call__(
        self, batch: TrainBatch, logprobs: Tensor, entropy: Tensor | None, mini_batch_tokens: int, metrics: Metrics
    ) -> Tensor:
        """Return the scalar to backpropagate for one micro-batch, to be summed over micro-batches and ranks.

        Args:
            batch: A micro-batch with `token_weights`.
            logprobs: The policy's log-probs with gradient, nats [T].
            entropy: Not used.
            mini_batch_tokens: Not used.
            metrics: Receives sft/loss, the mean loss of a token.
        """
        mask, weights = batch.loss_mask, batch.token_weights
        assert weights is not None, "assign_loss_weights comes before the update"
        tensors = {"ref_logprobs": batch.ref_logprobs, "sequence_ids": batch.sequence_ids}
        values = self.sft_loss(logprobs, mask, **select_keyword_arguments(self.sft_loss, tensors))
        loss = (values * weights).sum()
        numbers = torch.stack([values.detach().sum().double(), mask.sum().double()])
        metrics.defer(numbers, lambda computed: metrics.add_sum("sft/loss", *computed))
        return loss
