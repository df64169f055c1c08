"""The bodies of OpenAI's chat and text completions, in both directions; the OpenAPI document is made from them.

A parameter is honoured, refused by name unless its value changes nothing (`Only`), or without effect on the answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field, ValidationError, model_validator
from pydantic_core import CoreSchema, core_schema

from skyrl_train.engines.http.codec import Malformed, below, seen


def _unicode(text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("is not valid Unicode: it holds half of a surrogate pair.") from error
    return text


class Only:
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


class _FirstError(FailFast):
    """Stops at the first item that is wrong, of perhaps a million."""

    __hash__ = object.__hash__  # alternatives of a member need one


Text = Annotated[str, AfterValidator(_unicode)]
Ids = Annotated[list[int], _FirstError()]
Texts = Annotated[list[Text], _FirstError()]
Ignored = Annotated[Any, Field(description="Without effect on the answer.")]
"""It concerns accounts, billing and storage, or features that are refused."""


class _Given(BaseModel):
    """What a client sends: nothing is converted, and unknown members are refused. null is as good as nothing."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_null(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        # One unknown member is enough to refuse them all; each would become an error of its own, of a million perhaps.
        unknown = next((k for k, v in given.items() if v is not None and k not in cls.model_fields), None)
        return {k: v for k, v in given.items() if v is not None and (k in cls.model_fields or k == unknown)}


class StreamOptions(_Given):
    include_usage: bool = False
    include_obfuscation: bool = False


class TextPart(_Given):
    type: Literal["text"]
    text: Text


class ChatMessage(_Given):
    """A message of the conversation; the empty members of an earlier answer are accepted in its message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | Annotated[list[TextPart], _FirstError()]
    name: Text | None = None
    tool_call_id: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty(cls, given: Any) -> Any:
        return {k: v for k, v in given.items() if v != []} if isinstance(given, dict) else given


class _Body(_Given):
    """The parameters of both kinds of completions."""

    model: Text
    n: int = 1
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    stop: Text | Texts | None = None
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    # Beyond OpenAI's, under vLLM's names.
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop_token_ids: Ids = []
    ignore_eos: bool = False
    return_token_ids: bool = False
    frequency_penalty: Annotated[Any, Only(0)] = None
    presence_penalty: Annotated[Any, Only(0)] = None
    logit_bias: Annotated[Any, Only({})] = None
    tools: Annotated[Any, Only([])] = None
    tool_choice: Annotated[Any, Only("none", "auto")] = None
    functions: Annotated[Any, Only([])] = None
    function_call: Annotated[Any, Only("none", "auto")] = None
    response_format: Annotated[Any, Only({"type": "text"})] = None
    modalities: Annotated[Any, Only(["text"])] = None
    audio: Annotated[Any, Only()] = None
    prediction: Annotated[Any, Only()] = None
    reasoning_effort: Annotated[Any, Only()] = None
    verbosity: Annotated[Any, Only("medium")] = None
    web_search_options: Annotated[Any, Only()] = None
    top_logprobs: Annotated[Any, Only(0)] = None
    best_of: Annotated[Any, Only(1)] = None
    suffix: Annotated[Any, Only("")] = None
    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    parallel_tool_calls: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None


class ChatBody(_Body):
    """POST /v1/chat/completions"""

    messages: Annotated[list[ChatMessage], _FirstError()]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    # Beyond OpenAI's, under vLLM's names.
    continue_final_message: bool = Field(
        default=False, description="The answer continues the last message, which is the assistant's."
    )
    add_generation_prompt: bool | None = Field(
        default=None, description="The opposite of continue_final_message, which decides."
    )


class TextBody(_Body):
    """POST /v1/completions"""

    prompt: Text | Ids | Texts | Annotated[list[Ids], _FirstError()]
    logprobs: int | None = Field(default=None, description="0 gives the sampled tokens' own; more are refused.")
    echo: bool = Field(default=False, description="Puts the prompt before the text, and its tokens before the others.")
    add_special_tokens: bool = Field(
        default=True,
        description="Puts BOS before a prompt of text if the tokenizer does so and the prompt does not begin with it.",
    )


B = TypeVar("B", bound=_Given)


def read_body(kind: type[B], given: Any) -> B:
    """Parsed JSON as a body. Raises Malformed that names the member: what is allowed, what was given."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _malformed(error, kind, given) from error


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a finite number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "string_unicode": "valid Unicode",
    "bool_type": "true or false",
    "list_type": "a list",
    "model_type": "an object",
}


