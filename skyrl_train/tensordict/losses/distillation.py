"""Distillation on tensordicts: TorchRL's loss on the tokens that were sampled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.llm import distillation as torchrl_distillation
from torchrl.objectives.llm.distillation import (
    DistillationLossOutput as DistillationLossOutput,
    k3_kl_token_estimate as k3_kl_token_estimate,
)

from skyrl_train.tensordict.losses.conversations import ConversationLoss, token_counts
from skyrl_train.tensordict.losses.scoring import ASSISTANT, check_choice, read
from skyrl_train.tensordict.ragged import Key, column

DIRECTIONS = ("reverse", "forward")


class DistillationLoss(ConversationLoss, torchrl_distillation.DistillationLoss):  # type: ignore[misc]
    """The k3 estimate of the KL divergence to a teacher, whose log-probs of the same tokens are in the tensordict.

    "reverse"   exp(d) - 1 - d with d = teacher's - student's log-prob: KL(student || teacher) if the student sampled
    "forward"   the same with -d: KL(teacher || student) if the teacher sampled

    TorchRL's class renders and tokenizes conversations again; this one reads their tokens if the tensordict has them.
    """

    @dataclass
    class _AcceptedKeys(torchrl_distillation.DistillationLoss._AcceptedKeys):  # type: ignore[misc]
        tokens: Key = ("tokens", "full")

    default_keys = _AcceptedKeys

    def __init__(
        self,
        actor_network: Any,
        tokenizer: Any = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        kl_direction: str = "reverse",
        reduction: str = "mean",
        normalize_by_seq_length: bool = True,
        assistant_only: bool = True,
        device: torch.device | str | None = None,
    ):
        """Configure the loss.

        Args:
            actor_network: The student, which computes log-probs; see scoring.py.
            tokenizer: Tokenizes histories without tokens; the actor's by default.
            tokenizer_kwargs: Arguments of `History.apply_chat_template`.
            kl_direction: "reverse" or "forward".
            reduction: Over sequences: "mean", "sum" or "none".
            normalize_by_seq_length: Divide a sequence's sum by its number of tokens that count.
            assistant_only: True for the assistant's tokens, False for all.
            device: Accepted for TorchRL's sake: the loss is computed where the batch is.

        Raises:
            ValueError: For another direction or reduction, or an actor with generate=True.
        """
        settings = dict(locals())
        check_choice("kl_direction", kl_direction, DIRECTIONS)
        self._configure(settings)

    def _set_in_keys(self) -> None:
        self.in_keys = [self.tensor_keys.history, self.tensor_keys.teacher_log_prob]
        self.out_keys = ["loss_distill", "kl_to_teacher"]

    def forward(self, tensordict: TensorDictBase) -> DistillationLossOutput:
        """Compute the loss of the conversations in a tensordict of any batch size, which is not changed.

        Raises ValueError for a conversation without tokens that count or for different shapes, KeyError for missing
        log-probs, RuntimeError if the teacher's log-probs cover the assistant's tokens only, but all tokens count.
        """
        rows, scored = self._scored(tensordict, "rlhf" if self.assistant_only else "generic")
        key, assistant = self.tensor_keys.teacher_log_prob, column(rows, ASSISTANT)
        source = "Append RetrieveLogProb(teacher, log_probs_full_key=('teacher_log_probs', 'full')) to the environment"
        values = read(rows, key, "Teacher log-probs", KeyError, source=source)
        teacher = scored.layout.flat(values, key).detach()
        if not self.assistant_only and assistant is not None:
            others = scored.mask & ~scored.layout.flat(assistant, ASSISTANT).bool()
            if bool(others.any()) and not bool(teacher[others].any()):
                raise RuntimeError(
                    "The teacher's log-probs are 0 on all tokens that are not the assistant's, as "
                    "RetrieveLogProb(assistant_only=True) writes them, but the loss has assistant_only=False. Use the "
                    "same value for both."
                )
        mask, ids = scored.mask, scored.layout.sequence_ids
        student, teacher = (torch.where(mask, one, 0.0) for one in (scored.logprobs, teacher))
        pair = (teacher, student) if self.kl_direction == "reverse" else (student, teacher)
        kl = k3_kl_token_estimate(*pair)
        sums = kl.new_zeros(len(scored.layout.widths)).index_add(0, ids, kl)
        if self.normalize_by_seq_length:
            sums = sums / token_counts(scored)
        reduced: Tensor = {"mean": sums.mean(), "sum": sums.sum(), "none": sums}[self.reduction]
        return DistillationLossOutput(loss_distill=reduced, kl_to_teacher=sums.detach().mean(), batch_size=[])
