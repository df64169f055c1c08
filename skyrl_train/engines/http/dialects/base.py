"""Parts of all dialects of chat APIs: calls, their streams, and differences between partial answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from skyrl_train.data.tool_formats import ModelAnswer, ToolCall
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest
from skyrl_train.engines.http.exchange import ErrorDescription
from skyrl_train.engines.http.json_body import InvalidBodyError, write_json

MAX_TEMPLATE_KWARGS_CHARS = 1 << 14
_RESERVED_TEMPLATE_KWARGS = {
    *("chat_template", "conversation", "messages", "tools", "documents", "tokenize", "padding", "truncation"),
    *("max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
}
"""Arguments of `apply_chat_template` that are not variables of a template."""


class EventStream(Protocol):
    """The writer of one response as a stream of server-sent events. Every method returns the bytes to send next."""

    def update(self, index: int, partial: ModelAnswer) -> bytes:
        """Return the events for a longer beginning of the answer `index`."""

    def finish(self, answers: Sequence[ChatAnswer]) -> bytes:
        """Return the events up to the end of the stream."""

    def fail(self, error: ErrorDescription) -> bytes:
        """Return the events that end the stream with an error."""


class ChatCall(Protocol):
    """A parsed call of a dialect."""

    request: ChatRequest
    params: Mapping[str, str]
    """Names of the body's members by the names of sampling parameters and of ChatRequest's fields, for errors."""

    @property
    def stream(self) -> bool:
        """True if the response is a stream."""

    def respond(self, answers: Sequence[ChatAnswer]) -> Any:
        """Return the response as JSON-like values."""

    def open_stream(self) -> EventStream:
        """Return the writer of the response as a stream."""


class DeltaKind(StrEnum):
    """The parts of an answer."""

    REASONING = "reasoning"
    CONTENT = "content"
    CALL = "call"


@dataclass(frozen=True, slots=True)
class Delta:
    """A part of an answer that has not been sent yet."""

    kind: DeltaKind
    text: str = ""
    call: ToolCall | None = None


@dataclass(slots=True)
class SentAnswer:
    """The part of an answer that a stream has sent."""

    reasoning: str = ""
    content: str = ""
    calls: list[ToolCall] = field(default_factory=list)

    def advance(self, answer: ModelAnswer) -> list[Delta]:
        """Return what an answer has beyond this part, and record it as sent.

        Args:
            answer: The answer, or its beginning. If the model has closed reasoning that nobody had opened, content that
                was sent is reasoning now. It is not sent again, and the content begins anew.
        """
        deltas = []
        if self.content and answer.reasoning.startswith(self.content) and not answer.content.startswith(self.content):
            self.reasoning, self.content = self.content, ""
        if len(answer.reasoning) > len(self.reasoning) and answer.reasoning.startswith(self.reasoning):
            deltas.append(Delta(DeltaKind.REASONING, answer.reasoning[len(self.reasoning) :]))
            self.reasoning = answer.reasoning
        if len(answer.content) > len(self.content) and answer.content.startswith(self.content):
            deltas.append(Delta(DeltaKind.CONTENT, answer.content[len(self.content) :]))
            self.content = answer.content
        new_calls = answer.tool_calls[len(self.calls) :]
        self.calls += new_calls
        return deltas + [Delta(DeltaKind.CALL, call=call) for call in new_calls]


def event(data: Any, name: str | None = None) -> bytes:
    """Return a server-sent event.

    Args:
        data: JSON-like values.
        name: Name of the event; None for an event without a name.
    """
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    return head + b"data: " + write_json(data) + b"\n\n"


def write_arguments(call: ToolCall) -> str:
    """Return the arguments of a call as JSON text."""
    return json.dumps(call.arguments, ensure_ascii=False)


def function_tool(name: str, description: str | None, parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a tool definition as chat templates expect it."""
    function: dict[str, Any] = {"name": name}
    if description:
        function["description"] = description
    function["parameters"] = dict(parameters) if parameters else {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def message_call(id: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call of a message in the history. Arguments are a mapping, or the JSON text of one."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments or {}}}


def check_tool_choice(param: str, tools: Sequence[Mapping[str, Any]], choice: str, forced: str | None) -> None:
    """Check a choice of tools against the tools.

    Args:
        param: Name of the member, for errors.
        tools: The definitions of the tools.
        choice: "auto", "none" or "required".
        forced: Name of the tool that must be called, or None.

    Raises:
        InvalidBodyError: A call is required, and there are no tools or no tool of this name.
    """
    names = [tool["function"]["name"] for tool in tools]
    if choice == "required" and not names:
        raise InvalidBodyError(param, "requires a call, but the request has no tools.")
    if forced is not None and forced not in names:
        raise InvalidBodyError(
            param, f"names {forced[:100]!r}, which is not among the tools: {', '.join(names)[:400]}."
        )


def check_template_kwargs(kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return variables of the chat template.

    Raises:
        InvalidBodyError: They are too large, or contain an argument that is not a variable, such as another template.
    """
    param = "chat_template_kwargs"
    if reserved := _RESERVED_TEMPLATE_KWARGS & (kwargs or {}).keys():
        raise InvalidBodyError(param, f"may only have variables of the template, not {sorted(reserved)[0]!r}.")
    if len(json.dumps(kwargs)) > MAX_TEMPLATE_KWARGS_CHARS:
        raise InvalidBodyError(param, f"must have at most {MAX_TEMPLATE_KWARGS_CHARS} characters.")
    return dict(kwargs or {})
