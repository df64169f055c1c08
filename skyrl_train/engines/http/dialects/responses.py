"""OpenAI's Responses: bodies of requests and responses, and their translation."""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from operator import eq
from typing import Annotated, Any, Literal

from skyrl_train.data.messages import Message
from skyrl_train.data.tool_formats import ModelAnswer
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest
from skyrl_train.engines.http.chat_sampler import count_characters
from skyrl_train.engines.http.dialects.base import (
    Delta,
    DeltaKind,
    SentAnswer,
    check_tool_choice,
    event,
    function_tool,
    message_call,
    write_arguments,
)
from skyrl_train.engines.http.exchange import ApiError, ErrorDescription
from skyrl_train.engines.http.json_body import FEW, InvalidBodyError, LenientBody, parse_body
from skyrl_train.engines.http.openai_protocol import Ignored, ResponseModel, StreamOptions, Unsupported

MAX_STORED_RESPONSES = 1024
MAX_STORED_CHARS = 32 << 20
"""Characters of the messages and answers of all stored responses. The oldest responses are dropped beyond it."""
_TEXT_TYPES = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_LOGPROBS = "message.output_text.logprobs"


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ContentItem(LenientBody):
    """A part of a content: {"type": "input_text", "text": "..."} and the like. Images and files are rejected."""

    type: str
    text: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class InputItem(LenientBody):
    """An item of the conversation: a message, function_call, function_call_output or reasoning."""

    type: str = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentItem] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    output: str | list[ContentItem] | None = None
    summary: list[ContentItem] | None = None


@dataclass(frozen=True, kw_only=True)
class ResponseTool(LenientBody):
    """A function that the model may call."""

    type: str
    """Only "function" is supported."""
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted without effect."""


@dataclass(frozen=True, kw_only=True)
class FunctionChoice(LenientBody):
    """A choice of one function."""

    type: Literal["function"]
    name: str


@dataclass(frozen=True, kw_only=True)
class TextFormat(LenientBody):
    """The form of the answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted without effect: the schema is always enforced."""


@dataclass(frozen=True, kw_only=True)
class TextConfig(LenientBody):
    """Settings of the answer's text."""

    format: TextFormat | None = None
    verbosity: Annotated[Any, Unsupported("medium")] = None


@dataclass(frozen=True, kw_only=True)
class ReasoningConfig(LenientBody):
    """Settings of reasoning. Summaries are ignored, because the reasoning itself is returned."""

    effort: str | None = None
    """The variable `reasoning_effort` of the chat template, which may ignore it."""


@dataclass(frozen=True, kw_only=True)
class ResponsesRequest(LenientBody):
    """The body of POST /v1/responses."""

    model: str
    input: str | Annotated[list[InputItem], FEW] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    """Id of a stored response, whose conversation the input continues."""
    store: bool = True
    """True to keep the response in memory, for previous_response_id."""
    tools: Annotated[list[ResponseTool], FEW] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: bool = True
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    """"message.output_text.logprobs" adds log-probs. Other items are ignored."""
    top_logprobs: int = 0
    stream: bool = False
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None
    """Returned in the response."""
    # Parameters of other APIs, which change the answer.
    messages: Annotated[Any, Unsupported([])] = None
    system: Annotated[Any, Unsupported("")] = None
    n: Annotated[Any, Unsupported(1)] = None
    max_tokens: Annotated[Any, Unsupported()] = None
    max_completion_tokens: Annotated[Any, Unsupported()] = None
    stop: Annotated[Any, Unsupported([])] = None
    stop_sequences: Annotated[Any, Unsupported([])] = None
    seed: Annotated[Any, Unsupported()] = None
    frequency_penalty: Annotated[Any, Unsupported(0)] = None
    presence_penalty: Annotated[Any, Unsupported(0)] = None
    logit_bias: Annotated[Any, Unsupported({})] = None
    response_format: Annotated[Any, Unsupported({"type": "text"})] = None
    top_k: Annotated[Any, Unsupported(0)] = None
    min_p: Annotated[Any, Unsupported(0)] = None
    repetition_penalty: Annotated[Any, Unsupported(1)] = None
    background: Annotated[Any, Unsupported(False)] = None
    context_management: Annotated[Any, Unsupported([])] = None
    conversation: Annotated[Any, Unsupported()] = None
    image: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    access_programs: Ignored = None
    background_options: Ignored = None
    max_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None
    safety_identifier: Ignored = None
    service_tier: Ignored = None
    truncation: Ignored = None
    user: Ignored = None


