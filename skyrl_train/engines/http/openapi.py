"""The OpenAPI 3.1 document of an endpoint, built from the types of its request and response bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

import skyrl_train
from skyrl_train.engines.http.dialects.chat_completions import ChatCompletionRequest, ChatCompletionResponse
from skyrl_train.engines.http.dialects.messages import (
    CountTokensRequest,
    MessagesRequest,
    MessagesResponse,
    TokenCount,
)
from skyrl_train.engines.http.dialects.responses import ResponsesRequest, ResponsesResponse
from skyrl_train.engines.http.openai_protocol import CompletionRequest, CompletionResponse, ErrorResponse
from skyrl_train.engines.http.protocol import REMOTE_METHODS, Limits, NoArguments, ReceiveWeights
from skyrl_train.engines.sampling_params import SAMPLING_RULES

_OBJECT = {"type": "object"}
_OPAQUE = (NoArguments, ReceiveWeights)
"""Bodies that the document does not describe. The first has no members. The second names the memory of a process, which
only a trainer of this package can offer."""
_TEXT_ROUTES: tuple[tuple[str, str, Any, Any, bool], ...] = (
    ("/v1/chat/completions", "OpenAI's Chat Completions.", ChatCompletionRequest, ChatCompletionResponse, True),
    ("/v1/completions", "OpenAI's completions.", CompletionRequest, CompletionResponse, True),
    ("/v1/responses", "OpenAI's Responses.", ResponsesRequest, ResponsesResponse, True),
    ("/v1/messages", "Anthropic's Messages.", MessagesRequest, MessagesResponse, True),
    ("/v1/messages/count_tokens", "Count the tokens of a prompt.", CountTokensRequest, TokenCount, False),
)
"""Routes of texts: path, summary, bodies of request and response, and True if the response may be a stream."""


@cache
def build_openapi_document(limits: Limits, *, text: bool, control: bool) -> dict[str, Any]:
    """Return the OpenAPI document of an endpoint. The result is cached, so do not modify it.

    Args:
        limits: Limits of the endpoint.
        text: True if the endpoint has OpenAI's routes, which need a tokenizer.
        control: True if the endpoint has the routes that abort, pause and change weights.
    """
    calls = [call for call in REMOTE_METHODS.values() if control or not call.control]
    kinds: dict[Any, Any] = {ErrorResponse: ErrorResponse} | {call.method: call.result for call in calls}
    kinds |= {kind: kind for kind in (call.arguments for call in calls) if kind not in _OPAQUE}
    if text:
        kinds |= {kind: kind for _, _, body, response, _ in _TEXT_ROUTES for kind in (body, response)}
    schemas_by_key_and_mode, definitions = TypeAdapter.json_schemas(
        [(key, "validation", TypeAdapter(kind)) for key, kind in kinds.items()],
        ref_template="#/components/schemas/{model}",
    )
    by_key = {key: schema for (key, _), schema in schemas_by_key_and_mode.items()}
    schemas: dict[str, Any] = definitions["$defs"]
    for schema in schemas.values():
        _allow_null(schema)
    for kind in [body for _, _, body, _, _ in _TEXT_ROUTES] if text else ():
        _add_bounds(schemas[kind.__name__]["properties"], limits)

    def operation(summary: str, response: Any, body: type | None = None, media: str = "application/json") -> Any:
        described = {
            "summary": summary,
            "responses": {
                "200": {"description": "The response.", "content": {media: {"schema": response}}},
                "default": {
                    "description": "An error.",
                    "content": {"application/json": {"schema": by_key[ErrorResponse]}},
                },
            },
        }
        if body is not None:
            content = {"application/json": {"schema": by_key.get(body, _OBJECT)}}
            described["requestBody"] = {"content": content, "required": body is not NoArguments}
        return described

    paths: dict[str, dict[str, Any]] = {
        "/health": {"get": operation("Check that an engine is alive.", _OBJECT)},
        "/metrics": {"get": operation("Metrics for Prometheus.", {"type": "string"}, media="text/plain")},
        "/openapi.json": {"get": operation("This document.", _OBJECT)},
        "/v1/models": {"get": operation("List the allowed values of `model`.", _OBJECT)},
        "/v1/models/{model}": {
            "get": operation("Check that `model` may have this value.", _OBJECT)
            | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}
        },
    }
    for call in calls:
        response = {"type": "object", "properties": {"result": by_key[call.method]}, "required": ["result"]}
        body = None if call.verb == "GET" else call.arguments
        summary = f"Call `{call.method}` of the engine; see docs/reference/http_api.md."
        paths[call.route] = {call.verb.lower(): operation(summary, response, body)}
    if text:
        for route, summary, body, kind, streams in _TEXT_ROUTES:
            post = operation(summary, by_key[kind], body)
            if streams:
                post["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
            paths[route] = {"post": post}
        id = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string"}}
        paths["/v1/responses/{response_id}"] = {
            "parameters": [id],
            "get": operation("Return a stored response.", by_key[ResponsesResponse]),
            "delete": operation("Remove a stored response.", _OBJECT),
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "skyrl-train inference engines", "version": skyrl_train.__version__},
        "security": [{"token": []}],
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": paths,
    }


def _allow_null(schema: dict[str, Any]) -> None:
    """Allow null for optional members, where it stands for the default."""
    for name, member in schema.get("properties", {}).items():
        options = member.get("anyOf", [])
        if name not in schema.get("required", ()) and {"type": "null"} not in options:
            described = {key: member.pop(key) for key in ("default", "description", "title") if key in member}
            schema["properties"][name] = {"anyOf": [*(options or ([member] if member else [{}])), {"type": "null"}]}
            schema["properties"][name] |= described


def _add_bounds(members: dict[str, Any], limits: Limits) -> None:
    """Add the bounds that `parse_sampling` and `check_range` check after a body was parsed."""
    for name, (allowed, _) in SAMPLING_RULES.items():
        if name in members:
            members[name].setdefault("description", f"{allowed[:1].upper()}{allowed[1:]}.")
    max_tokens = ("max_tokens", "max_completion_tokens", "max_output_tokens")
    for name, max_value in (("n", limits.samples), *((name, limits.max_tokens) for name in max_tokens)):
        for option in members[name].get("anyOf", [members[name]]) if name in members else ():
            if option.get("type") == "integer":
                option |= {"minimum": 1, "maximum": max_value}
