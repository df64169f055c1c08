"""Chat messages, tool definitions and prompts, in the normal form that the rest of the package reads.

Content is text: lists of text parts are joined, and other parts (images, audio) are errors. Arguments of tool calls are
mappings. `data.chat.MessageFormat` converts messages for templates that expect another form. Environment processes
import this module, so it needs neither torch nor numpy.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.data.json_values import ALLOWED_TYPES_TEXT, find_non_json_value
from skyrl_train.errors import DataError

Message = dict[str, Any]
"""A chat message, {"role": "user", "content": "..."}, with any other keys that the chat template reads."""

ToolCallRecord = dict[str, str]
"""A tool call that an environment parsed from an answer: {"name", "arguments", "error"}. Arguments are text: JSON,
unless they are a single text. "error" is the kind of failure of a failed call. A call that cannot be parsed has the
name ""."""

TEXT_PART = '{"type": "text", "text": "..."}'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a dataset.

    Example:
        Prompt(uid="0", messages=[{"role": "user", "content": "2 + 3 = ?"}], env_class="gsm8k",
               env_extras={"reward_spec": {"method": "rule", "ground_truth": "5"}}, data_source="toy")
    """

    uid: str
    """Row number. It is unique in the dataset and stable over runs, so seeds and resuming do not depend on timing."""
    messages: list[Message]
    """Initial messages, in normal form."""
    env_class: str
    """Registered name of the environment."""
    env_extras: dict[str, Any] = field(default_factory=dict)
    """All other columns of the row. Environments read them as `extras`."""
    data_source: str = "unknown"
    """Name of the dataset that the row is from. Evaluations report results for each."""
    where: str = field(default="", compare=False)
    """File and row that the prompt was read from, for error messages."""
    source: str = field(default="", compare=False)
    """Entry of data.train_data or data.val_data that the prompt was read from; "" if it was made by a program."""
    source_row: int = field(default=0, compare=False)
    """Row of the prompt in `source`, from 0."""


def parse_messages(where: str, column: str, value: Any) -> list[Message]:
    """Return the conversation of a row in normal form, without null keys.

    Args:
        where: File and row, for errors.
        column: Name of the column that holds `value`.
        value: The conversation.

    Raises:
        DataError: The value is not a list of messages with text. The message names the row and the field.
    """
    check_json(where, column, value)
    if not isinstance(value, list) or not value:
        raise DataError(
            f"{where}: {column} is {value!r:.80}, not a list of messages with role and content. Correct the row."
        )
    return [_parse_message(where, f"{column}[{index}]", message) for index, message in enumerate(value)]


def check_json(where: str, column: str, value: Any) -> None:
    """Raise DataError if JSON cannot represent the value of a column, because rows are sent to environments as JSON.

    Args:
        where: File and row, for errors.
        column: Name of the column.
        value: The value.
    """
    if description := find_non_json_value(value):
        raise DataError(
            f"{where}: column {column!r} holds {description}; rows hold {ALLOWED_TYPES_TEXT}. Remove it, or store it "
            "as text."
        )


def _parse_message(where: str, field: str, message: Any) -> Message:
    # In a table each message has the keys of all messages, and missing values are None.
    present = {key: item for key, item in message.items() if item is not None} if isinstance(message, dict) else {}
    if not isinstance(present.get("role"), str) or not isinstance(present.get("content", ""), str | list):
        raise DataError(f'{where}: {message!r:.80} is not a message {{"role": "user", "content": "..."}}.')
    if "content" not in present and not present.get("tool_calls"):
        raise DataError(
            f"{where}: {field}: the content of a {present['role']} message is null. Write a text, or leave the message "
            "out."
        )
    try:
        return _normalize(present)
    except ValueError as error:
        raise DataError(f"{where}: {field}.{error}") from error


def normalize_message(message: Message, index: int) -> Message:
    """Return a message in normal form: its content as text, and the arguments of its tool calls as mappings.

    Args:
        message: The message. It is not changed.
        index: Its index in the conversation, for errors.

    Raises:
        DataError: The content has a part that is not text, or the tool calls are malformed.
    """
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
        normal["tool_calls"] = _normalize_tool_calls(calls)
    else:  # some templates treat an empty list as a list of calls
        normal.pop("tool_calls", None)
    return normal


