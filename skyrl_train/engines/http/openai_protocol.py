"""The request and response bodies of OpenAI's text completions, and what the bodies of other dialects share with them.

A parameter is supported, rejected by name unless its value changes nothing (`Unsupported`), or accepted without effect
(`Ignored`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic_core import CoreSchema, core_schema

from skyrl_train.engines.http.json_body import FEW, Body, LenientBody


class Unsupported:
    """An annotation of a parameter that is rejected, except for null and values that have no effect."""

    def __init__(self, *values: Any):
        """Create the annotation; `values` are the accepted values."""
        self._values = values

    def _check(self, value: Any) -> Any:
        if value not in self._values:
            accepted = "".join(f" or {item!r}" for item in self._values)
            raise ValueError(f"is not supported; leave it out (null{accepted} has no effect).")
        return value

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> CoreSchema:
        return core_schema.no_info_plain_validator_function(self._check)

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": list(self._values), "description": "Not supported; these values have no effect."}


Ignored = Annotated[Any, Field(description="Accepted without effect.")]
"""A parameter about accounts, billing or storage, or about features that are not supported."""


@dataclass(frozen=True, kw_only=True)
class StreamOptions(LenientBody):
    """Options of a streamed response."""

    include_usage: bool = False
    include_obfuscation: bool = False


@dataclass(frozen=True, kw_only=True)
class CompletionRequest(Body):
    """The body of POST /v1/completions."""

    model: str
    prompt: str | list[int] | list[str] | Annotated[list[list[int]], FEW]
    logprobs: int | None = None
    """0 returns the log-probs of the sampled tokens. Larger numbers are not supported."""
    echo: bool = False
    """True to put the prompt before the text, and its tokens before the sampled tokens."""
    add_special_tokens: bool = True
    """True to put BOS before a text prompt if the tokenizer does so and the prompt does not begin with it."""
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Extensions of OpenAI's parameters, under vLLM's names.
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


# -- responses -------------------------------------------------------------------------------------------------------


class ResponseModel(BaseModel):
    """The base class of descriptions of responses. Tests compare the endpoint's responses with them."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True)


class PromptTokensDetails(ResponseModel):
    """Details of the number of prompt tokens."""

    cached_tokens: int
    """Tokens that a session already held."""


class UsageInfo(ResponseModel):
    """The token counts of a completion."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


class TextLogprobs(ResponseModel):
    """The log-probs of a text completion."""

    tokens: list[str]
    token_logprobs: list[float | None]
    """Log-probs in nats; null for the first token of an echoed prompt and for log-probs that are not finite."""
    top_logprobs: None
    text_offset: list[int]


class TextChoice(ResponseModel):
    """One sample of a text completion."""

    index: int
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = []
    """Sampled tokens, with return_token_ids."""
    weight_versions: list[tuple[int, int, int]] = []
    """[start, stop, version]: tokens [start, stop) were sampled with this version; with return_token_ids."""
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] = []
    """Tokens of the prompt, with return_token_ids."""


class CompletionResponse(ResponseModel):
    """The response of POST /v1/completions."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: UsageInfo


class ErrorInfo(ResponseModel):
    """The description of an error."""

    message: str
    type: Literal["invalid_request_error", "authentication_error", "server_error"]
    param: str | None
    """The path of the invalid member."""
    code: str
    detail: list[Any] = []


class ErrorResponse(ResponseModel):
    """The response of every route if the call fails."""

    error: ErrorInfo
