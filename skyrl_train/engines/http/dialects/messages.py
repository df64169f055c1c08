"""Anthropic's Messages: bodies of requests and responses, and their translation."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from skyrl_train.data.messages import Message, continues_last_message
from skyrl_train.data.tool_formats import ModelAnswer
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest
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
from skyrl_train.engines.http.openai_protocol import Ignored, ResponseModel, Unsupported

_SEPARATOR = "\n\n"
"""Text between the text blocks of a message that the model did not write."""


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class TextBlock(LenientBody):
    """A text block: {"type": "text", "text": "..."}. Images and documents are rejected."""

    type: str
    text: str | None = None


@dataclass(frozen=True, kw_only=True)
class ContentBlock(LenientBody):
    """A block of a message's content: text, tool_use, tool_result or thinking."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    """Content of a tool_result."""


@dataclass(frozen=True, kw_only=True)
class MessageParam(LenientBody):
    """A message of the conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


@dataclass(frozen=True, kw_only=True)
class ToolParam(LenientBody):
    """A tool that the model may call."""

    name: str
    type: str = "custom"
    """Only "custom" is supported."""
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted without effect."""


@dataclass(frozen=True, kw_only=True)
class ToolChoice(LenientBody):
    """A choice of tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    """Name of the tool of type "tool"."""
    disable_parallel_tool_use: bool = False


@dataclass(frozen=True, kw_only=True)
class Thinking(LenientBody):
    """A switch of reasoning: the variable `enable_thinking` of the chat template. Budgets are ignored."""

    type: Literal["enabled", "adaptive", "disabled"]


@dataclass(frozen=True, kw_only=True)
class OutputFormat(LenientBody):
    """The form of the answer: JSON that follows a schema."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OutputConfig(LenientBody):
    """Settings of the answer."""

    effort: str | None = None
    """The variable `reasoning_effort` of the chat template, which may ignore it."""
    format: OutputFormat | None = None