def text_content(content: Any) -> str:
    """Return the content of a message as text: text parts are joined, and null is the empty text.

    Raises:
        ValueError: A part is not text. The message begins with the name of the part, such as "content[0]".
    """
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, Mapping) and part.get("type", "text") == "text" else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, Mapping) else None
            description = f"a part of type {kind!r}" if kind else f"a value of type {type(part).__name__}"
            raise ValueError(
                f"content[{index}] is {description}; only text parts {TEXT_PART} are supported. Remove the row, or "
                "describe the part in words."
            )
        texts.append(text)
    return "".join(texts)


def join_text_parts(content: Any) -> Any:
    """Return content as text if it is null or a list of text parts. Return any other content unchanged."""
    try:
        return text_content(content) if content is None or isinstance(content, list) else content
    except ValueError:
        return content


def _normalize_tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Return tool calls with arguments as mappings. Raises ValueError if a call is malformed."""
    if not isinstance(calls, list):
        raise ValueError(f"tool_calls is {calls!r:.80}, not a list of calls with the name of a function.")
    normal = []
    for index, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(
                f"tool_calls[{index}] is {call!r:.80}, not "
                '{"type": "function", "function": {"name": "...", "arguments": {...}}}.'
            )
        function = {**function, "arguments": _parse_arguments(function.get("arguments"))}
        normal.append({**call, "function": function} if "function" in call else function)
    return normal


def _parse_arguments(arguments: Any) -> Any:
    """Return arguments as a mapping if they are null or the JSON text of a mapping, as in OpenAI's API."""
    if arguments is None:
        return {}
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments


def parse_tools(where: str, value: Any) -> list[dict[str, Any]] | None:
    """Return the tool definitions of a row for `apply_chat_template(tools=...)`, or None if the row has none.

    Args:
        where: File and row, for errors.
        value: A list of definitions, the JSON text of such a list, or null.

    Raises:
        DataError: The value is something else.
    """
    check_json(where, "tools", value)
    tools = _read_tools(value)
    if tools is None:
        raise DataError(
            f"{where}: tools is {value!r:.80}, not a list of definitions such as "
            '{"type": "function", "function": {"name": "...", "parameters": {...}}}, nor such a list as JSON text.'
        )
    return tools or None


def get_chat_template_kwargs(extras: Mapping[str, Any], chat_template_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the variables of the chat template for a prompt.

    Args:
        extras: The row's columns. `tools` is added to the variables if it is a list of tool definitions. Environments
            may use this column for something else, such as names, which templates do not receive.
        chat_template_kwargs: The run's variables. They are not changed.
    """
    tools = _read_tools(extras.get("tools"))
    return {**chat_template_kwargs, "tools": tools} if tools else dict(chat_template_kwargs)


def _read_tools(value: Any) -> list[dict[str, Any]] | None:
    """Return tool definitions, an empty list if the value is null or empty, or None if it is something else."""
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
    """True if the model's next text continues the last message: the model wrote it, and it calls no tools.

    Args:
        messages: The conversation.
        role: A role whose messages the model writes, in addition to "assistant".
    """
    return bool(messages) and messages[-1].get("role") in (role, "assistant") and not messages[-1].get("tool_calls")


def append_assistant_text(messages: Sequence[Message], text: str, role: str = "assistant") -> list[Message]:
    """Return a conversation with the model's text added.

    Args:
        messages: The conversation. It is not changed.
        text: The model's text. It continues the last message if `continues_last_message`, else it is a new message.
        role: Role of a new message.

    Raises:
        ValueError: The last message is to be continued, but has parts that are not text.
    """
    if continues_last_message(messages, role):
        last = messages[-1]
        return [*messages[:-1], {**last, "content": text_content(last["content"]) + text}]
    return [*messages, {"role": role, "content": text}]
