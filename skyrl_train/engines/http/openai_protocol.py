"""The bodies of OpenAI's chat and text completions, in both directions; the OpenAPI document is made from them.

A parameter is honoured, refused by name unless its value changes nothing (`Unsupported`), or without effect.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

from skyrl_train.engines.http.json_body import FEW, Body


class Unsupported:
    """A parameter that is refused, except for null and these values, which have no effect."""

    def __init__(self, *values: Any):
        self._values = values

    def _check(self, given: Any) -> Any:
        if given not in self._values:
            only = "".join(f" or {item!r}" for item in self._values)
            raise ValueError(f"is not supported here; leave it out (null{only} changes nothing).")
        return given

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self._values), "description": "Not supported; these values change nothing."}


Ignored = Annotated[Any, Field(description="Without effect on the answer.")]
"""It concerns accounts, billing and storage, or features that are refused."""


@dataclass(frozen=True, kw_only=True)
class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False


@dataclass(frozen=True, kw_only=True)
class TextPart(Body):
    type: Literal["text"]
    text: str


@dataclass(frozen=True, kw_only=True)
class ChatMessage(Body):
    """A message of the conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart]
    name: str | None = None
    tool_call_id: str | None = None


def _without_empty(given: Any) -> Any:
    """Drop the empty lists that messages of earlier answers hold, such as tool_calls."""
    return {name: value for name, value in given.items() if value != []} if isinstance(given, dict) else given


@dataclass(frozen=True, kw_only=True)
class _CommonCompletionRequest(Body):
    """The parameters of both kinds of completions."""

    model: str
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's, under vLLM's names.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    return_token_ids: bool = False
    frequency_penalty: Annotated[Any, Unsupported(0)] = None
    presence_penalty: Annotated[Any, Unsupported(0)] = None
    logit_bias: Annotated[Any, Unsupported({})] = None
    tools: Annotated[Any, Unsupported([])] = None
    tool_choice: Annotated[Any, Unsupported("none", "auto")] = None
    functions: Annotated[Any, Unsupported([])] = None
    function_call: Annotated[Any, Unsupported("none", "auto")] = None
    response_format: Annotated[Any, Unsupported({"type": "text"})] = None
    modalities: Annotated[Any, Unsupported(["text"])] = None
    audio: Annotated[Any, Unsupported()] = None
    prediction: Annotated[Any, Unsupported()] = None
    reasoning_effort: Annotated[Any, Unsupported()] = None
    verbosity: Annotated[Any, Unsupported("medium")] = None
    web_search_options: Annotated[Any, Unsupported()] = None
    top_logprobs: Annotated[Any, Unsupported(0)] = None
    best_of: Annotated[Any, Unsupported(1)] = None
    suffix: Annotated[Any, Unsupported("")] = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    parallel_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


@dataclass(frozen=True, kw_only=True)
class ChatCompletionRequest(_CommonCompletionRequest):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Annotated[ChatMessage, BeforeValidator(_without_empty)]], FEW]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    # Beyond OpenAI's, under vLLM's names.
    continue_final_message: bool = False
    """The answer continues the last message, which is the assistant's."""
    add_generation_prompt: bool | None = None
    """The opposite of continue_final_message, which decides."""


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(_CommonCompletionRequest):
    """POST /v1/completions"""

    prompt: str | list[int] | list[str] | Annotated[list[list[int]], FEW]
    logprobs: int | None = None
    """0 gives the sampled tokens' own; more are refused."""
    echo: bool = False
    """Puts the prompt before the text, and its tokens before the others."""
    add_special_tokens: bool = True
    """Puts BOS before a prompt of text if the tokenizer does so and the prompt does not begin with it."""


# -- answers ---------------------------------------------------------------------------------------------------------


class _ResponseModel(BaseModel):
    """Base class of descriptions of what the endpoint sends; tests hold answers to them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class UsageInfo(_ResponseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(_ResponseModel):
    token: str
    """The token's part of the text; empty for one that has none."""
    logprob: float | None
    """nats; null for one that is no finite number"""
    bytes: list[int]
    top_logprobs: list[Any]


class ChatLogprobs(_ResponseModel):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(_ResponseModel):
    tokens: list[str]
    token_logprobs: list[float | None]
    """nats; null for the first token of an echoed prompt and for one that is no finite number"""
    top_logprobs: None
    text_offset: list[int]


class ResponseMessage(_ResponseModel):
    role: Literal["assistant"]
    content: str


class _Choice(_ResponseModel):
    index: int
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []
    """With return_token_ids."""
    weight_versions: list[tuple[int, int, int]] = []
    """With return_token_ids: [first token, end, version of the weights]."""


class ChatChoice(_Choice):
    message: ResponseMessage
    logprobs: ChatLogprobs | None


class TextChoice(_Choice):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] = []
    """With return_token_ids."""


class ChatCompletionResponse(_ResponseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_token_ids: list[int] = []
    """With return_token_ids."""


class CompletionResponse(_ResponseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageInfo


class ErrorInfo(_ResponseModel):
    message: str
    type: Literal["invalid_request_error", "authentication_error", "server_error"]
    param: str | None
    """The path of the member at fault."""
    code: str
    detail: list[Any] = []


class ErrorResponse(_ResponseModel):
    error: ErrorInfo