@dataclass(frozen=True, kw_only=True)
class CountTokensRequest(LenientBody):
    """The body of POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[MessageParam], FEW]
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[ToolParam], FEW] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """Earlier name of output_config.format."""
    thread: Annotated[Any, Field(description="Not supported. The error lets clients continue without it.")] = None
    mcp_servers: Annotated[Any, Unsupported([])] = None
    container: Annotated[Any, Unsupported()] = None
    cache_control: Ignored = None
    context_management: Ignored = None
    diagnostics: Ignored = None
    inference_geo: Ignored = None
    metadata: Ignored = None
    service_tier: Ignored = None
    speed: Ignored = None
    user_profile_id: Ignored = None
    workspace_id: Ignored = None


@dataclass(frozen=True, kw_only=True)
class MessagesRequest(CountTokensRequest):
    """The body of POST /v1/messages."""

    max_tokens: int
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    # Parameters of other APIs, which change the answer.
    instructions: Annotated[Any, Unsupported("")] = None
    n: Annotated[Any, Unsupported(1)] = None
    max_completion_tokens: Annotated[Any, Unsupported()] = None
    max_output_tokens: Annotated[Any, Unsupported()] = None
    stop: Annotated[Any, Unsupported([])] = None
    seed: Annotated[Any, Unsupported()] = None
    frequency_penalty: Annotated[Any, Unsupported(0)] = None
    presence_penalty: Annotated[Any, Unsupported(0)] = None
    logit_bias: Annotated[Any, Unsupported({})] = None
    response_format: Annotated[Any, Unsupported({"type": "text"})] = None
    min_p: Annotated[Any, Unsupported(0)] = None
    repetition_penalty: Annotated[Any, Unsupported(1)] = None


def parse(raw: Any) -> MessagesCall:
    """Return the call with a body.

    Args:
        raw: Parsed JSON.

    Raises:
        InvalidBodyError: A member is invalid.
        ApiError: The client asks for a thread, which the server would have to keep.
    """
    _check_thread(raw)
    body: MessagesRequest = parse_body(MessagesRequest, raw)
    sampling: dict[str, Any] = {"max_tokens": body.max_tokens}
    optional = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k, "stop": body.stop_sequences}
    sampling |= {name: value for name, value in optional.items() if value is not None}
    return MessagesCall(body, _to_request(body, sampling))


def parse_count(raw: Any) -> ChatRequest:
    """Return the request whose tokens a body asks to count.

    Args:
        raw: Parsed JSON.

    Raises:
        InvalidBodyError: A member is invalid.
        ApiError: The client asks for a thread, which the server would have to keep.
    """
    _check_thread(raw)
    return _to_request(parse_body(CountTokensRequest, raw), {})


def _check_thread(raw: Any) -> None:
    if isinstance(raw, dict) and raw.get("thread") is not None:
        raise ApiError(
            400,
            "thread is not supported: send the whole conversation in every request.",
            "thread_unsupported_request",
            "thread",
            details={"error_code": "thread_unsupported_request", "unsupported": ["thread"]},
        )


def _to_request(body: CountTokensRequest, sampling: Mapping[str, Any]) -> ChatRequest:
    if not body.messages:
        raise InvalidBodyError("messages", "must contain at least one message.")
    system = _join_texts(body.system, "system")
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    for index, message in enumerate(body.messages):
        messages += _to_messages(message, f"messages[{index}].content")
    tools = [_to_tool(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    choice = body.tool_choice or ToolChoice(type="auto")
    kinds: dict[str, Literal["auto", "none", "required"]] = {
        "auto": "auto",
        "none": "none",
        "any": "required",
        "tool": "required",
    }
    forced = choice.name if choice.type == "tool" else None
    if choice.type == "tool" and forced is None:
        raise InvalidBodyError("tool_choice.name", "is missing.")
    check_tool_choice("tool_choice", tools, kinds[choice.type], forced)
    config = body.output_config or OutputConfig()
    kwargs: dict[str, Any] = {} if body.thinking is None else {"enable_thinking": body.thinking.type != "disabled"}
    output_format = config.format or body.output_format
    if config.effort is not None:
        kwargs["reasoning_effort"] = config.effort
    return ChatRequest(
        messages=messages,
        tools=tools,
        tool_choice=kinds[choice.type],
        forced_tool=forced,
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        sampling=sampling,
        json_schema=None if output_format is None else output_format.schema,
        chat_template_kwargs=kwargs,
        continue_final_message=continues_last_message(messages),
    )


def _to_tool(tool: ToolParam, path: str) -> dict[str, Any]:
    if tool.type != "custom":
        raise InvalidBodyError(
            f"{path}.type", f"must be 'custom', got {tool.type[:100]!r}. Tools that a server runs are not supported."
        )
    return function_tool(tool.name, tool.description, tool.input_schema)


def _to_messages(message: MessageParam, path: str) -> list[Message]:
    """Return the messages of a message: one for each tool result, and one for everything else."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    if not message.content and message.role != "assistant":
        raise InvalidBodyError(path, "must have at least one block.")
    results: list[Message] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(message.content):
        where = f"{path}[{index}]"
        if block.type == "text":
            texts.append(_require(block.text, f"{where}.text"))
        elif block.type == "tool_result" and message.role == "user":
            id = _require(block.tool_use_id, f"{where}.tool_use_id")
            content = _join_texts(block.content, f"{where}.content")
            results.append({"role": "tool", "content": content, "tool_call_id": id})
        elif block.type == "tool_use" and message.role == "assistant":
            id, name = _require(block.id, f"{where}.id"), _require(block.name, f"{where}.name")
            calls.append(message_call(id, name, block.input or {}))
        elif block.type == "thinking" and message.role == "assistant":
            thoughts.append(_require(block.thinking, f"{where}.thinking"))
        elif block.type != "redacted_thinking":
            raise InvalidBodyError(
                f"{where}.type", f"{block.type[:100]!r} is not supported in a message of role {message.role!r}."
            )
    if message.role != "assistant":
        rest: list[Message] = [{"role": message.role, "content": _SEPARATOR.join(texts)}] if texts else []
        return results + rest
    answer: Message = {"role": "assistant", "content": "".join(texts)}
    if thoughts:
        answer["reasoning_content"] = _SEPARATOR.join(thoughts)
    if calls:
        answer["tool_calls"] = calls
    return [answer]


def _join_texts(content: str | list[TextBlock] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for index, block in enumerate(content):
        if block.type != "text":
            raise InvalidBodyError(f"{path}[{index}].type", f"must be 'text', got {block.type[:100]!r}.")
        texts.append(_require(block.text, f"{path}[{index}].text"))
    return _SEPARATOR.join(texts)


def _require(value: str | None, path: str) -> str:
    if value is None:
        raise InvalidBodyError(path, "is missing.")
    return value


# -- responses -------------------------------------------------------------------------------------------------------


class ResponseBlock(ResponseModel):
    """A block of the answer: text, thinking or tool_use."""

    type: Literal["text", "thinking", "tool_use"]
    text: str = ""
    thinking: str = ""
    signature: str = ""
    """Always empty: thinking is not signed."""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = Field(default_factory=dict)


class MessagesUsage(ResponseModel):
    """The token counts of a message."""

    input_tokens: int
    """Tokens of the prompt without those that a session already held."""
    output_tokens: int
    cache_read_input_tokens: int = 0
    """Tokens of the prompt that a session already held."""


class MessagesResponse(ResponseModel):
    """The response of POST /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[ResponseBlock]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(ResponseModel):
    """The response of POST /v1/messages/count_tokens."""

    input_tokens: int


@dataclass
class MessagesCall:
    """A parsed call of Messages."""

    body: MessagesRequest
    request: ChatRequest
    id: str = field(default_factory=lambda: f"msg_{uuid.uuid4().hex}")
    params: Mapping[str, str] = field(
        default_factory=lambda: {"json_schema": "output_config.format", "stop": "stop_sequences"}
    )

    @property
    def stream(self) -> bool:
        """True if the response is a stream."""
        return self.body.stream

    def respond(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """Return the response as JSON-like values."""
        (answer,) = answers
        blocks = [_block(delta) for delta in SentAnswer().advance(answer.answer)]
        message = self.message(blocks or [{"type": "text", "text": ""}], usage(answer))
        return message | stop_members(answer)

    def open_stream(self) -> MessagesStream:
        """Return the writer of the response as a stream."""
        return MessagesStream(self)

    def message(self, blocks: list[dict[str, Any]], counts: dict[str, Any]) -> dict[str, Any]:
        """Return a message that has not ended."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.body.model,
            "content": blocks,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts,
        }


