"""OpenAI's Chat Completions: bodies of requests and responses, and their translation."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from skyrl_train.data.messages import Message, continues_last_message
from skyrl_train.data.token_texts import TokenPart
from skyrl_train.data.tool_formats import ModelAnswer, ToolCall
from skyrl_train.engines.base import SamplingParams
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest
from skyrl_train.engines.http.dialects.base import (
    DeltaKind,
    SentAnswer,
    check_template_kwargs,
    check_tool_choice,
    event,
    function_tool,
    message_call,
    write_arguments,
)
from skyrl_train.engines.http.exchange import ErrorDescription
from skyrl_train.engines.http.json_body import FEW, InvalidBodyError, LenientBody, parse_body
from skyrl_train.engines.http.openai_protocol import (
    Ignored,
    ResponseModel,
    StreamOptions,
    Unsupported,
    UsageInfo,
)

_SAMPLING_NAMES = [field.name for field in fields(SamplingParams) if field.name != "max_tokens"]
_MEDIA_PARTS = ("image_url", "image", "input_audio", "audio", "video", "video_url", "file")
DONE = b"data: [DONE]\n\n"


# -- requests --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ContentPart(LenientBody):
    """A part of a message's content: {"type": "text", "text": "..."}. Images and other media are rejected."""

    type: str
    text: str | None = None
    refusal: str | None = None


@dataclass(frozen=True, kw_only=True)
class FunctionCall(LenientBody):
    """The name and arguments of a tool call."""

    name: str
    arguments: str | dict[str, Any] = ""
    """JSON text, as in responses, or an object."""


@dataclass(frozen=True, kw_only=True)
class MessageToolCall(LenientBody):
    """A tool call in a message of the assistant."""

    id: str = ""
    type: str = "function"
    """Only "function" is supported."""
    function: FunctionCall | None = None


@dataclass(frozen=True, kw_only=True)
class ChatMessage(LenientBody):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """Text or text parts. Only a message with tool calls or reasoning may leave it out."""
    name: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    """Reasoning of the assistant, which the chat template may leave out of earlier turns."""
    reasoning: str | None = None
    """Another name of reasoning_content."""


@dataclass(frozen=True, kw_only=True)
class FunctionDefinition(LenientBody):
    """The definition of a function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    """Accepted without effect."""


@dataclass(frozen=True, kw_only=True)
class ToolDefinition(LenientBody):
    """A tool that the model may call."""

    type: str
    """Only "function" is supported."""
    function: FunctionDefinition | None = None


@dataclass(frozen=True, kw_only=True)
class ChosenFunction(LenientBody):
    """The function that must be called."""

    name: str


@dataclass(frozen=True, kw_only=True)
class NamedToolChoice(LenientBody):
    """A choice of one tool."""

    type: Literal["function"]
    function: ChosenFunction


@dataclass(frozen=True, kw_only=True)
class JsonSchema(LenientBody):
    """A named JSON schema."""

    name: str = "response"
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None
    """Accepted without effect: the schema is always enforced."""


@dataclass(frozen=True, kw_only=True)
class ResponseFormat(LenientBody):
    """The form of the answer: text, any JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


def _drop_empty_lists(message: Any) -> Any:
    """Drop empty lists, such as tool_calls, that clients copy from earlier responses."""
    return {name: value for name, value in message.items() if value != []} if isinstance(message, dict) else message


