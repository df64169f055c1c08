"""The form in which a chat template expects messages.

Messages have one form everywhere else (`data.messages`). Few templates take another: some multimodal ones write only
content that is a list of parts; DeepSeek's write tool calls only beside null content, and join arguments as text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.data.control_tokens import ANSWER, MarkingTemplate
from skyrl_train.data.messages import normal_message
from skyrl_train.data.trajectory import Message
from skyrl_train.errors import DataError

_NAME, _ARGUMENT = "call" + ANSWER, "argument" + ANSWER


@dataclass(frozen=True)
class MessageForm:
    """How a chat template expects content and tool calls."""

    content_as_parts: bool = False
    """True if content is a list of parts instead of text."""
    null_content: bool = False
    """True if the content of a message that consists of tool calls is null instead of the empty text."""
    arguments_as_text: bool = False
    """True if arguments of tool calls are JSON text instead of mappings."""

    def applied(self, messages: Sequence[Message]) -> list[Message]:
        """Return the messages in this form."""
        return [self._message(normal_message(message, index)) for index, message in enumerate(messages)]

    def _message(self, message: Message) -> Message:
        content, calls = message["content"], message.get("tool_calls")
        changed: dict[str, Any] = {}
        if self.content_as_parts:
            changed["content"] = [{"type": "text", "text": content}]
        if calls and self.null_content and not content:
            changed["content"] = None
        if calls and self.arguments_as_text:
            changed["tool_calls"] = [_with_text_arguments(call) for call in calls]
        return {**message, **changed} if changed else message


def _with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    if not isinstance(function["arguments"], str):
        function = {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    return {**call, "function": function} if "function" in call else dict(function)


def message_form(tokenizer: Any, template: MarkingTemplate, messages: Sequence[Message]) -> MessageForm:
    """Return the form that the template writes completely, as far as these messages need one.

    The usual form is returned for a template that writes none.
    """
    key = "calls" if any(message.get("tool_calls") for message in messages) else "text"
    form = template.findings.get(key)
    if form is None:
        form = template.findings[key] = (
            _call_form(tokenizer, template) if key == "calls" else _form(tokenizer, template)
        )
    return form  # type: ignore[no-any-return]


def _form(tokenizer: Any, template: MarkingTemplate) -> MessageForm:
    messages: list[Message] = [{"role": "user", "content": ANSWER}]
    forms = [MessageForm(content_as_parts=as_parts) for as_parts in (False, True)]
    return next((form for form in forms if ANSWER in _text(tokenizer, template, form, messages, {})), forms[0])


def _call_form(tokenizer: Any, template: MarkingTemplate) -> MessageForm:
    as_parts = message_form(tokenizer, template, ()).content_as_parts
    function = {"name": _NAME, "arguments": {"x": _ARGUMENT}}
    tool = {"type": "function", "function": {"name": _NAME, "description": "x", "parameters": {"type": "object"}}}
    messages: list[Message] = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "x" * 9, "type": "function", "function": function}]},
    ]
    forms = [MessageForm(as_parts, null, as_text) for as_text in (False, True) for null in (False, True)]
    for form in forms:
        text = _text(tokenizer, template, form, messages, {"tools": [tool]})
        if _NAME in text and _ARGUMENT in text and "None" not in text:
            return form
    return forms[0]


def _text(
    tokenizer: Any, template: MarkingTemplate, form: MessageForm, messages: list[Message], options: dict[str, Any]
) -> str:
    """Return the rendered text; nothing if the template rejects the form."""
    try:
        return template.render(tokenizer, form.applied(messages), False, options)
    except DataError:
        return ""
