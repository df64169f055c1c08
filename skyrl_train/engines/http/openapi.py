"""The OpenAPI 3.1 document of an endpoint, made from what reads its bodies."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import TypeAdapter

import skyrl_train
from skyrl_train.engines.http.bodies import ChatAnswer, ChatBody, Failure, TextAnswer, TextBody
from skyrl_train.engines.http.wire import REMOTE_METHODS, Limits, NoArguments, ReceiveWeights, RemoteMethod
from skyrl_train.engines.sampling import RULES

_OPAQUE = (NoArguments, ReceiveWeights)
"""The first has no members; the second names memory of a process, which only a trainer of ours can offer."""
_SCHEMAS = "#/components/schemas/"


@cache
def document(limits: Limits, *, text: bool, control: bool) -> dict[str, Any]:
    """The document; not to be written to.

    Args:
        text: Whether there are OpenAI's routes, which need a tokenizer.
        control: Whether there are the routes that abort, pause and change weights.
    """
    calls = [call for call in REMOTE_METHODS.values() if control or not call.control]
    typed = [call.arguments for call in calls if call.arguments not in _OPAQUE]
    taken: list[Any] = [*([ChatBody, TextBody] if text else []), *typed]
    given: list[Any] = [Failure, *([ChatAnswer, TextAnswer] if text else [])]
    kinds: list[tuple[str, Any, TypeAdapter[Any]]] = [
        *((kind.__name__, "validation", TypeAdapter(kind)) for kind in taken),
        *((kind.__name__, "serialization", TypeAdapter(kind)) for kind in given),
    ]
    _, found = TypeAdapter.json_schemas(kinds, ref_template=f"{_SCHEMAS}{{model}}")
    schemas: dict[str, Any] = found["$defs"]
    for schema in schemas.values():
        _strict(schema)
    for kind in (ChatBody, TextBody) if text else ():
        _bounded(schemas[kind.__name__]["properties"], limits)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Engines of skyrl-train", "version": skyrl_train.__version__},
        "security": [{"token": []}],
        "components": {"schemas": schemas, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "paths": {
            "/health": {"get": _operation("Whether an engine is alive.", answer={"type": "object"})},
            "/metrics": {"get": _operation("Numbers for Prometheus.", answer={"type": "string"}, media="text/plain")},
            "/openapi.json": {"get": _operation("This document.", answer={"type": "object"})},
            "/v1/models": {"get": _operation("The names that `model` may be.", answer={"type": "object"})},
            "/v1/models/{model}": {
                "get": _operation("Whether `model` may be this name.", answer={"type": "object"})
                | {"parameters": [{"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}]}
            },
            **(_completions() if text else {}),
            **{call.route: {call.verb.lower(): _call(call)} for call in calls},
        },
    }


def _completions() -> dict[str, Any]:
    operations = {
        "/v1/chat/completions": _operation("OpenAI's chat completions.", ChatBody, _to(ChatAnswer)),
        "/v1/completions": _operation("OpenAI's completions.", TextBody, _to(TextAnswer)),
    }
    for operation in operations.values():  # with "stream": true
        operation["responses"]["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {path: {"post": operation} for path, operation in operations.items()}


def _call(call: RemoteMethod) -> dict[str, Any]:
    """An operation of the token-level wire."""
    body = None if call.verb == "GET" else call.arguments
    answer = {"type": "object", "properties": {"result": {}}, "required": ["result"]}
    return _operation(f"{call.method} of an engine: see docs/serving.md.", body, answer)


def _operation(
    summary: str, body: type | None = None, answer: dict[str, Any] | None = None, media: str = "application/json"
) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "summary": summary,
        "responses": {
            "200": {"description": "The answer.", "content": {media: {"schema": answer}}},
            "default": {"description": "An error.", "content": {"application/json": {"schema": _to(Failure)}}},
        },
    }
    if body is not None:
        schema = {"type": "object"} if body in _OPAQUE else _to(body)
        required = body is not NoArguments
        operation["requestBody"] = {"content": {"application/json": {"schema": schema}}, "required": required}
    return operation


def _to(kind: type) -> dict[str, str]:
    return {"$ref": f"{_SCHEMAS}{kind.__name__}"}


def _strict(schema: dict[str, Any]) -> None:
    """Members that are not known are refused, and null stands for the default of one that may be left out."""
    if schema.get("type") != "object" or "properties" not in schema:
        return
    schema["additionalProperties"] = False
    for name, member in schema["properties"].items():
        options = member.get("anyOf", [])
        if name not in schema.get("required", ()) and {"type": "null"} not in options:
            described = {key: member.pop(key) for key in ("default", "description", "title") if key in member}
            schema["properties"][name] = {"anyOf": [*(options or ([member] if member else [{}])), {"type": "null"}]}
            schema["properties"][name] |= described


def _bounded(members: dict[str, Any], limits: Limits) -> None:
    """What checks a body after it was read: `checked_sampling`, `within`."""
    for name, (allowed, _) in RULES.items():
        members[name].setdefault("description", f"{allowed[:1].upper()}{allowed[1:]}.")
    for name, most in (("n", limits.samples), ("max_tokens", limits.max_tokens)):
        for option in members[name]["anyOf"]:
            if option.get("type") == "integer":
                option |= {"minimum": 1, "maximum": most}