@dataclass(frozen=True, kw_only=True)
class ChatCompletionRequest(LenientBody):
    """The body of POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[Annotated[ChatMessage, BeforeValidator(_drop_empty_lists)]], FEW]
    n: int = 1
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    tools: Annotated[list[ToolDefinition], FEW] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    """A variable of the chat template, which may ignore it."""
    # Extensions of OpenAI's parameters, under vLLM's names.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None
    return_token_ids: bool = False
    continue_final_message: bool = False
    """True to continue the last message, which must be the assistant's."""
    add_generation_prompt: bool | None = None
    """Must be the opposite of continue_final_message, or null."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template. They replace those of the server."""
    # Parameters of other APIs, which change the answer.
    input: Annotated[Any, Unsupported()] = None
    instructions: Annotated[Any, Unsupported("")] = None
    system: Annotated[Any, Unsupported("")] = None
    max_output_tokens: Annotated[Any, Unsupported()] = None
    stop_sequences: Annotated[Any, Unsupported([])] = None
    frequency_penalty: Annotated[Any, Unsupported(0)] = None
    presence_penalty: Annotated[Any, Unsupported(0)] = None
    logit_bias: Annotated[Any, Unsupported({})] = None
    functions: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None
    moderation: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, Unsupported("medium")] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    prompt: Annotated[Any, Unsupported()] = None
    echo: Annotated[Any, Unsupported(False)] = None
    suffix: Annotated[Any, Unsupported("")] = None
    best_of: Annotated[Any, Unsupported(1)] = None
    use_beam_search: Annotated[Any, Unsupported(False)] = None
    length_penalty: Annotated[Any, Unsupported(1)] = None
    bad_words: Annotated[Any, Unsupported([])] = None
    allowed_token_ids: Annotated[Any, Unsupported([])] = None
    logits_processors: Annotated[Any, Unsupported([])] = None
    truncate_prompt_tokens: Annotated[Any, Unsupported()] = None
    include_stop_str_in_output: Annotated[Any, Unsupported(False)] = None
    skip_special_tokens: Annotated[Any, Unsupported(True)] = None
    prompt_logprobs: Annotated[Any, Unsupported()] = None
    structured_outputs: Annotated[Any, Unsupported()] = None
    guided_json: Annotated[Any, Unsupported()] = None
    guided_regex: Annotated[Any, Unsupported()] = None
    guided_choice: Annotated[Any, Unsupported()] = None
    guided_grammar: Annotated[Any, Unsupported()] = None
    chat_template: Annotated[Any, Unsupported()] = None
    documents: Annotated[Any, Unsupported([])] = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None


def parse(raw: Any) -> ChatCompletionCall:
    """Return the call with a body.

    Args:
        raw: Parsed JSON.

    Raises:
        InvalidBodyError: A member is invalid.
    """
    body: ChatCompletionRequest = parse_body(ChatCompletionRequest, raw)
    if not body.messages:
        raise InvalidBodyError("messages", "must contain at least one message.")
    messages = [_to_message(message, f"messages[{index}]") for index, message in enumerate(body.messages)]
    if body.continue_final_message and not continues_last_message(messages):
        raise InvalidBodyError("continue_final_message", "requires that the last message is the assistant's.")
    if body.add_generation_prompt is body.continue_final_message:
        raise InvalidBodyError("add_generation_prompt", "must be the opposite of continue_final_message; leave it out.")
    if body.stream_options is not None and not body.stream:
        raise InvalidBodyError("stream_options", "requires stream=true.")
    if body.top_logprobs and not body.logprobs:
        raise InvalidBodyError("top_logprobs", "requires logprobs=true.")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InvalidBodyError("max_completion_tokens", "and max_tokens differ; give one of them.")
    sampling = {name: value for name in _SAMPLING_NAMES if (value := getattr(body, name)) is not None}
    if (
        max_tokens := body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ) is not None:
        sampling["max_tokens"] = max_tokens
    functions = [_function(tool, f"tools[{index}]") for index, tool in enumerate(body.tools or ())]
    tools = [function_tool(each.name, each.description, each.parameters) for each in functions]
    choice, forced = _tool_choice(body)
    check_tool_choice("tool_choice", tools, choice, forced)
    kwargs = check_template_kwargs(body.chat_template_kwargs)
    if body.reasoning_effort is not None:
        kwargs = {"reasoning_effort": body.reasoning_effort, **kwargs}
    return ChatCompletionCall(
        body,
        ChatRequest(
            messages=messages,
            tools=tools,
            tool_choice=choice,
            forced_tool=forced,
            parallel_tool_calls=body.parallel_tool_calls,
            sampling=sampling,
            n=body.n,
            seed=body.seed,
            logprobs=body.logprobs,
            top_logprobs=body.top_logprobs,
            json_schema=_json_schema(body.response_format),
            chat_template_kwargs=kwargs,
            continue_final_message=body.continue_final_message,
        ),
    )


def _to_message(message: ChatMessage, path: str) -> Message:
    reasoning = message.reasoning_content or message.reasoning
    if message.content is None and not (message.role == "assistant" and (message.tool_calls or reasoning)):
        raise InvalidBodyError(f"{path}.content", "is missing.")
    result: Message = {
        "role": "system" if message.role == "developer" else message.role,
        "content": _to_text(message.content, path),
    }
    if reasoning and message.role == "assistant":
        result["reasoning_content"] = reasoning
    if message.tool_calls:
        if message.role != "assistant":
            raise InvalidBodyError(f"{path}.tool_calls", "is only allowed in messages of the assistant.")
        functions = [_function(call, f"{path}.tool_calls[{n}]") for n, call in enumerate(message.tool_calls)]
        result["tool_calls"] = [
            message_call(call.id, function.name, function.arguments)
            for call, function in zip(message.tool_calls, functions, strict=True)
        ]
    extras = {"name": message.name, "tool_call_id": message.tool_call_id}
    return result | {name: value for name, value in extras.items() if value is not None}


