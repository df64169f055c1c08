"""Log-probs of complete conversations under a policy, for SFT and distillation."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.objectives import LossModule

from skyrl_train.tensordict.losses.scoring import ASSISTANT, ATTENTION, Scored, check_actor, check_choice, read, score
from skyrl_train.tensordict.ragged import TokenLayout, column, flattened

REDUCTIONS = ("mean", "sum", "none")


class ConversationLoss(LossModule):  # type: ignore[misc]
    """A mixin of losses on conversations. For actors see scoring.py.

    Tokens and masks are read if the tensordict has them. Otherwise the history is tokenized with `tokenizer` or,
    without one, with the actor's tokenizer and template, or by the actor's forward.
    """

    def _configure(self, settings: dict[str, Any]) -> None:
        """Store a constructor's arguments; TorchRL's constructors would require a tokenizer and choose its settings."""
        LossModule.__init__(self)
        del settings["self"], settings["device"]
        check_choice("reduction", settings["reduction"], REDUCTIONS)
        check_actor(settings["actor_network"])
        for name, value in settings.items():
            setattr(self, name, value)
        self.tokenizer_kwargs = dict(settings["tokenizer_kwargs"] or {})
        self._set_in_keys()

    def _scored(self, tensordict: TensorDictBase, strategy: str = "rlhf") -> tuple[TensorDictBase, Scored]:
        """Return the conversations [B] of a tensordict of any batch size, and their scores.

        `strategy` is `scoring.token_mask`'s. Raises ValueError for a missing actor, different shapes or a conversation
        without tokens that count, KeyError if the actor writes no log-probs.
        """
        if self.actor_network is None:
            raise ValueError("The loss has no actor_network. Create the loss with the policy to train.")
        rows, keys = flattened(tensordict), self.tensor_keys
        if column(rows, keys.tokens) is None:
            rows = self._tokenized(rows)
        if column(rows, keys.tokens) is not None:
            found = score(self.actor_network, rows, keys.tokens, strategy, entropy=0, log_probs=keys.log_probs)
        else:
            found = self._scored_by_actor(rows.copy(), strategy)
        silent = (token_counts(found) == 0).nonzero()[:, 0].tolist()
        if silent:
            raise ValueError(
                f"Some sequences have no tokens of the assistant to train on: rows {', '.join(map(str, silent))}. "
                "Leave them out, or use a chat template that marks the assistant's tokens with {% generation %}."
            )
        return rows, found

    def _scored_by_actor(self, rows: TensorDictBase, strategy: str) -> Scored:
        """Score with an actor that makes the tokens itself, or with masks that come with the conversations."""
        keys, result = self.tensor_keys, self.actor_network(rows)
        values = read(result, keys.log_probs, "policy's log-probs", KeyError)
        attention = column(result, ATTENTION)
        tokens = values if attention is not None else read(result, keys.tokens, "policy's tokens")
        layout = TokenLayout.of(tokens, attention)
        mask = ~layout.first_tokens
        if strategy == "rlhf":
            mask &= layout.flat(read(result, ASSISTANT, "policy's assistant mask"), ASSISTANT).bool()
        return Scored(layout, mask, layout.flat(values, keys.log_probs), None)

    def _tokenized(self, rows: TensorDictBase) -> TensorDictBase:
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


def token_counts(scored: Scored) -> Tensor:
    """Return the number of tokens that count in each sequence, int64 [B]."""
    counts = torch.zeros(len(scored.layout.widths), dtype=torch.int64, device=scored.mask.device)
    return counts.index_add(0, scored.layout.sequence_ids, scored.mask.long())
