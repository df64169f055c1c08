"""A chat request and its answers, in the form that all dialects of chat APIs are translated to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from skyrl_train.data.messages import Message
from skyrl_train.data.token_arrays import Tokens
from skyrl_train.data.token_texts import TokenPart
from skyrl_train.data.tool_formats import ModelAnswer
from skyrl_train.engines.base import Completion

OnProgress = Callable[[int, ModelAnswer], None]
"""A function that receives the index of a sample, and the beginning of its answer that is certain so far. Content and
reasoning only grow, and tool calls are complete."""


@dataclass(frozen=True, kw_only=True)
class ChatRequest:
    """A request of a client, independent of its dialect."""

    messages: list[Message]
    """The conversation in normal form (`data.messages`). Messages of the assistant may have `tool_calls`, whose items
    have an `id`, and `reasoning_content`. Messages of role "tool" have a `tool_call_id`."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Definitions {"type": "function", "function": {"name", "description", "parameters"}}."""
    tool_choice: Literal["auto", "none", "required"] = "auto"
    forced_tool: str | None = None
    """Name of the tool that the answer must call. `tool_choice` is then "required"."""
    parallel_tool_calls: bool = True
    """False limits the answer to one call."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """The sampling parameters that the client gave, by the names of `SamplingParams`. The others have the defaults of
    the server or of the session."""
    n: int = 1
    seed: int | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    json_schema: dict[str, Any] | None = None
    """Schema that the answer must follow; {} for any JSON object, None for text."""
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    continue_final_message: bool = False
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token, its log-prob, and the most likely tokens in its place."""

    part: TokenPart
    """The token's part of the content; empty for a token without text."""
    logprob: float
    """Log-prob in nats."""
    alternatives: tuple[tuple[TokenPart, float], ...] = ()
    """The most likely tokens in order, each with its log-prob."""


@dataclass(frozen=True, kw_only=True)
class ChatAnswer:
    """One sampled answer to a ChatRequest."""

    answer: ModelAnswer
    """Reasoning, content and tool calls. Every call has an id."""
    finish_reason: Literal["stop", "length", "tool_calls"]
    prompt_ids: Tokens
    completion: Completion
    num_cached_tokens: int = 0
    """Tokens of the prompt that a session already held."""
    num_reasoning_tokens: int = 0
    """Tokens of the reasoning's text. The model may have sampled other tokens for this text."""
    stop_sequence: str | None = None
    """The client's stop string that ended the answer, or None."""
    token_logprobs: tuple[TokenLogprob, ...] = ()
    """One item for each sampled token if the request has `logprobs`."""
