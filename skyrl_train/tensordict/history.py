"""TorchRL's conversations with this project's exact rendering; the last batch dimension indexes the turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack
from torchrl.data.llm.history import ContentBase as ContentBase, History as TorchRLHistory

from skyrl_train.data.chat import (
    render_conversation,
    render_generation_prompt,
    render_messages,
    render_prompt,
    render_text,
)
from skyrl_train.data.messages import join_text_parts
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.tensordict.chat_templates import (
    add_chat_template as add_chat_template,
    parse_text,
    template_options as template_options,
)
from skyrl_train.tensordict.ragged import nested_stack, rows_of

NO_MESSAGE = "<none>"
"""Role of a padding entry in a stack of conversations."""


class History(TorchRLHistory):  # type: ignore[misc]
    """A conversation [turns], or a batch of conversations [B, turns]; a History [] is a single message.

    It has the fields of TorchRL's class (role, content, is_complete, tool_calls and tool_responses), and both can be
    appended to each other. Stack only instances of one class; `converted` changes it.
    """

    @classmethod
    def from_chats(cls, chats: Sequence[Any]) -> History:
        """Build a History from messages: [turns] from a list of dicts, [B, turns] from a list of such lists.

        A message has "role" and "content", and optionally "is_complete", "tool_calls" and "tool_responses".
        Raises DataError for an empty list.
        """
        if not chats:
            raise DataError("History.from_chats got an empty list. Give at least one message.")
        if not isinstance(chats[0], Mapping):
            return lazy_stack([cls.from_chats(chat) for chat in chats])  # type: ignore[no-any-return]
        turns = []
        for message in chats:
            content = join_text_parts(message["content"])
            content = NonTensorData(content) if isinstance(content, list) else content  # parts may differ in their keys
            fields = {"role": message["role"], "content": content}
            fields["is_complete"] = bool(message.get("is_complete", True))
            for name in ("tool_calls", "tool_responses"):
                if message.get(name) is not None:
                    fields[name] = NonTensorData(message[name])
            turns.append(cls(**fields, batch_size=()))
        return lazy_stack(turns)  # type: ignore[no-any-return]

    def to_chats(self) -> list[Any]:
        """Return the messages as dicts: the inverse of `from_chats`. Padding entries of a stack are left out.

        Raises RuntimeError for a History without a batch dimension.
        """
        if self.ndim > 1:
            return [History.to_chats(history) for history in self.unbind(0)]
        if self.ndim == 0:
            raise RuntimeError(
                "A History without a batch dimension is a single message, not a conversation. Unsqueeze it first."
            )
        chat: list[dict[str, Any]] = []
        for turn in self._tensordict.unbind(0):  # tensor classes take microseconds for each attribute
            role, complete = _plain(turn.get("role")), _plain(turn.get("is_complete", None))
            if role == NO_MESSAGE:
                continue
            message = {"role": role, "content": _content(_plain(turn.get("content")))}
            for name in ("tool_calls", "tool_responses"):
                if (value := _plain(turn.get(name, None))) is not None:
                    message[name] = value
            if complete is not None and not complete:
                message["is_complete"] = False
            chat.append(message)
        return chat

    def append(self, history: History, inplace: bool = True, dim: int = -1) -> History:
        """Append one message to every conversation; otherwise like `extend`.

        Raises RuntimeError if `history` does not have exactly one dimension fewer than `self`.
        """
        if history.ndim != self.ndim - 1:
            raise RuntimeError(
                f"append takes a History of {self.ndim - 1} dimensions, got {history.ndim}. Use unsqueeze(0) to make a "
                "conversation of a message."
            )
        return self.extend(history.unsqueeze(dim), inplace, dim)

    def extend(self, history: History, inplace: bool = True, dim: int = 0) -> History:
        """Append the turns (dimension `dim`) of a History of this class or of TorchRL's, and return the result.

        With `inplace`, it is `self`, changed. Raises RuntimeError if the numbers of dimensions differ, or are 0.
        """
        if not self.ndim or history.ndim != self.ndim:
            raise RuntimeError(
                f"The new history to extend with has {history.ndim} dimensions, this one has {self.ndim}; both need "
                "the same number of dimensions, at least 1."
            )
        history = converted(history, type(self))
        if history.device != self.device:
            history = history.copy().clear_device_() if self.device is None else history.to(self.device)
        joined = _joined(self, history, dim % self.ndim)
        if not inplace:
            return joined  # type: ignore[no-any-return]
        self.__dict__["_tensordict"] = joined._tensordict
        return self

    def apply_chat_template(
        self,
        *,
        tokenizer: Any,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        chat_template_name: str | None = None,
        continue_final_message: bool = False,
        tokenize: bool | None = None,
        padding: bool = False,
        truncation: bool = False,
        return_tensors: str | None = None,
        return_dict: bool | None = None,
        return_assistant_tokens_mask: bool = False,
        **template_kwargs: Any,
    ) -> Any:
        """Render conversations with a chat template, to text, to token ids or to a TensorDict.

        [turns] gives one result, [..., turns] lists of texts or ids, or a lazy stack of TensorDicts. Control tokens
        come only from the template; if a message spells one, it is encoded as plain characters. Masks need no
        {% generation %} blocks; the token that ends an answer belongs to it. With a mask, and where the template drops
        the reasoning of earlier turns, ids and mask are those of the last answer and the context that it is given in.

        Args:
            tokenizer: Hugging Face tokenizer.
            add_generation_prompt: True ends with the header of the model's next answer.
            chat_template: Jinja template; None for the named one.
            chat_template_name: Name of a template; None for the tokenizer's own.
            continue_final_message: True leaves the last message open.
            tokenize: True for ids [1, L], False for text; None for ids only if another argument requires them.
            padding: True pads a lazy stack on the left.
            truncation: Must be False, because conversations are never truncated.
            return_tensors: "pt" for ids as tensors; None.
            return_dict: True for a TensorDict with "input_ids", "attention_mask" and "assistant_masks", int64 [L].
            return_assistant_tokens_mask: True for such a TensorDict with the mask of the assistant's tokens.
            **template_kwargs: Variables of the template.

        Raises:
            ConfigError: There is no such template, or arguments contradict each other.
            DataError: The template rejects the messages, or does not write all of their text.
        """
        options = template_options(tokenizer, chat_template, chat_template_name) | template_kwargs
        chats, shape = [rendered_form(one.to_chats()) for one in rows_of(self, 1)], self.batch_size[:-1]
        if return_tensors not in (None, "pt"):
            raise ConfigError(f"return_tensors={return_tensors!r} is not 'pt' or None: ids are torch tensors.")
        if not (tokenize or (tokenize is None and (return_assistant_tokens_mask or return_tensors or return_dict))):
            mode = "continue" if continue_final_message else "open" if add_generation_prompt else "closed"
            return nested_stack([render_text(tokenizer, chat, options, mode=mode) for chat in chats], shape, list)
        if truncation:
            raise ConfigError("truncation=True would cut a conversation silently. Shorten the messages instead.")
        if continue_final_message and return_assistant_tokens_mask:
            raise ConfigError(
                "continue_final_message=True cannot be combined with return_assistant_tokens_mask=True: a message to "
                "be continued has no mask. Leave one of them out."
            )
        if return_assistant_tokens_mask:
            rows = [_with_mask(tokenizer, chat, options, add_generation_prompt) for chat in chats]
        elif continue_final_message or add_generation_prompt:
            opened = partial(render_prompt, tokenizer, continue_final_message=continue_final_message)
            rows = [(opened(chat, options), []) for chat in chats]
        else:
            rows = [(render_messages(tokenizer, chat, options), []) for chat in chats]
        found = _tensors(rows, tokenizer, padding, return_assistant_tokens_mask)
        if return_dict or return_assistant_tokens_mask:
            return nested_stack(found, shape)
        return nested_stack([row["input_ids"].unsqueeze(0) for row in found], shape, list)

    @classmethod
    def from_text(
        cls,
        text: str | list[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: Any = None,
    ) -> History:
        """Parse a rendered text into a conversation, for inspecting texts; wrappers never need it.

        Without a name, a template added with a keyword in the tokenizer's path determines the format, else the control
        tokens: ChatML, Llama 3 or Llama 4. A last turn without an end token has is_complete=False. The templates
        "dialogpt" and "deepseek" end turns with the tokenizer's eos_token, so pass the tokenizer, too.
        Raises ConfigError for a template without a parser, RuntimeError if no turn is recognized.
        """
        if isinstance(text, list):
            return lazy_stack([cls.from_text(one, chat_template_name, chat_template, tokenizer) for one in text])  # type: ignore[no-any-return]
        parsed = parse_text(text, chat_template_name, tokenizer)
        return cls.from_chats(parsed) if isinstance(parsed, list) else converted(parsed, cls)  # type: ignore[no-any-return]


def converted(history: Any, kind: type) -> Any:
    """Return a History of this package or of TorchRL as an instance of `kind`, which is one of the two classes."""
    if type(history) is kind:
        return history
    return kind.from_tensordict(history._tensordict.copy())  # type: ignore[attr-defined]


def rendered_form(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages without "is_complete", which chat templates do not know."""
    return [{name: value for name, value in message.items() if name != "is_complete"} for message in messages]


