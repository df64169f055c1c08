"""Tensor classes for conversations; the last batch dimension indexes the turns."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict, lazy_stack

from skyrl_train.data.chat import (
    render_conversation,
    render_generation_prompt,
    render_messages,
    render_prompt,
    render_text,
)
from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.data.messages import join_text_parts
from skyrl_train.errors import ConfigError, DataError

NO_MESSAGE = "<none>"
"""Role of a padding entry in a stack of conversations."""
Parser = Callable[[str], list[dict[str, Any]]]
_OTHER_NAMES = {
    "chatml_format": TEMPLATES["chatml"],
    "qwen": "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}" + TEMPLATES["chatml"],
    "llama": TEMPLATES["llama3"],
    "llama4": TEMPLATES["llama3"]
    .replace("<|start_header_id|>", "<|header_start|>")
    .replace("<|end_header_id|>", "<|header_end|>")
    .replace("<|eot_id|>", "<|eot|>"),
}
_ADDED: dict[str, str] = {}
_PARSERS: dict[str, Parser] = {}


class ContentBase(TensorClass["nocast", "shadow"]):  # type: ignore[name-defined]
    """One part of a multi-part message."""

    type: str  # text | image | audio | video | file | function_call
    text: str | None = None
    url: str | None = None
    data: str | None = None
    mime_type: str | None = None
    name: str | None = None
    size: int | None = None
    function_name: str | None = None
    function_args: dict | None = None


class History(TensorClass["nocast"]):  # type: ignore[name-defined]
    """A conversation [turns], or a batch of conversations [B, turns]; a History [] is a single message."""

    role: str
    content: str
    is_complete: bool = True
    tool_calls: list[dict] | None = None
    tool_responses: list[str] | None = None

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
            return [history.to_chats() for history in self.unbind(0)]
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
        """Append one message to every conversation and return the result.

        Args:
            history: The messages, with one dimension fewer than `self`.
            inplace: True changes `self` and returns it; False leaves it unchanged.
            dim: Dimension of the turns; -1 is the last one.

        Raises:
            RuntimeError: `history` does not have exactly one dimension fewer than `self`.
        """
        if history.ndim != self.ndim - 1:
            raise RuntimeError(f"append takes a History of {self.ndim - 1} dimensions, got {history.ndim}.")
        return self.extend(history.unsqueeze(dim), inplace, dim)

    def extend(self, history: History, inplace: bool = True, dim: int = 0) -> History:
        """Append the messages of another History and return the result.

        Args:
            history: A History of this package or of TorchRL, with the same number of dimensions as `self`.
            inplace: True changes `self` and returns it; False leaves it unchanged.
            dim: Dimension of the turns.

        Raises:
            RuntimeError: The numbers of dimensions differ, or are 0.
        """
        if not self.ndim or history.ndim != self.ndim:
            raise RuntimeError(
                f"extend got {self.ndim} and {history.ndim} dimensions; both need the same number, at least 1."
            )
        if not isinstance(history, History):
            history = converted(history, History)
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

        [turns] gives one result, [B, turns] a list of texts or ids, or a lazy stack of TensorDicts. Control tokens come
        only from the template; if a message spells one, it is encoded as plain characters. Masks need no {% generation
        %} blocks; the token that ends an answer belongs to it. With a mask, and where the template drops the reasoning
        of earlier turns, ids and mask are those of the last answer and the context that it is given in.

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
        if return_tensors not in (None, "pt"):
            raise ConfigError(
                f"return_tensors={return_tensors!r} is not supported. Use 'pt' or None: ids are torch tensors."
            )
        if not (tokenize or (tokenize is None and (return_assistant_tokens_mask or return_tensors or return_dict))):
            return _texts(self, tokenizer, add_generation_prompt, continue_final_message, options)
        if truncation:
            raise ConfigError("truncation=True would cut a conversation silently. Shorten the messages instead.")
        if continue_final_message and return_assistant_tokens_mask:
            raise ConfigError(
                "continue_final_message=True cannot be combined with return_assistant_tokens_mask=True: a message to "
                "be continued has no mask. Leave one of them out."
            )
        chats = self.to_chats() if self.ndim > 1 else [self.to_chats()]
        if self.ndim > 2:
            raise ConfigError(f"apply_chat_template takes [turns] or [B, turns], got {tuple(self.batch_size)}.")
        if continue_final_message:
            chats = [rendered_form(chat) for chat in chats]
            continued = (render_prompt(tokenizer, chat, options, continue_final_message=True) for chat in chats)
            rows: list[tuple[list[int], list[bool]]] = [(ids, []) for ids in continued]
        else:
            rows = [_encoded(tokenizer, c, options, add_generation_prompt, return_assistant_tokens_mask) for c in chats]
        found = _tensors(rows, tokenizer, padding, return_assistant_tokens_mask)
        if return_dict or return_assistant_tokens_mask:
            return found[0] if self.ndim == 1 else lazy_stack(found)
        ids = [row["input_ids"].unsqueeze(0) for row in found]
        return ids[0] if self.ndim == 1 else ids

    @classmethod
    def from_text(
        cls,
        text: str | list[str],
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        tokenizer: Any = None,
    ) -> History:
        """Parse a rendered text into a conversation, for inspecting texts; wrappers never need it.

        Without a name, the control tokens determine the format: ChatML, Llama 3 or Llama 4. A last turn without an end
        token has is_complete=False.
        Raises ConfigError for a template without a parser, RuntimeError if no turn is recognized.
        """
        if isinstance(text, list):
            return lazy_stack([cls.from_text(one, chat_template_name, chat_template, tokenizer) for one in text])  # type: ignore[no-any-return]
        name = chat_template_name
        if name is not None and name not in _PARSERS:
            raise ConfigError(f"chat_template_name={name!r} has no parser; known: {sorted(_PARSERS)}.")
        messages = _PARSERS[name](text) if name else _PARSERS["chatml"](text) or _PARSERS["llama"](text)
        if not messages:
            raise RuntimeError(f"No turn of {name or 'a known template'!r} was found in {text[:80]!r}.")
        return cls.from_chats(messages)


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Parser | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Register a template under a name, for this process. The template need not mark {% generation %}.

    Args:
        template_name: The name.
        template: The Jinja template.
        inverse_parser: Function that parses a rendered text back into a History; None if there is no such function.
        model_family_keywords: Must be None: templates are never guessed from a model's path.

    Raises:
        ConfigError: The name has another template, or `model_family_keywords` is given.
    """
    if model_family_keywords:
        raise ConfigError(
            "model_family_keywords is not supported: templates are never guessed from a model's path. Pass "
            "chat_template_name instead."
        )
    if template_name in {**TEMPLATES, **_OTHER_NAMES} or _ADDED.get(template_name, template) != template:
        raise ConfigError(
            f"template_name={template_name!r} is already the name of another template. Choose a new name."
        )
    _ADDED[template_name] = template
    if inverse_parser is not None:
        _PARSERS[template_name] = inverse_parser


