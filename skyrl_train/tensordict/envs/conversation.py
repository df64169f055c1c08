"""Converts conversations between `History`, their form in tensordicts, and lists of messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase, lazy_stack

from skyrl_train.data.chat import decode_response, get_message_text, get_reasoning_opening
from skyrl_train.data.messages import Message, continues_last_message, join_text_parts
from skyrl_train.data.reasoning import find_trailing_opening
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.wrappers.inputs import lookup


def text_of(given: TensorDictBase, key: Any) -> str | None:
    """Return the string under `key` of a row, or None if it is missing or not a string."""
    value = given.get(key, None)
    value = getattr(value, "data", value)
    return value if isinstance(value, str) else None


def question_of(given: TensorDictBase, key: Any) -> str | list[Message] | None:
    """Return the string under `key` of a row, or the messages of a History or list there; None if there is neither."""
    value = given.get(key, None)
    value = value.data if isinstance(value, NonTensorData) else value
    if isinstance(value, str):
        return value
    if all(hasattr(value, name) for name in ("role", "content", "batch_size")):  # a History, also torchrl's
        return list(History.to_chats(value if value.ndim else lazy_stack([value])))
    messages = value.tolist() if isinstance(value, NonTensorStack) else value
    messages = [messages] if isinstance(messages, Mapping) else messages
    if not isinstance(messages, list | tuple) or not messages:
        return None
    if not all(isinstance(message, Mapping) and {"role", "content"} <= message.keys() for message in messages):
        return None
    return [{**message, "content": join_text_parts(message["content"])} for message in messages]


def value_of(given: TensorDictBase, key: Any) -> Any:
    """Return a row's value under `key` as plain Python data, or None if it is missing."""
    value = given.get(key, None)
    return value.tolist() if hasattr(value, "tolist") else getattr(value, "data", value)


def history_of(messages: Sequence[Message]) -> History:
    """Return one conversation as a History [turns]."""
    return History.from_chats([dict(message) for message in messages])


def messages_of(history: History) -> list[Message]:
    """Return the messages of a History [turns] as dicts."""
    return list(History.to_chats(history))  # torchrl's class has no such method


def is_continued(messages: Sequence[Message], role: str = "assistant") -> bool:
    """True if the model's next text continues the last message, which is its own and not complete."""
    return continues_last_message(messages, role) and not messages[-1].get("is_complete", True)


def part(row: TensorDictBase, mode: str, name: str) -> Any:
    """Return the field `name` (prompt, response or full) of a row's container under `mode`, or None."""
    return lookup(row, (mode, name), bare=False)


def full_messages(row: TensorDictBase, policy_role: str = "assistant") -> list[Message] | None:
    """Return a row's conversation including its action; None outside history mode or without an action.

    An action is ("history", "full"), else ("history", "response") or a string "text_response" after the prompt, or
    continuing its last message.
    """
    full = part(row, "history", "full")
    if full is not None:
        return messages_of(full)
    prompt, response = part(row, "history", "prompt"), part(row, "history", "response")
    text = text_of(row, "text_response")
    if prompt is None or (response is None and text is None):
        return None
    asked = messages_of(prompt)
    said = [{"role": policy_role, "content": text}] if response is None else messages_of(response)
    if not said or not is_continued(asked, policy_role):
        return [*asked, *said]
    first = {**said[0], "content": get_message_text(asked[-1]) + get_message_text(said[0])}
    return [*asked[:-1], first, *said[1:]]


def last_response(row: TensorDictBase, tokenizer: Any = None, policy_role: str = "assistant") -> str | None:
    """Return the model's text of this step, or None if the row has no action.

    It is read from the history, else from ("text", "response") or "text_response", else from ("tokens", "response"). A
    "full" without a response holds what follows the prompt; it holds nothing if it does not begin with the prompt.
    The end of the prompt precedes it if that opens a block of reasoning, as in `TextEnv.step`. A message of the prompt
    that the model continued is part of it.
    """
    said, history = _said(row, tokenizer, policy_role), part(row, "history", "prompt")
    continued = history is not None and is_continued(messages_of(history), policy_role)  # opens reasoning itself
    return said if said is None or continued else _opened(row, tokenizer) + said


def _opened(row: TensorDictBase, tokenizer: Any) -> str:
    """Return the end of the prompt that opens reasoning, from ("text", "prompt"), "text" or ("tokens", "prompt")."""
    prompt = part(row, "text", "prompt")
    if prompt is None and row.get("history", None) is None:  # else "text" is the question
        prompt = text_of(row, "text")
    if isinstance(prompt, str):
        return find_trailing_opening(prompt)
    tokens = part(row, "tokens", "prompt")
    if tokens is None or tokenizer is None:
        return ""
    return get_reasoning_opening(tokenizer, unpadded(row, tokens, response=False).tolist())


def _said(row: TensorDictBase, tokenizer: Any, policy_role: str) -> str | None:
    messages = full_messages(row, policy_role)
    if messages is not None:
        said = messages and messages[-1]["role"] in (policy_role, "assistant")  # wrappers write the latter
        return get_message_text(messages[-1]) if said else None
    for text in (part(row, "text", "response"), text_of(row, "text_response")):
        if isinstance(text, str):
            return text
    full, prompt = part(row, "text", "full"), part(row, "text", "prompt")
    if isinstance(full, str) and isinstance(prompt, str):
        return full[len(prompt) :] if full.startswith(prompt) else ""
    if tokenizer is None or part(row, "tokens", "prompt") is None:
        return None
    if (response := part(row, "tokens", "response")) is not None:
        return decode_response(tokenizer, unpadded(row, response, response=True).tolist())
    if (tokens := part(row, "tokens", "full")) is None:
        return None
    asked = unpadded(row, part(row, "tokens", "prompt"), response=False).tolist()
    ids = unpadded(row, tokens, response=False).tolist()
    return decode_response(tokenizer, ids[len(asked) :]) if ids[: len(asked)] == asked else ""


def unpadded(row: TensorDictBase, tokens: torch.Tensor, *, response: bool) -> torch.Tensor:
    """Return a row's ids without padding, according to ("masks", "all_attention_mask"); without it, there is none.

    The mask is as long as ("tokens", "full"): a prompt uses its beginning, a response its end.
    """
    mask = part(row, "masks", "all_attention_mask")
    if mask is None or len(mask) < len(tokens):
        return tokens
    return tokens[mask[len(mask) - len(tokens) :] if response else mask[: len(tokens)]]