def parse(raw: Any, store: ResponseStore) -> ResponsesCall:
    """Return the call with a body.

    Args:
        raw: Parsed JSON.
        store: The stored responses that the call may continue.

    Raises:
        InvalidBodyError: A member is invalid.
        ApiError: There is no stored response with the id previous_response_id.
    """
    body: ResponsesRequest = parse_body(ResponsesRequest, raw)
    if body.stream_options is not None and not body.stream:
        raise InvalidBodyError("stream_options", "requires stream=true.")
    stored = store.get_messages(body.previous_response_id) if body.previous_response_id is not None else []
    history = stored + _to_messages(body.input or [])
    if not history:
        raise InvalidBodyError("input", "must contain at least one item.")
    system: list[Message] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    tools = [_to_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    forced = body.tool_choice.name if isinstance(body.tool_choice, FunctionChoice) else None
    choice = "required" if isinstance(body.tool_choice, FunctionChoice) else body.tool_choice or "auto"
    check_tool_choice("tool_choice", tools, choice, forced)
    optional = {"max_tokens": body.max_output_tokens, "temperature": body.temperature, "top_p": body.top_p}
    effort = body.reasoning.effort if body.reasoning else None
    request = ChatRequest(
        messages=system + history,
        tools=tools,
        tool_choice=choice,
        forced_tool=forced,
        parallel_tool_calls=body.parallel_tool_calls,
        sampling={name: value for name, value in optional.items() if value is not None},
        logprobs=_LOGPROBS in (body.include or ()) or body.top_logprobs > 0,
        top_logprobs=body.top_logprobs,
        json_schema=_json_schema(body.text.format if body.text else None),
        chat_template_kwargs={} if effort is None else {"reasoning_effort": effort},
    )
    return ResponsesCall(body, request, store, history, len(stored))


def _to_tool(tool: ResponseTool, path: str) -> dict[str, Any]:
    if tool.type != "function":
        raise InvalidBodyError(
            f"{path}.type", f"must be 'function', got {tool.type[:100]!r}. Tools that a server runs are not supported."
        )
    return function_tool(_require(tool.name, f"{path}.name"), tool.description, tool.parameters)


def _json_schema(text_format: TextFormat | None) -> dict[str, Any] | None:
    if text_format is None or text_format.type == "text":
        return None
    if text_format.type == "json_object":
        return {}
    if text_format.schema is None:
        raise InvalidBodyError("text.format.schema", "is missing.")
    return text_format.schema


def _to_messages(items: str | list[InputItem]) -> list[Message]:
    """Return the messages of the input. The items that one answer of the model became are one message again."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    answer: Message | None = None
    """The answer to which the next items belong."""
    for index, item in enumerate(items):
        path = f"input[{index}]"
        message = _item_message(item, path)
        if message["role"] != "assistant":
            answer = None
            messages.append(message)
        elif answer is not None and _continues(answer, item):
            _join(answer, message)
        else:
            answer = message
            messages.append(message)
    return messages


def _continues(answer: Message, item: InputItem) -> bool:
    """True if an item of the assistant belongs to the same answer: reasoning, then text, then calls."""
    if item.type == "function_call":
        return True
    has_text_or_calls = bool(answer["content"] or answer.get("tool_calls"))
    return item.type == "message" and not has_text_or_calls


def _join(answer: Message, message: Message) -> None:
    answer["content"] += message["content"]
    if "tool_calls" in message:
        answer["tool_calls"] = [*answer.get("tool_calls", ()), *message["tool_calls"]]


def _item_message(item: InputItem, path: str) -> Message:
    if item.type == "message":
        role = _require(item.role, f"{path}.role")
        if item.content is None:
            raise InvalidBodyError(f"{path}.content", "is missing.")
        return {"role": "system" if role == "developer" else role, "content": _text(item.content, f"{path}.content")}
    if item.type == "function_call":
        id, name = _require(item.call_id, f"{path}.call_id"), _require(item.name, f"{path}.name")
        arguments = _require(item.arguments, f"{path}.arguments")
        return {"role": "assistant", "content": "", "tool_calls": [message_call(id, name, arguments)]}
    if item.type == "function_call_output":
        id = _require(item.call_id, f"{path}.call_id")
        if item.output is None:
            raise InvalidBodyError(f"{path}.output", "is missing.")
        return {"role": "tool", "content": _text(item.output, f"{path}.output"), "tool_call_id": id}
    if item.type == "reasoning":
        text = _text(item.content or item.summary or "", f"{path}.content")
        return {"role": "assistant", "content": ""} | ({"reasoning_content": text} if text else {})
    raise InvalidBodyError(
        f"{path}.type",
        f"must be 'message', 'function_call', 'function_call_output' or 'reasoning', got {item.type[:100]!r}.",
    )


def _text(content: str | list[ContentItem], path: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{path}[{index}]") for index, part in enumerate(content))


def _part_text(part: ContentItem, path: str) -> str:
    if part.type == "refusal":
        return _require(part.refusal, f"{path}.refusal")
    if part.type not in _TEXT_TYPES:
        raise InvalidBodyError(f"{path}.type", f"{part.type[:100]!r} is not supported: only text is.")
    return _require(part.text, f"{path}.text")


def _require(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidBodyError(path, "is missing.")
    return value


# -- stored responses ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StoredResponse:
    response: dict[str, Any]
    messages: list[Message]
    """The conversation up to the answer, without instructions."""
    characters: int
    """Characters of the answer and of the input that led to it."""


class ResponseStore:
    """The responses that previous_response_id may continue. They are lost when the server ends."""

    def __init__(self, max_responses: int = MAX_STORED_RESPONSES, max_chars: int = MAX_STORED_CHARS):
        """Create an empty store, which drops the oldest responses beyond these limits."""
        self._max_responses, self._max_chars = max_responses, max_chars
        self._stored: OrderedDict[str, _StoredResponse] = OrderedDict()
        self._characters = 0
        self._lock = threading.Lock()

    def add(self, response: dict[str, Any], messages: list[Message], num_new: int) -> None:
        """Store a response.

        Args:
            response: The response.
            messages: The conversation up to the answer, without instructions.
            num_new: Number of messages that no stored response has.
        """
        with self._lock:
            # Most clients repeat the conversation in every call. Messages that are equal to those of the latest
            # response are kept once, or the memory would grow with the square of the number of calls.
            latest = next(reversed(self._stored.values())).messages if self._stored else []
            num_equal = sum(1 for _ in takewhile(bool, map(eq, latest, messages)))
            messages = [*latest[:num_equal], *messages[num_equal:]]
            new = messages[max(num_equal, len(messages) - num_new) :]
            shown = [response.get("instructions") or "", response.get("tools") or ()]
            stored = _StoredResponse(response, messages, count_characters([new, shown]))
            self._stored[response["id"]] = stored
            self._characters += stored.characters
            while len(self._stored) > self._max_responses or self._characters > self._max_chars:
                self._characters -= self._stored.popitem(last=False)[1].characters

    def get(self, id: str) -> dict[str, Any]:
        """Return a stored response.

        Raises:
            ApiError: There is no such response.
        """
        return self._find(id, 404, None).response

    def get_messages(self, id: str) -> list[Message]:
        """Return the conversation up to the answer of a stored response.

        Raises:
            ApiError: There is no such response.
        """
        return self._find(id, 400, "previous_response_id").messages

    def remove(self, id: str) -> None:
        """Remove a stored response.

        Raises:
            ApiError: There is no such response.
        """
        with self._lock:
            self._characters -= self._find(id, 404, None).characters
            del self._stored[id]

    def _find(self, id: str, status: int, param: str | None) -> _StoredResponse:
        stored = self._stored.get(id)
        if stored is None:
            text = f"There is no stored response {id[:100]!r}. The oldest are dropped; send the whole conversation."
            raise ApiError(status, text, "previous_response_not_found" if param else "not_found", param)
        return stored


# -- responses -------------------------------------------------------------------------------------------------------


class ResponsesResponse(ResponseModel):
    """The response of POST /v1/responses. Tests compare it with the types of OpenAI's SDK."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete", "in_progress", "failed"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: Literal["disabled"]
    usage: dict[str, Any] | None


@dataclass
class ResponsesCall:
    """A parsed call of Responses."""

    body: ResponsesRequest
    request: ChatRequest
    store: ResponseStore
    history: list[Message]
    """The conversation without instructions."""
    num_stored: int
    """Number of messages of `history` that come from the stored response."""
    id: str = field(default_factory=lambda: f"resp_{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    params: Mapping[str, str] = field(
        default_factory=lambda: {
            "json_schema": "text.format",
            "top_logprobs": "top_logprobs",
            "max_tokens": "max_output_tokens",
        }
    )

    @property
    def stream(self) -> bool:
        """True if the response is a stream."""
        return self.body.stream

    def respond(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """Return the response as JSON-like values."""
        (answer,) = answers
        items = [new_item(delta) for delta in SentAnswer().advance(answer.answer)]
        for item in items:
            self.add_logprobs(item, answer)
        return self.end(items, answer)

    def open_stream(self) -> ResponsesStream:
        """Return the writer of the response as a stream."""
        return ResponsesStream(self)

    def add_logprobs(self, item: dict[str, Any], answer: ChatAnswer) -> None:
        """Add the log-probs of an answer to its message, if the client asked for them."""
        if self.request.logprobs and item["type"] == "message":
            item["content"][0]["logprobs"] = _logprobs(answer)

    def end(self, items: list[dict[str, Any]], answer: ChatAnswer) -> dict[str, Any]:
        """Return the response that an answer ends, and store it if the client asked for that.

        Args:
            items: The items of the answer.
            answer: The answer.
        """
        is_complete = answer.finish_reason != "length"
        response = self.response("completed" if is_complete else "incomplete", items)
        if not is_complete:
            response["incomplete_details"] = {"reason": "max_output_tokens"}
            items[-1:] = [item | {"status": "incomplete"} for item in items[-1:]]
        response["usage"] = usage(answer)
        if self.body.store:
            messages = [*self.history, _answer_message(answer.answer)]
            self.store.add(response, messages, len(messages) - self.num_stored)
        return response

    def response(self, status: str, items: list[dict[str, Any]]) -> dict[str, Any]:
        """Return a response in any state, without the token counts."""
        body = self.body
        choice = body.tool_choice
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "model": body.model,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": None, "summary": None},
            "temperature": body.temperature,
            "text": {"format": _format(body.text)},
            "tool_choice": {"type": "function", "name": choice.name}
            if isinstance(choice, FunctionChoice)
            else choice or "auto",
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": tool.strict,
                }
                for tool in body.tools or ()
            ],
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
        }


