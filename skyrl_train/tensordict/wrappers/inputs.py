"""Conversion of tensordict rows to inputs of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor
from torchrl.data.llm import History as TorchRLHistory

from skyrl_train.data.chat import is_control_token, render_conversation, render_prompt
from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.data.messages import continues_last_message
from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.history import History, pad_id, rendered_form, template_options

MODES = ("history", "text", "tokens")


@dataclass(frozen=True)
class EngineInput:
    """One prompt to continue, or one whole sequence to score."""

    ids: list[int]
    text: str | None = None
    history: Any = None
    """A History, of this package or of TorchRL."""
    assistant: list[bool] = field(default_factory=list)
    """Mask of the `ids` that the assistant wrote, if the sequence is scored."""
    copy: int = 0
    """Number of earlier rows of the call that equal this one; used with a seed."""


@dataclass(frozen=True)
class Reader:
    """Reads a wrapper's input. `key` is (container, field); a bare input is under the container's own key."""

    mode: str
    key: tuple[str, ...]
    tokenizer: Any
    settings: Mapping[str, Any]
    """The wrapper's, by name."""
    whole: bool
    """True if rows are scored: conversations are then rendered without the header of a next answer."""

    def read(self, rows: list[TensorDictBase]) -> list[EngineInput]:
        """Return the engine's inputs, one per row.

        Raises ConfigError for no rows, a missing key or a row without tokens, TypeError for a value of another type.
        """
        if not rows:
            raise ConfigError("The tensordict has batch size 0. Give at least one row.")
        read = {"history": self._history, "text": self._text, "tokens": self._tokens}[self.mode]
        found = [read(row) for row in rows]
        for place, row in enumerate(found):
            if not row.ids:
                raise ConfigError(f"row {place} at {self.key} has no tokens. Give a prompt that is not empty.")
        return found

    @property
    def template_options(self) -> Any:
        """Settings of the chat template. Raises ConfigError if there is none."""
        return template_options(self.tokenizer, self.settings["chat_template"], self.settings["chat_template_name"])

    @cached_property
    def end_of_turn(self) -> int | None:
        """Id of the token that ends an answer in the chat template. None without a template or outside history mode."""
        if self.mode == "history":
            with suppress(ConfigError):  # rows that hold tokens need no template
                return find_end_of_turn_token(self.tokenizer, self.template_options)
        return None

    def _field(self, row: TensorDictBase, container: str, name: str) -> Any:
        return lookup(row, (self.settings[f"{container}_key"], name), bare=False)

    def _value(self, row: TensorDictBase) -> Any:
        value = lookup(row, self.key)
        if value is None:
            what = f"{self.key} (or {self.key[0]!r})" if len(self.key) > 1 else repr(self.key[0])
            raise ConfigError(
                f"Expected {what} key for input_mode={self.mode!r}; the tensordict has "
                f"{sorted(map(str, row.keys()))}. Set input_mode or input_key."
            )
        return value

    def _history(self, row: TensorDictBase) -> EngineInput:
        history = self._value(row)
        if not isinstance(history, TorchRLHistory):
            raise TypeError(f"Expected History object at {self.key}, got {type(history).__name__}.")
        if history.device is not None:  # messages are text: new ones are appended on any device
            history = history.copy().clear_device_()
        if self.settings["prefer_tokens"] and not self.whole:
            for name in ("prompt", "full"):
                if isinstance(tokens := self._field(row, "tokens", name), Tensor):
                    return EngineInput(self._real(tokens, row, name == "full"), history=history)
        messages = History.to_chats(history)
        options, plain = self.template_options, rendered_form(messages)
        if not self.whole:
            goes_on = continues_last_message(plain) and messages[-1].get("is_complete") is False
            ids = render_prompt(self.tokenizer, plain, options, continue_final_message=goes_on)
            return EngineInput(ids, history=history)
        ids, mask = render_conversation(self.tokenizer, plain, options)
        if messages and messages[-1].get("is_complete") is False and any(mask):
            last = max(place for place, one in enumerate(mask) if one)
            end = last if is_control_token(self.tokenizer, ids[last]) else last + 1
            ids, mask = ids[:end], mask[:end]
        return EngineInput(ids, history=history, assistant=mask)

    def _text(self, row: TensorDictBase) -> EngineInput:
        text = self._value(row)
        if not isinstance(text, str):
            raise TypeError(f"{self.key} must hold a string, got {type(text).__name__}.")
        options = {"add_special_tokens": False, **self.settings["tokenizer_kwargs"]}
        ids = list(self.tokenizer(text, **options)["input_ids"])
        return EngineInput(ids, text=text, assistant=self._copied(row, ids))

    def _tokens(self, row: TensorDictBase) -> EngineInput:
        tokens = self._value(row)
        if not isinstance(tokens, Tensor) or tokens.dim() != 1:
            raise TypeError(f"{self.key} must hold one-dimensional token ids per row, got {type(tokens).__name__}.")
        ids = self._real(tokens, row, self.whole)
        return EngineInput(ids, assistant=self._copied(row, ids))

    def _copied(self, row: TensorDictBase, ids: list[int]) -> list[bool]:
        """The assistant's tokens according to the input: its mask, else the tokens after its prompt, else none."""
        if not self.whole:
            return []
        mask, attention = (self._field(row, "masks", f"all_{name}_mask") for name in ("assistant", "attention"))
        if isinstance(mask, Tensor):
            kept = mask[attention.bool()] if isinstance(attention, Tensor) else mask
            if len(kept) == len(ids):
                return kept.bool().tolist()
        nothing = [False] * len(ids)
        with suppress(ConfigError):
            return self.response(row, ids, nothing)
        return nothing

    def response(self, row: TensorDictBase, ids: list[int], assistant: list[bool]) -> list[bool]:
        """Return a mask of the ids after the prompt of a whole sequence, or `assistant` without a prompt.

        Raises ConfigError if the sequence does not begin with the prompt.
        """
        prompt = self._field(row, "tokens", "prompt")
        if not isinstance(prompt, Tensor):
            return assistant
        before = self._real(prompt, row, False)
        if ids[: len(before)] != before:
            raise ConfigError(
                f"({self.settings['tokens_key']!r}, 'prompt') does not match the beginning of the sequence. Leave it "
                "out, or write the prompt that the sequence begins with."
            )
        return [False] * len(before) + [True] * (len(ids) - len(before))

    def _real(self, tokens: Tensor, row: TensorDictBase, both_sides: bool) -> list[int]:
        """Token ids without padding, by a mask that is as long as they are, or as the full sequence that they begin.

        Without a mask and without `padded=False`, a run of the pad id on the padded side is taken for padding; if the
        pad id is also the end of sequence, one is kept after a sequence: it may have been sampled.
        """
        for key in ((self.settings["masks_key"], "all_attention_mask"), (self.settings["attention_mask_key"],)):
            mask = lookup(row, key, bare=False) if key[0] else None
            if isinstance(mask, Tensor) and (mask.shape == tokens.shape or self._begins(tokens, mask, row)):
                return [int(one) for one in tokens[mask[: len(tokens)].bool()]]
        ids: list[int] = tokens.tolist()
        padded = self._field(row, "tokens", "padded")
        if (padded is not None and not padded) or self.tokenizer is None:
            return ids
        pad, start, end = pad_id(self.tokenizer), 0, len(ids)
        while start < end and ids[start] == pad:
            start += 1
        while both_sides and end > start and ids[end - 1] == pad:
            end -= 1
        keep = end < len(ids) and pad == getattr(self.tokenizer, "eos_token_id", None)
        return ids[start : end + 1 if keep else end]

    def _begins(self, tokens: Tensor, mask: Tensor, row: TensorDictBase) -> bool:
        """True if a mask belongs to a full sequence that begins with these tokens, not to an older sequence."""
        full = self._field(row, "tokens", "full")
        whole = isinstance(full, Tensor) and full.shape == mask.shape and len(full) > len(tokens)
        return whole and torch.equal(full[: len(tokens)], tokens)


def lookup(row: TensorDictBase, key: tuple[str, ...], bare: bool = True) -> Any:
    """Return the value at `key` of a row, or None; with `bare`, also a value directly under the key's first part."""
    value: Any = row.get(key[0], None)
    if len(key) > 1 and value is not None:
        if not hasattr(value, "get") or isinstance(value, TorchRLHistory | NonTensorData):
            value = value if bare else None
        else:
            value = value.get(key[1], None) if key[1] in value.keys() else None  # noqa: SIM118
    return value.data if isinstance(value, NonTensorData) else value