class MessagesStream:
    """The events of a message."""

    def __init__(self, call: MessagesCall):
        self._call = call
        self._sent = SentAnswer()
        self._has_started = False
        self._num_blocks = 0
        self._open: DeltaKind | None = None
        """Kind of the block that is open."""

    def update(self, index: int, partial: ModelAnswer) -> bytes:
        """Return the events for a longer beginning of the answer."""
        return b"".join(self._start() + self._advance(partial))

    def finish(self, answers: Sequence[ChatAnswer]) -> bytes:
        """Return the remaining events."""
        (answer,) = answers
        events = self._start() + self._advance(answer.answer)
        if not self._num_blocks:
            events += self._open_block(Delta(DeltaKind.CONTENT))
        events += self._close_block()
        events.append(_event("message_delta", delta=stop_members(answer), usage=usage(answer)))
        events.append(_event("message_stop"))
        return b"".join(events)

    def fail(self, error: ErrorDescription) -> bytes:
        """Return an event with the error."""
        return event(error.to_anthropic(), "error")

    def _start(self) -> list[bytes]:
        if self._has_started:
            return []
        self._has_started = True
        message = self._call.message([], {"input_tokens": 0, "output_tokens": 0})  # message_delta has the counts
        return [_event("message_start", message=message)]

    def _advance(self, answer: ModelAnswer) -> list[bytes]:
        events: list[bytes] = []
        for delta in self._sent.advance(answer):
            if delta.kind is not self._open or delta.kind is DeltaKind.CALL:
                events += self._close_block() + self._open_block(delta)
            events.append(_event("content_block_delta", index=self._num_blocks - 1, delta=_block_delta(delta)))
        return events

    def _open_block(self, delta: Delta) -> list[bytes]:
        empty: dict[str, Any] = _block(Delta(delta.kind, "", delta.call))
        if delta.kind is DeltaKind.CALL:
            empty["input"] = {}
        self._open, self._num_blocks = delta.kind, self._num_blocks + 1
        return [_event("content_block_start", index=self._num_blocks - 1, content_block=empty)]

    def _close_block(self) -> list[bytes]:
        if self._open is None:
            return []
        self._open = None
        return [_event("content_block_stop", index=self._num_blocks - 1)]


def usage(answer: ChatAnswer) -> dict[str, int]:
    """Return the token counts of a message."""
    cached = answer.num_cached_tokens
    counts = {"input_tokens": len(answer.prompt_ids) - cached, "output_tokens": len(answer.completion.token_ids)}
    return counts | ({"cache_read_input_tokens": cached} if cached else {})


def stop_members(answer: ChatAnswer) -> dict[str, Any]:
    """Return the members that say why a message ended."""
    reason = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}[answer.finish_reason]
    if reason == "end_turn" and answer.stop_sequence is not None:
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": answer.stop_sequence if reason == "stop_sequence" else None}


def _event(kind: str, **members: Any) -> bytes:
    return event({"type": kind, **members}, kind)


def _block(delta: Delta) -> dict[str, Any]:
    if delta.kind is DeltaKind.REASONING:
        return {"type": "thinking", "thinking": delta.text, "signature": ""}
    if delta.kind is DeltaKind.CONTENT:
        return {"type": "text", "text": delta.text}
    assert delta.call is not None
    return {"type": "tool_use", "id": delta.call.id, "name": delta.call.name, "input": delta.call.arguments}


def _block_delta(delta: Delta) -> dict[str, Any]:
    if delta.kind is DeltaKind.REASONING:
        return {"type": "thinking_delta", "thinking": delta.text}
    if delta.kind is DeltaKind.CONTENT:
        return {"type": "text_delta", "text": delta.text}
    assert delta.call is not None
    return {"type": "input_json_delta", "partial_json": write_arguments(delta.call)}
