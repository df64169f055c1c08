"""Supervised fine-tuning on tensordicts: TorchRL's names and arguments over the trainer's own losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.reductions import seq_mean_token_sum_norm, sequence_mean, token_mean
from skyrl_train.algorithms.sft import minor_sft, sft
from skyrl_train.tensordict.losses.grpo import constant, mean_over, replaced_keys
from skyrl_train.tensordict.losses.scoring import ASSISTANT, ATTENTION, Actor, check_actor, read, score, scored_texts
from skyrl_train.tensordict.ragged import Key, TokenLayout, column, flattened

LOSS_FUNCTIONS = ("sft", "minor_sft")
REDUCTIONS = ("mean", "sum", "none")


class SFTLossOutput(TensorClass["nocast"]):  # type: ignore[misc, name-defined]
    """The losses of an SFTLoss, in float64; None if their term is disabled."""

    loss_sft: Tensor
    """A scalar, or [B] with reduction "none"."""
    loss_kl_to_ref: Tensor | None = None
    """kl_to_ref_coeff * kl_to_ref."""
    kl_to_ref: Tensor | None = None
    """The mean over all tokens that count, in nats."""

    @property
    def loss(self) -> Tensor:
        """The sum of `loss_sft` and, if enabled, `loss_kl_to_ref`. Call `backward` on it."""
        return self.loss_sft if self.loss_kl_to_ref is None else self.loss_sft + self.loss_kl_to_ref


@dataclass(frozen=True)
class SFTKeys:
    """The keys that an SFTLoss reads. Without `tokens`, they are made from `history`."""

    history: Key = ("history", "full")
    tokens: Key = ("tokens", "full")
    ref_log_probs: Key = ("next", "ref_log_probs", "full")


class SFTLoss(TensorDictModuleBase):
    """Negative log-likelihood of the assistant's tokens in whole conversations. For actors see scoring.py.

    "sft"         -sum of a sequence's log-probs
    "minor_sft"   -log sigmoid(beta (sum of log-probs - sum of the reference's)) (arXiv:2408.10642)

    With `normalize_by_seq_length`, sums are replaced by means. Tokens and masks are read if the tensordict has them;
    otherwise the history is tokenized with `tokenizer` or, without one, by the actor.
    """

    def __init__(
        self,
        actor_network: Actor | None,
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
            device: Device to which to move the module.

        Raises:
            ValueError: For another reduction, an unknown loss, or an actor with generate=True.
        """
        super().__init__()
        if reduction not in REDUCTIONS:
            raise ValueError(f"reduction={reduction!r} must be one of {', '.join(REDUCTIONS)}.")
        if loss_function not in LOSS_FUNCTIONS:
            raise ValueError(f"loss_function={loss_function!r} must be one of {', '.join(LOSS_FUNCTIONS)}.")
        check_actor(actor_network)
        self.actor_network = actor_network
        self.tokenizer = tokenizer
        self.tokenizer_kwargs = dict(tokenizer_kwargs or {})
        self.reduction = reduction
        self.normalize_by_seq_length = normalize_by_seq_length
        self.kl_to_ref_coeff = kl_to_ref_coeff
        self.loss_function = loss_function
        self.beta = beta
        of_kl = ["loss_kl_to_ref", "kl_to_ref"] if kl_to_ref_coeff else []
        self.out_keys = ["loss_sft", *of_kl]
        self.set_keys()
        if device is not None:
            self.to(device)

    @property
    def reads_reference(self) -> bool:
        """True if a term needs the reference's log-probs."""
        return bool(self.kl_to_ref_coeff) or self.loss_function == "minor_sft"

    def set_keys(self, **keys: Key) -> None:
        """Set the keys to read, by the names in SFTKeys. Raises ValueError for another name."""
        self.tensor_keys = replaced_keys(getattr(self, "tensor_keys", SFTKeys()), keys)
        self.in_keys = [self.tensor_keys.history, *([self.tensor_keys.ref_log_probs] if self.reads_reference else [])]

    def forward(self, tensordict: TensorDictBase) -> SFTLossOutput:
        """Compute the losses of the conversations in a tensordict of any batch size, which is not changed.

        Raises ValueError for a conversation without tokens of the assistant or for different shapes, KeyError for
        missing log-probs, RuntimeError if the reference's log-probs require a gradient.
        """
        rows, key = flattened(tensordict), self.tensor_keys.ref_log_probs
        layout, mask, logprobs = self._scored(rows)
        ids, count = layout.sequence_ids, len(layout.widths)
        lengths = torch.zeros(count, dtype=torch.int64, device=mask.device).index_add(0, ids, mask.long())
        silent = (lengths == 0).nonzero()[:, 0].tolist()
        if silent:
            raise ValueError(
                f"These rows have no tokens of the assistant to train on: {', '.join(map(str, silent))}. Leave them "
                "out, or use a chat template that marks the assistant's tokens with {% generation %}."
            )
        reference = None
        if self.reads_reference:
            values = read(rows, key, "log-probs of the reference", KeyError)
            reference = constant(layout.flat(values, key), key)
        found = {"loss_sft": self._loss(logprobs, reference, mask, ids, lengths)}
        if self.kl_to_ref_coeff and reference is not None:
            kl = k3(logprobs, reference, mask)
            found["kl_to_ref"] = mean_over(kl.detach(), mask)
            found["loss_kl_to_ref"] = self.kl_to_ref_coeff * (kl * token_mean(mask, ids, ids, max_seq_len=1)).sum()
        return SFTLossOutput(**found, batch_size=[])

    def _loss(self, logprobs: Tensor, reference: Tensor | None, mask: Tensor, ids: Tensor, lengths: Tensor) -> Tensor:
        if self.loss_function == "minor_sft":
            assert reference is not None
            share = 1 / lengths[ids].double() if self.normalize_by_seq_length else torch.ones_like(logprobs)
            values = minor_sft(
                logprobs * share, mask, ref_logprobs=reference * share, sequence_ids=ids, minor_beta=self.beta
            )
        else:
            values = sft(logprobs, mask)
        means = self.loss_function == "minor_sft" or self.normalize_by_seq_length  # minor_sft: one value on all tokens
        weights = (sequence_mean if means else seq_mean_token_sum_norm)(mask, ids, ids, max_seq_len=1)
        if self.reduction == "mean":
            return (values * weights).sum()
        of_sequences = (values * weights).new_zeros(len(lengths)).index_add(0, ids, values * weights) * len(lengths)
        return of_sequences.sum() if self.reduction == "sum" else of_sequences

    def _scored(self, rows: TensorDictBase) -> tuple[TokenLayout, Tensor, Tensor]:
        """Return the layout, the mask [T] of the assistant's tokens, and the log-probs [T]."""
        keys = self.tensor_keys
        if self.actor_network is None:
            raise ValueError("The loss has no actor_network. Create the loss with the policy to train.")
        if column(rows, keys.tokens) is None:
            rows = self._tokenised(rows)
        if column(rows, keys.tokens) is not None:
            scored = score(self.actor_network, rows, keys.tokens, "rlhf", entropy=False)
            return scored.layout, scored.mask, scored.logprobs
        result, logprobs, layout = scored_texts(self.actor_network, rows.copy(), keys.tokens)
        mask = layout.flat(read(result, ASSISTANT, "assistant mask of the policy"), ASSISTANT).bool()
        return layout, mask & ~layout.first_tokens, logprobs

    def _tokenised(self, rows: TensorDictBase) -> TensorDictBase:
        """Return rows with the tokens and masks of their histories, each rendered separately without padding.

        Uses `tokenizer`, else the actor's tokenizer and template. Without either, rows are returned unchanged: then the
        log-probs from the actor's forward have a gradient only if the actor provides one.
        """
        tokenizer, template = self.tokenizer, {}
        if tokenizer is None:
            tokenizer = getattr(self.actor_network, "tokenizer", None)
            if tokenizer is None or any(row.get(self.tensor_keys.history, None) is None for row in rows.unbind(0)):
                return rows
            names = ("chat_template", "chat_template_name")
            template = {name: getattr(self.actor_network, name, None) for name in names}
        settings = {"add_generation_prompt": False, **template, **self.tokenizer_kwargs}
        settings |= {"return_dict": True, "return_tensors": "pt", "return_assistant_tokens_mask": True}
        made = []
        for row in rows.unbind(0):
            if row.get(self.tensor_keys.history, None) is None:
                raise ValueError(
                    f"No conversation at {self.tensor_keys.history!r} and no tokens at {self.tensor_keys.tokens!r}. "
                    "Name other keys with set_keys."
                )
            found = row[self.tensor_keys.history].apply_chat_template(tokenizer=tokenizer, **settings)
            row = row.copy()
            row.set(self.tensor_keys.tokens, torch.as_tensor(found["input_ids"]).reshape(-1))
            row.set(ASSISTANT, torch.as_tensor(found["assistant_masks"]).reshape(-1).bool())
            row.set(ATTENTION, torch.as_tensor(found["attention_mask"]).reshape(-1).bool())
            made.append(row)
        return lazy_stack(made)
