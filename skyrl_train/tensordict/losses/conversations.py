"""Log-probs of complete conversations under a policy, for SFT and distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from skyrl_train.tensordict.losses.scoring import ASSISTANT, ATTENTION, Scored, check_actor, read, score
from skyrl_train.tensordict.ragged import Key, TokenLayout, column, flattened


@dataclass
class ConversationKeys:
    """Keys of a conversation. Without `tokens`, they are made from `history`."""

    history: Key = ("history", "full")
    tokens: Key = ("tokens", "full")
    log_probs: Key = ("log_probs", "full")
    """Key at which a policy without distributions writes its log-probs."""


class ConversationLoss:
    """A mixin of losses on conversations. For actors see scoring.py.

    Tokens and masks are read if the tensordict has them. Otherwise the history is tokenized with `tokenizer` or,
    without one, with the actor's tokenizer and template, or by the actor's forward.
    """

    actor_network: Any
    tokenizer: Any
    tokenizer_kwargs: dict[str, Any]
    tensor_keys: Any

    def _set_actor(self, actor_network: Any, tokenizer: Any, tokenizer_kwargs: Mapping[str, Any] | None) -> None:
        check_actor(actor_network)
        self.actor_network, self.tokenizer, self.tokenizer_kwargs = (
            actor_network,
            tokenizer,
            dict(tokenizer_kwargs or {}),
        )

    def _rows(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the rows of a tensordict of any batch size, with tokens and masks where the loss can make them.

        Raises ValueError for a missing actor.
        """
        if self.actor_network is None:
            raise ValueError("The loss has no actor_network. Create the loss with the policy to train.")
        rows = flattened(tensordict)
        return rows if column(rows, self.tensor_keys.tokens) is not None else self._tokenized(rows)

    def _scored(self, rows: TensorDictBase, strategy: str = "rlhf") -> Scored:
        """Score conversations [B]; `strategy` is `scoring.token_mask`'s.

        Raises ValueError for different shapes or a conversation without tokens that count, KeyError if the actor writes
        no log-probs.
        """
        keys = self.tensor_keys
        if column(rows, keys.tokens) is not None:
            found = score(self.actor_network, rows, keys.tokens, strategy, entropy=False, log_probs=keys.log_probs)
        else:
            found = self._scored_by_actor(rows.copy(), strategy)
        silent = (token_counts(found) == 0).nonzero()[:, 0].tolist()
        if silent:
            raise ValueError(
                f"Some sequences have no tokens of the assistant to train on: rows {', '.join(map(str, silent))}. "
                "Leave them out, or use a chat template that marks the assistant's tokens with {% generation %}."
            )
        return found

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