def _malformed(error: ValidationError, kind: type[_Given], given: Any) -> Malformed:
    """What is wrong with the first member that is wrong; one that is not known comes first, as it explains more."""
    details = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
    member = details[0]["loc"][:1]
    placed = [(_path(one["loc"], given, one["type"] == "missing"), one) for one in details if one["loc"][:1] == member]
    param = max((path for path, _ in placed), key=len)  # of several alternatives the one that fits furthest
    alternatives = [one for path, one in placed if path == param]
    first = alternatives[0]
    if first["type"] == "extra_forbidden":
        known = kind.model_fields if len(first["loc"]) == 1 else ()
        close = difflib.get_close_matches(param[:100], known, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else "/openapi.json describes what is taken."
        return Malformed(param, f"is not known here. {hint}")
    if first["type"] == "missing":
        return Malformed(param, "is missing.")
    if first["type"] == "value_error":
        return Malformed(param, str(first["ctx"]["error"]))
    if first["type"] == "literal_error":
        return Malformed(param, f"must be one of {first['ctx']['expected']}, got {seen(first['input'])}.")
    allowed = " or ".join(dict.fromkeys(_EXPECTED.get(one["type"], one["msg"]) for one in alternatives))
    return Malformed(param, f"must be {allowed}, got {seen(first['input'])}.")


def _path(places: Sequence[int | str], given: Any, missing: bool) -> str:
    """("messages", 0, "content", "list[TextPart]", 1, "text") -> messages[0].content[1].text: without alternatives.

    missing: Whether the last place is of a member that `given` lacks.
    """
    path = ""
    for number, place in enumerate(places):
        if isinstance(place, int) and isinstance(given, list):
            path, given = f"{path}[{place}]", given[place]
        elif (
            isinstance(place, str)
            and isinstance(given, dict)
            and (place in given or (missing and number == len(places) - 1))
        ):
            path, given = below(path, place), given.get(place)
    return path


# -- answers ---------------------------------------------------------------------------------------------------------


class _Answer(BaseModel):
    """What the endpoint sends; these classes describe it, and tests hold answers to them."""

    model_config = ConfigDict(extra="forbid")


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(_Answer):
    token: str
    """The token's part of the text; empty for one that has none."""
    logprob: float | None
    """nats; null for one that is no finite number"""
    bytes: list[int]
    top_logprobs: list[Any]


class ChatLogprobs(_Answer):
    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    """nats; null for the first token of an echoed prompt and for one that is no finite number"""
    top_logprobs: None
    text_offset: list[int]


class AnswerMessage(_Answer):
    role: Literal["assistant"]
    content: str


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length"]
    token_ids: list[int] = Field(default=[], description="With return_token_ids.")
    weight_versions: list[tuple[int, int, int]] = Field(
        default=[], description="With return_token_ids: [first token, end, version of the weights]."
    )


class ChatChoice(_Choice):
    message: AnswerMessage
    logprobs: ChatLogprobs | None


class TextChoice(_Choice):
    text: str
    logprobs: TextLogprobs | None
    prompt_token_ids: list[int] = Field(default=[], description="With return_token_ids.")


class ChatAnswer(_Answer):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] = Field(default=[], description="With return_token_ids.")


class TextAnswer(_Answer):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class ErrorDetail(_Answer):
    message: str
    type: Literal["invalid_request_error", "authentication_error", "server_error"]
    param: str | None = Field(description="The path of the member at fault.")
    code: str
    detail: list[Any] = []


class Failure(_Answer):
    error: ErrorDetail