def template_options(tokenizer: Any, template: str | None, name: str | None) -> dict[str, Any]:
    """Return rendering keywords for the given template, else for the named one; empty for the tokenizer's own.

    Raises ConfigError for an unknown `name`, or if no template is given and the tokenizer has none.
    """
    if template is not None:
        return {"chat_template": template}
    if name is not None:
        known = {**TEMPLATES, **_OTHER_NAMES, **_ADDED}
        if name not in known:
            raise ConfigError(f"chat_template_name={name!r} is not one of {sorted(known)}; see add_chat_template.")
        return {"chat_template": known[name]}
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError("The tokenizer has no chat template: pass chat_template_name or chat_template.")
    return {}


def converted(history: Any, kind: type) -> Any:
    """Convert conversations [..., turns] to another History class, leaving out padding entries.

    Both classes have role, content, is_complete, tool_calls and tool_responses.
    """
    if history.ndim > 1:
        return lazy_stack([converted(row, kind) for row in history.unbind(0)])
    turns = []
    for message in History.to_chats(history):
        fields = {k: v if isinstance(v, str | bool) else NonTensorData(v) for k, v in message.items()}
        turns.append(kind(**fields, batch_size=()))
    return lazy_stack(turns)


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


def _texts(
    history: History, tokenizer: Any, add_generation_prompt: bool, continue_message: bool, options: Mapping[str, Any]
) -> Any:
    if history.ndim > 1:
        return [_texts(one, tokenizer, add_generation_prompt, continue_message, options) for one in history.unbind(0)]
    mode = "continue" if continue_message else "open" if add_generation_prompt else "closed"
    return render_text(tokenizer, rendered_form(history.to_chats()), options, mode=mode)


def _encoded(
    tokenizer: Any, messages: list[Any], options: dict[str, Any], add_generation_prompt: bool, masked: bool
) -> tuple[list[int], list[bool]]:
    messages = rendered_form(messages)
    if not masked and add_generation_prompt:
        return render_prompt(tokenizer, messages, options, continue_final_message=False), []
    if not masked:
        return render_messages(tokenizer, messages, options), []
    ids, mask = render_conversation(tokenizer, messages, options)
    header = render_generation_prompt(tokenizer, messages, options) if add_generation_prompt else []
    return ids + header, mask + [False] * len(header)


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


_CHATML_TURN = re.compile(r"<\|im_start\|>(\w+)\n(.*?)(<\|im_end\|>|<\|endoftext\|>|\Z)", re.DOTALL)
_LLAMA3_TURN = re.compile(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(<\|eot_id\|>|\Z)", re.DOTALL)
_LLAMA4_TURN = re.compile(r"<\|header_start\|>(\w+)<\|header_end\|>\n\n(.*?)(<\|eot\|>|\Z)", re.DOTALL)


def _parser(turn: re.Pattern[str]) -> Parser:
    def parse(text: str) -> list[dict[str, Any]]:
        turns = [(found[1], found[2], bool(found[3])) for found in turn.finditer(text)]
        return [{"role": role, "content": content, "is_complete": ended} for role, content, ended in turns]

    return parse


_PARSERS |= {name: _parser(_CHATML_TURN) for name in ("chatml", "chatml_format", "qwen", "qwen3_with_thinking")}
_PARSERS |= {"llama3": _parser(_LLAMA3_TURN), "llama4": _parser(_LLAMA4_TURN)}
_PARSERS["llama"] = lambda text: _PARSERS["llama3"](text) or _PARSERS["llama4"](text)
