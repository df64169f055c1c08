"""Chat messages, tool definitions and prompts of rows, in the one form that the rest of the package reads.

Content is text: lists of text parts are joined, and other parts (images, audio) are refused. Arguments of tool calls
are mappings. `data.chat.MessageForm` converts messages for templates that expect another form. Processes of
environments read this, and need neither torch nor numpy for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.data.json_values import ALLOWED_TYPES_TEXT, find_non_json_value
from skyrl_train.errors import DataError

Message = dict[str, Any]
"""A chat message: {"role": "user", "content": "..."}, and any other keys that the chat template reads."""

ToolCallRecord = dict[str, str]
"""A call that an environment read from an answer: {"name", "arguments"}, the latter as text, JSON where it is not one
text; "error", the kind, if it failed. One that cannot be read has the name ""."""

TEXT_PART = '{"type": "text", "text": "..."}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset.

    Example:
        Prompt(uid="0", messages=[{"role": "user", "content": "2 + 3 = ?"}], env_class="gsm8k",
               env_extras={"reward_spec": {"method": "rule", "ground_truth": "5"}}, data_source="toy")
    """

    uid: str
    """The row number: unique in the dataset and stable over runs, so that seeds and resume do not depend on timing."""
    messages: list[Message]
    env_class: str
    env_extras: dict[str, Any] = field(default_factory=dict)
    """All other columns of the row; environments get them as `extras`."""
    data_source: str = "unknown"
    where: str = field(default="", compare=False)
    """The file and row that it was read from, for error messages."""


def parse_messages(where: str, column: str, value: Any) -> list[Message]:
    """Return a row's conversation in normal form, without keys that are null.

    Args:
        where: File and row, for errors.
        column: Name of the field that holds `value`.

    Raises:
        DataError: `value` is not a conversation of texts; names row and field.
    """
    check_json(where, column, value)
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: {column} is {value!r:.80}, not a list of messages with role and content.")
    return [_message(where, f"{column}[{index}]", message) for index, message in enumerate(value)]


def check_json(where: str, column: str, value: Any) -> None:
    """Raise DataError if JSON cannot carry `value`: rows reach environments as JSON."""
    if why := find_non_json_value(value):
        raise DataError(
            f"{where}: column {column!r} holds {why}; rows hold {ALLOWED_TYPES_TEXT}. Remove it, or store it as text."
        )


def _message(where: str, field: str, message: Any) -> Message:
    # The type of a table's column has the union of its messages' keys, and missing ones are read as None.
    known = {key: item for key, item in message.items() if item is not None} if isinstance(message, dict) else {}
    if not isinstance(known.get("role"), str) or not isinstance(known.get("content", ""), str | list):
        raise DataError(f'{where}: {message!r:.80} is not a message {{"role": "user", "content": "..."}}.')
    if "content" not in known and not known.get("tool_calls"):
        raise DataError(f"{where}: {field}: the content of a {known['role']} message is null.")
    try:
        return _normalize(known)
    except ValueError as error:
        raise DataError(f"{where}: {field}.{error}") from error


def normalize_message(message: Message, index: int) -> Message:
    """Return a message from anywhere in normal form. Raises DataError that names it by its index."""
    try:
        return _normalize(message)
    except ValueError as error:
        raise DataError(f"messages[{index}].{error}") from error


def _normalize(message: Message) -> Message:
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, str) and "tool_calls" not in message:
        return message
    normal = {**message, "content": text_content(content)}
    if calls:
        normal["tool_calls"] = _tool_calls(calls)
    else:  # templates take an empty list for calls
        normal.pop("tool_calls", None)
    return normal


def text_content(content: Any) -> str:
    """Return a message's content as text: parts are joined, and null is the empty text.

    Raises:
        ValueError: A part is not text; the message begins with the part's name.
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            found = f"a part of type {kind!r}" if kind else f"a value of type {type(part).__name__}"
            raise ValueError(
                f"content[{index}] is {found}; only text parts {TEXT_PART} are supported. Remove the row, or describe "
                "the part in words."
            )
        texts.append(text)
    return "".join(texts)


def join_text_parts(content: Any) -> Any:
    """Return content as text if it is null or a list of text parts; other content is returned unchanged."""
    try:
        return text_content(content) if content is None or isinstance(content, list) else content
    except ValueError:
        return content


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with arguments as mappings where they are JSON text. Raises ValueError."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is {calls!r:.80}, not a list.")
    found = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"tool_calls[{index}] is {call!r:.80}, not "
                '{"type": "function", "function": {"name": "...", "arguments": {...}}}.'
            )
        function = {**function, "arguments": _arguments(function.get("arguments"))}
        found.append({**call, "function": function} if "function" in call else function)
    return found


def _arguments(arguments: Any) -> Any:
    """Return arguments as a mapping where they are the JSON text of one, as OpenAI's API writes them."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return read if isinstance(read, dict) else arguments
    return arguments


def parse_tools(where: str, value: Any) -> list[dict[str, Any]] | None:
    """Return a row's tool definitions for `apply_chat_template(tools=...)`; None if the row has none.

    `value` is a list of mappings or, as many data sets store it, the JSON text of one. Raises DataError otherwise.
    """
    check_json(where, "tools", value)
    tools = _read_tools(value)
    if tools is None:
        raise DataError(
            f"{where}: tools is {value!r:.80}, not a list of definitions such as "
            '{"type": "function", "function": {"name": "...", "parameters": {...}}}, nor its JSON text.'
        )
    return tools or None


def get_chat_template_kwargs(extras: Mapping[str, Any], chat_template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the chat template's variables for a prompt: the run's, and the row's `tools` if these are definitions.

    An environment may use a column `tools` for something else, such as a list of names: templates do not get that.
    """
    tools = _read_tools(extras.get("tools"))
    return {**chat_template_kwargs, "tools": tools} if tools else dict(chat_template_kwargs)


def _read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return definitions; an empty list if `value` is null or empty, None if it is something else."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if not value:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, dict) and _tool_name(tool) for tool in value):
        return None
    return value


def _tool_name(tool: Mapping[str, Any]) -> str | None:
    function = tool.get("function", tool)
    name = function.get("name") if isinstance(function, Mapping) else None
    return name if isinstance(name, str) else None


def continues_last_message(messages: Sequence[Message], role: str = "assistant") -> bool:
    """True if the model's next text continues the last message: it is the model's own, and calls no tools."""
    return bool(messages) and messages[-1].get("role") in (role, "assistant") and not messages[-1].get("tool_calls")


def append_assistant_text(messages: Sequence[Message], text: str, role: str = "assistant") -> list[Message]:
    """Return `messages` with the model's text: as the rest of a last message of its own, else as a new message."""
    if continues_last_message(messages, role):
        last = messages[-1]
        return [*messages[:-1], {**last, "content": text_content(last["content"]) + text}]
    return [*messages, {"role": role, "content": text}]