def _function(owner: Any, path: str) -> Any:
    """Return the function of a tool or of a tool call."""
    if owner.type != "function":
        raise InvalidBodyError(f"{path}.type", f"must be 'function', got {owner.type[:100]!r}.")
    if owner.function is None:
        raise InvalidBodyError(f"{path}.function", "is missing.")
    return owner.function


def _to_text(content: str | list[ContentPart] | None, path: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part_text(part, f"{path}.content[{index}]") for index, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type in _MEDIA_PARTS:
        raise InvalidBodyError(f"{path}.type", f"{part.type!r} is not supported: messages may only contain text.")
    if part.type not in ("text", "refusal"):
        raise InvalidBodyError(f"{path}.type", f"must be 'text', got {part.type[:100]!r}.")
    text = part.text if part.type == "text" else part.refusal
    if text is None:
        raise InvalidBodyError(f"{path}.{part.type}", "is missing.")
    return text


def _tool_choice(body: ChatCompletionRequest) -> tuple[Literal["auto", "none", "required"], str | None]:
    if isinstance(body.tool_choice, NamedToolChoice):
        return "required", body.tool_choice.function.name
    return body.tool_choice or "auto", None


def _json_schema(response_format: ResponseFormat | None) -> dict[str, Any] | None:
    if response_format is None or response_format.type == "text":
        return None
    if response_format.type == "json_object":
        return {}
    if response_format.json_schema is None or response_format.json_schema.schema is None:
        missing = "response_format.json_schema" + (".schema" if response_format.json_schema else "")
        raise InvalidBodyError(missing, "is missing.")
    return response_format.json_schema.schema


# -- responses -------------------------------------------------------------------------------------------------------


class TopLogprob(ResponseModel):
    """A likely token and its log-prob."""

    token: str
    logprob: float | None
    bytes: list[int]


class TokenLogprobInfo(ResponseModel):
    """The log-prob of one token of a chat completion."""

    token: str
    """The token's part of the text; empty for a token without text."""
    logprob: float | None
    """Log-prob in nats; null if it is not finite."""
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ResponseModel):
    """The log-probs of a chat completion."""

    content: list[TokenLogprobInfo]
    refusal: None


class ResponseFunctionCall(ResponseModel):
    """The name and arguments of a tool call."""

    name: str
    arguments: str
    """JSON text."""


class ResponseToolCall(ResponseModel):
    """A tool call of the model."""

    id: str
    type: Literal["function"]
    function: ResponseFunctionCall


class ResponseMessage(ResponseModel):
    """The message of a chat completion."""

    role: Literal["assistant"]
    content: str | None
    """The text without reasoning and tool calls; null for tool calls without text."""
    reasoning_content: str = ""
    """The reasoning, if there is any."""
    tool_calls: list[ResponseToolCall] = Field(default_factory=list)


class ChatChoice(ResponseModel):
    """One sample of a chat completion."""

    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    message: ResponseMessage
    logprobs: ChatLogprobs | None
    token_ids: list[int] = Field(default_factory=list)
    """Sampled tokens, with return_token_ids."""
    weight_versions: list[tuple[int, int, int]] = Field(default_factory=list)
    """[start, stop, version]: tokens [start, stop) were sampled with this version; with return_token_ids."""