def _plain(value: Any) -> Any:
    if isinstance(value, NonTensorStack):
        return value.tolist()
    return value.data if isinstance(value, NonTensorData) else value


def _content(value: Any) -> Any:
    """Return the content for a chat template. Parts that are all text are joined, for templates without parts."""
    if isinstance(value, ContentBase) and value.ndim:
        value = list(value.unbind(0))
    parts = value if isinstance(value, list) else [value]
    if not any(isinstance(one, ContentBase) for one in parts):
        return value
    return join_text_parts([one.to_dict(retain_none=False) if isinstance(one, ContentBase) else one for one in parts])


def _joined(first: Any, second: Any, dim: int) -> Any:
    if dim == 0:
        return lazy_stack([*first.unbind(0), *second.unbind(0)])
    pairs = zip(first.unbind(0), second.unbind(0), strict=True)
    return lazy_stack([_joined(one, other, dim - 1) for one, other in pairs])


def _with_mask(tokenizer: Any, messages: list[Any], options: dict[str, Any], header: bool) -> Any:
    ids, mask = render_conversation(tokenizer, messages, options)
    end = render_generation_prompt(tokenizer, messages, options) if header else []
    return ids + end, mask + [False] * len(end)


def _tensors(rows: Any, tokenizer: Any, padding: bool, masked: bool) -> list[TensorDict]:
    width = max(len(ids) for ids, _ in rows) if padding else 0
    out = []
    for ids, mask in rows:
        pad = max(0, width - len(ids))
        columns = {"input_ids": [pad_id(tokenizer)] * pad + ids, "attention_mask": [0] * pad + [1] * len(ids)}
        if masked:
            columns["assistant_masks"] = [0] * pad + [int(one) for one in mask]
        out.append(TensorDict({name: torch.tensor(values) for name, values in columns.items()}))
    return out


def pad_id(tokenizer: Any) -> int:
    """Return the tokenizer's pad id, else its end-of-sequence id, else 0. Masks mark the padding, so any id works."""
    for name in ("pad_token_id", "eos_token_id"):
        if (found := getattr(tokenizer, name, None)) is not None:
            return int(found)
    return 0