class ResponsesStream:
    """The events of a response."""

    def __init__(self, call: ResponsesCall):
        self._call = call
        self._sent = SentAnswer()
        self._items: list[dict[str, Any]] = []
        self._open: DeltaKind | None = None
        """Kind of the item that is open: the last one."""
        self._sequence_number = 0
        self._answer: ChatAnswer | None = None

    def update(self, index: int, partial: ModelAnswer) -> bytes:
        """Return the events for a longer beginning of the answer. With log-probs, all text comes at the end."""
        return b"".join(self._start() + ([] if self._call.request.logprobs else self._advance(partial)))

    def finish(self, answers: Sequence[ChatAnswer]) -> bytes:
        """Return the remaining events."""
        (answer,) = answers
        self._answer = answer
        events = self._start() + self._advance(answer.answer)
        events += self._close_item("completed" if answer.finish_reason != "length" else "incomplete")
        response = self._call.end(self._items, answer)
        events.append(self._event(f"response.{response['status']}", response=response))
        return b"".join(events)

    def fail(self, error: ErrorDescription) -> bytes:
        """Return an event with the error."""
        response = self._call.response("failed", self._items)
        response["error"] = {"code": "server_error", "message": error.message}
        return self._event("response.failed", response=response)

    def _start(self) -> list[bytes]:
        if self._sequence_number:
            return []
        response = self._call.response("in_progress", [])
        return [self._event(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def _advance(self, answer: ModelAnswer) -> list[bytes]:
        events: list[bytes] = []
        for delta in self._sent.advance(answer):
            if delta.kind is not self._open or delta.kind is DeltaKind.CALL:
                events += self._close_item("completed") + self._open_item(delta)
            item = self._items[-1]
            if delta.kind is DeltaKind.CALL:
                item["arguments"] = new_item(delta)["arguments"]
                events.append(self._item_event("response.function_call_arguments.delta", delta=item["arguments"]))
                continue
            item["content"][0]["text"] += delta.text
            kind = "reasoning_text" if delta.kind is DeltaKind.REASONING else "output_text"
            extra: dict[str, Any] = {"logprobs": []} if delta.kind is DeltaKind.CONTENT else {}
            events.append(self._item_event(f"response.{kind}.delta", content_index=0, delta=delta.text, **extra))
        return events

    def _open_item(self, delta: Delta) -> list[bytes]:
        self._open = delta.kind
        item = new_item(Delta(delta.kind, "", delta.call)) | {"status": "in_progress"}
        self._items.append(item)
        if delta.kind is DeltaKind.CALL:
            item["arguments"] = ""
            return [self._output_event("added", item)]
        events = [self._output_event("added", item | {"content": []})]
        events.append(self._item_event("response.content_part.added", content_index=0, part=item["content"][0]))
        return events

    def _close_item(self, status: str) -> list[bytes]:
        if self._open is None:
            return []
        item, kind = self._items[-1], self._open
        item["status"], self._open = status, None
        if kind is DeltaKind.CALL:
            done = self._item_event("response.function_call_arguments.done", arguments=item["arguments"])
            return [done, self._output_event("done", item)]
        if self._answer is not None:
            self._call.add_logprobs(item, self._answer)
        part = item["content"][0]
        name = "reasoning_text" if kind is DeltaKind.REASONING else "output_text"
        extra: dict[str, Any] = {}
        if kind is DeltaKind.CONTENT:
            extra["logprobs"] = [_without_bytes(token) for token in part.get("logprobs", ())]
        return [
            self._item_event(f"response.{name}.done", content_index=0, text=part["text"], **extra),
            self._item_event("response.content_part.done", content_index=0, part=part),
            self._output_event("done", item),
        ]

    def _output_event(self, change: str, item: dict[str, Any]) -> bytes:
        return self._event(f"response.output_item.{change}", output_index=len(self._items) - 1, item=item)

    def _item_event(self, kind: str, **members: Any) -> bytes:
        item = self._items[-1]
        return self._event(kind, item_id=item["id"], output_index=len(self._items) - 1, **members)

    def _event(self, kind: str, **members: Any) -> bytes:
        data = {"type": kind, "sequence_number": self._sequence_number, **members}
        self._sequence_number += 1
        return event(data, kind)


def usage(answer: ChatAnswer) -> dict[str, Any]:
    """Return the token counts of a response."""
    prompt, sampled = len(answer.prompt_ids), len(answer.completion.token_ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": answer.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": answer.num_reasoning_tokens},
        "total_tokens": prompt + sampled,
    }


def new_item(delta: Delta) -> dict[str, Any]:
    """Return an output item with the text or the call of a delta."""
    id = uuid.uuid4().hex
    if delta.kind is DeltaKind.REASONING:
        content = [{"type": "reasoning_text", "text": delta.text}]
        return {"id": f"rs_{id}", "type": "reasoning", "summary": [], "content": content, "status": "completed"}
    if delta.kind is DeltaKind.CONTENT:
        text = {"type": "output_text", "text": delta.text, "annotations": []}
        return {"id": f"msg_{id}", "type": "message", "role": "assistant", "status": "completed", "content": [text]}
    assert delta.call is not None
    return {
        "id": f"fc_{id}",
        "type": "function_call",
        "status": "completed",
        "call_id": delta.call.id,
        "name": delta.call.name,
        "arguments": write_arguments(delta.call),
    }


def _format(text: TextConfig | None) -> dict[str, Any]:
    if text is None or text.format is None or text.format.type == "text":
        return {"type": "text"}
    if text.format.type == "json_object":
        return {"type": "json_object"}
    return {"type": "json_schema", "name": text.format.name or "response", "schema": text.format.schema}


def _logprobs(answer: ChatAnswer) -> list[dict[str, Any]]:
    return [
        {
            "token": item.part.text,
            "bytes": list(item.part.data),
            "logprob": item.logprob,
            "top_logprobs": [
                {"token": part.text, "bytes": list(part.data), "logprob": logprob}
                for part, logprob in item.alternatives
            ],
        }
        for item in answer.token_logprobs
    ]


def _without_bytes(token: dict[str, Any]) -> dict[str, Any]:
    """Return the log-prob of a token as events have it."""
    alternatives = [{"token": each["token"], "logprob": each["logprob"]} for each in token["top_logprobs"]]
    return {"token": token["token"], "logprob": token["logprob"], "top_logprobs": alternatives}


def _answer_message(answer: ModelAnswer) -> Message:
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [message_call(call.id, call.name, call.arguments) for call in answer.tool_calls]
    return message