class ChatCompletionResponse(ResponseModel):
    """The response of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] = Field(default_factory=list)
    """Tokens of the prompt, with return_token_ids."""


@dataclass
class ChatCompletionCall:
    """A parsed call of Chat Completions."""

    body: ChatCompletionRequest
    request: ChatRequest
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))
    params: Mapping[str, str] = field(
        default_factory=lambda: {"json_schema": "response_format", "top_logprobs": "top_logprobs"}
    )

    def __post_init__(self) -> None:
        """Name the member that the client used for the maximum number of tokens."""
        if self.body.max_completion_tokens is not None:
            self.params = {**self.params, "max_tokens": "max_completion_tokens"}

    @property
    def stream(self) -> bool:
        """True if the response is a stream."""
        return self.body.stream

    def respond(self, answers: Sequence[ChatAnswer]) -> dict[str, Any]:
        """Return the response as JSON-like values."""
        response = self.head("chat.completion")
        response["choices"] = [self.choice(index, answer) for index, answer in enumerate(answers)]
        response["usage"] = usage(answers)
        if self.body.return_token_ids:
            response["prompt_token_ids"] = answers[0].prompt_ids
        return response

    def open_stream(self) -> ChatCompletionStream:
        """Return the writer of the response as a stream."""
        return ChatCompletionStream(self)

    def head(self, kind: str) -> dict[str, Any]:
        """Return the members that responses and chunks share."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.body.model}

    def choice(self, index: int, answer: ChatAnswer) -> dict[str, Any]:
        """Return one choice of the response."""
        choice: dict[str, Any] = {
            "index": index,
            "message": _message(answer.answer),
            "finish_reason": answer.finish_reason,
            "logprobs": _logprobs(answer) if self.body.logprobs else None,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.completion.token_ids
            choice["weight_versions"] = [[span.start, span.stop, span.version] for span in answer.completion.versions]
        return choice


class ChatCompletionStream:
    """The chunks of a chat completion.

    With log-probs or token ids, the text of a choice comes in one chunk at the end, so that it has those of its text.
    """

    def __init__(self, call: ChatCompletionCall):
        self._call = call
        self._head = call.head("chat.completion.chunk")
        self._sent: dict[int, SentAnswer] = {}

    def update(self, index: int, partial: ModelAnswer) -> bytes:
        """Return the chunks for a longer beginning of the answer `index`."""
        if self._call.body.logprobs or self._call.body.return_token_ids:
            return b""
        delta = self._advance(index, partial)
        return self._chunk(index, delta) if delta else b""

    def finish(self, answers: Sequence[ChatAnswer]) -> bytes:
        """Return the remaining chunks, the token counts if they were requested, and the end of the stream."""
        chunks = []
        for index, answer in enumerate(answers):
            delta = self._advance(index, answer.answer)
            if delta:
                choice = self._call.choice(index, answer)
                del choice["message"], choice["index"], choice["finish_reason"]
                chunks.append(self._chunk(index, delta, **choice))
            chunks.append(self._chunk(index, {}, finish_reason=answer.finish_reason))
        options = self._call.body.stream_options
        if options is not None and options.include_usage:
            chunks.append(event(self._head | {"choices": [], "usage": usage(answers)}))
        return b"".join(chunks) + DONE

    def fail(self, error: ErrorDescription) -> bytes:
        """Return an event with the error."""
        return event(error.to_openai()) + DONE

    def _advance(self, index: int, answer: ModelAnswer) -> dict[str, Any]:
        """Return the delta of a choice's next chunk, which is empty if there is nothing new."""
        delta: dict[str, Any] = {}
        if index not in self._sent:
            self._sent[index] = SentAnswer()
            delta = {"role": "assistant", "content": ""}
        sent = self._sent[index]
        first_call = len(sent.calls)
        calls: list[dict[str, Any]] = []
        for part in sent.advance(answer):
            if part.kind is DeltaKind.CALL:
                assert part.call is not None
                calls.append({"index": first_call + len(calls), **_tool_call(part.call)})
            else:
                delta["content" if part.kind is DeltaKind.CONTENT else "reasoning_content"] = part.text
        return delta | ({"tool_calls": calls} if calls else {})

    def _chunk(self, index: int, delta: dict[str, Any], **members: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None} | members
        return event(self._head | {"choices": [choice]})


def usage(answers: Sequence[ChatAnswer]) -> dict[str, Any]:
    """Return the token counts of a response. A prompt with several samples counts once."""
    prompt = len(answers[0].prompt_ids)
    sampled = sum(len(answer.completion.token_ids) for answer in answers)
    counts: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }
    if answers[0].num_cached_tokens:
        counts["prompt_tokens_details"] = {"cached_tokens": answers[0].num_cached_tokens}
    return counts


def _message(answer: ModelAnswer) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if answer.tool_calls else "")}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["tool_calls"] = [_tool_call(call) for call in answer.tool_calls]
    return message


def _tool_call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": write_arguments(call)}}


def _logprobs(answer: ChatAnswer) -> dict[str, Any]:
    content = [
        {
            **_token(item.part, item.logprob),
            "top_logprobs": [_token(part, logprob) for part, logprob in item.alternatives],
        }
        for item in answer.token_logprobs
    ]
    return {"content": content, "refusal": None}


def _token(part: TokenPart, logprob: float) -> dict[str, Any]:
    return {"token": part.text, "logprob": logprob, "bytes": list(part.data)}
