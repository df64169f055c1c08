"""Supervised fine-tuning on tensordicts: TorchRL's names and arguments over the trainer's own losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.llm import sft as torchrl_sft

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.reductions import seq_mean_token_sum_norm, sequence_mean, token_mean
from skyrl_train.algorithms.sft import minor_sft, sft
from skyrl_train.tensordict.losses.conversations import ConversationLoss, token_counts
from skyrl_train.tensordict.losses.grpo import constant, mean_over, total_loss
from skyrl_train.tensordict.losses.scoring import Scored, check_choice, read
from skyrl_train.tensordict.ragged import Key

LOSS_FUNCTIONS = ("sft", "minor_sft")


class SFTLossOutput(torchrl_sft.SFTLossOutput):  # type: ignore[misc]
    """The losses of an SFTLoss, in float64; None if their term is disabled.

    `loss_sft` is a scalar, or [B] with reduction "none". `kl_to_ref` is the mean over all tokens that count, in nats.
    """

    loss = property(total_loss)


class SFTLoss(ConversationLoss, torchrl_sft.SFTLoss):  # type: ignore[misc]
    """Negative log-likelihood of the assistant's tokens in whole conversations. For actors see scoring.py.

    "sft"         -sum of a sequence's log-probs
    "minor_sft"   -log sigmoid(beta (sum of log-probs - sum of the reference's)) (arXiv:2408.10642)

    With `normalize_by_seq_length`, sums are replaced by means. For tokens see ConversationLoss.
    """

    @dataclass
    class _AcceptedKeys(torchrl_sft.SFTLoss._AcceptedKeys):  # type: ignore[misc]
        tokens: Key = ("tokens", "full")

    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: Any,
        tokenizer: Any = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        reduction: str = "mean",
        normalize_by_seq_length: bool = True,
        kl_to_ref_coeff: float | None = None,
        loss_function: str = "sft",
        beta: float = 0.1,
        device: torch.device | str | None = None,
    ):
        """Configure the loss.

        Args:
            actor_network: The policy, which computes log-probs; see scoring.py.
            tokenizer: Tokenizes histories without tokens; the actor's by default.
            tokenizer_kwargs: Arguments of `History.apply_chat_template`.
            reduction: Over sequences: "mean", "sum" or "none".
            normalize_by_seq_length: Divide a sequence's log-probs by its number of tokens that count.
            kl_to_ref_coeff: Coefficient of the KL to the reference; None and 0 turn it off.
            loss_function: "sft" or "minor_sft".
            beta: Scale of "minor_sft".
            device: Accepted for TorchRL's sake: the loss is computed where the batch is.

        Raises:
            ValueError: For another reduction, an unknown loss, or an actor with generate=True.
        """
        settings = dict(locals())
        check_choice("loss_function", loss_function, LOSS_FUNCTIONS)
        self._configure(settings)

    @property
    def reads_reference(self) -> bool:
        """True if a term needs the reference's log-probs."""
        return bool(self.kl_to_ref_coeff) or self.loss_function == "minor_sft"

    def _set_in_keys(self) -> None:
        self.in_keys = [self.tensor_keys.history, *([self.tensor_keys.ref_log_prob] if self.reads_reference else [])]
        self.out_keys = ["loss_sft", *(["loss_kl_to_ref", "kl_to_ref"] if self.kl_to_ref_coeff else [])]

    def forward(self, tensordict: TensorDictBase) -> SFTLossOutput:
        """Compute the losses of the conversations in a tensordict of any batch size, which is not changed.

        Raises ValueError for a conversation without tokens of the assistant or for different shapes, KeyError for
        missing log-probs, RuntimeError if the reference's log-probs require a gradient.
        """
        (rows, scored), key, reference = self._scored(tensordict), self.tensor_keys.ref_log_prob, None
        logprobs, mask, ids = scored.logprobs, scored.mask, scored.layout.sequence_ids
        if self.reads_reference:
            values = read(rows, key, "ref log-prob", KeyError)
            reference = constant(scored.layout.flat(values, key), key)
        found = {"loss_sft": self._loss(scored, reference)}
        if self.kl_to_ref_coeff and reference is not None:
            kl = k3(logprobs, reference, mask)
            found["kl_to_ref"] = mean_over(kl.detach(), mask)
            found["loss_kl_to_ref"] = self.kl_to_ref_coeff * (kl * token_mean(mask, ids, ids, max_seq_len=1)).sum()
        return SFTLossOutput(**found, batch_size=[])

    def _loss(self, scored: Scored, reference: Tensor | None) -> Tensor:
        logprobs, mask, ids, lengths = scored.logprobs, scored.mask, scored.layout.sequence_ids, token_counts(scored)
        if self.loss_function == "minor_sft":
            assert reference is not None
            share = 1 / lengths[ids].double() if self.normalize_by_seq_length else torch.ones_like(logprobs)
            settings = {"ref_logprobs": reference * share, "sequence_ids": ids}
            values = minor_sft(logprobs * share, mask, **settings, minor_beta=self.beta)
        else:
            values = sft(logprobs, mask)
        means = self.loss_function == "minor_sft" or self.normalize_by_seq_length  # minor_sft: one value on all tokens
        weights = (sequence_mean if means else seq_mean_token_sum_norm)(mask, ids, ids, max_seq_len=1)
        if self.reduction == "mean":
            return (values * weights).sum()
        of_sequences = (values * weights).new_zeros(len(lengths)).index_add(0, ids, values * weights) * len(lengths)
        return of_sequences.sum() if self.reduction == "sum" else of_sequences
