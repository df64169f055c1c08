"""Bodies of requests and error responses, for all servers that answer calls of chat APIs.

An error has the form of the dialect that the client speaks: Anthropic's for Messages, OpenAI's for everything else.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from skyrl_train.engines.http.json_body import InvalidBodyError, read_json
from skyrl_train.engines.http.protocol import encode_error
from skyrl_train.errors import SkyRLError
from skyrl_train.http_server import error_body, transfer_timeout_s
from skyrl_train.listeners import is_authorized

log = logging.getLogger(__name__)
API_KEY_HEADER = "x-api-key"
ANTHROPIC_VERSION_HEADER = "anthropic-version"
_MIN_THREAD_BYTES = 1 << 16
"""Size from which bodies are parsed in a thread. In a run the event loop is the trainer's."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """An error response that does not come from an engine."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, *, details: dict[str, Any] | None = None
    ):
        """Create the error.

        Args:
            status: HTTP status.
            message: Explanation for people.
            code: Machine-readable code of the error.
            param: Path of the invalid member of the body; None if the error is not about a member.
            details: Machine-readable description in Anthropic's form; None leaves it out.
        """
        super().__init__(message)
        self.status, self.code, self.param, self.details = status, code, param, details


@dataclass(frozen=True, kw_only=True)
class ErrorDescription:
    """An error response, independent of the dialect."""

    status: int
    message: str
    code: str
    """Machine-readable code, or the name of the exception."""
    param: str | None = None
    detail: list[Any] | None = None
    """Data that a RemoteEngine needs to raise the exception again."""
    details: dict[str, Any] | None = field(default=None)
    """Machine-readable description in Anthropic's form."""

    def to_openai(self) -> dict[str, Any]:
        """Return the body in OpenAI's form."""
        return error_body(self.status, self.message, self.code, self.param, self.detail)

    def to_anthropic(self) -> dict[str, Any]:
        """Return the body in Anthropic's form."""
        kind = _ANTHROPIC_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.details is not None:
            error["details"] = self.details
        return {"type": "error", "error": error, "request_id": f"req_{secrets.token_hex(12)}"}


def describe_error(error: Exception) -> ErrorDescription | None:
    """Return the response to an exception, or None if it is a defect of the server."""
    if isinstance(error, ApiError):
        return ErrorDescription(
            status=error.status, message=str(error), code=error.code, param=error.param, details=error.details
        )
    if isinstance(error, InvalidBodyError):
        return ErrorDescription(status=400, message=str(error), code="invalid_value", param=error.param or None)
    if isinstance(error, SkyRLError):
        status, body = encode_error(error)
        described = body["error"]
        return ErrorDescription(
            status=status, message=described["message"], code=described["code"], detail=described.get("detail")
        )
    if isinstance(error, RecursionError):
        return ErrorDescription(status=400, message="The body is nested too deeply.", code="invalid_value")
    if isinstance(error, web.RequestPayloadError | HttpProcessingError):
        return ErrorDescription(status=400, message="The body ended early or is not valid HTTP.", code="invalid_body")
    return None


def describe_any_error(request: web.Request, error: Exception) -> ErrorDescription:
    """Return the response to an exception. A defect of the server is logged, and the response has no details."""
    if (description := describe_error(error)) is not None:
        return description
    log.error("%s %s failed", request.method, get_route(request), exc_info=error)
    return ErrorDescription(status=500, message="Internal server error; see the server's log.", code="internal_error")


def describe_http_error(request: web.Request, error: web.HTTPException, max_body_bytes: int) -> ErrorDescription:
    """Return the response to aiohttp's own errors, such as 404, 405 and 413.

    Args:
        request: The request.
        error: The error.
        max_body_bytes: Limit of the size of a body.
    """
    known = {
        404: ("not_found", f"There is no route {request.path[:100]!r}; see /openapi.json."),
        405: ("method_not_allowed", f"{request.path[:100]!r} does not support {request.method[:20]}."),
        413: ("body_too_large", f"The body has more than {max_body_bytes} bytes."),
    }
    code, message = known.get(error.status, ("refused", error.reason or "refused"))
    return ErrorDescription(status=error.status, message=message, code=code)


def error_response(request: web.Request, error: ErrorDescription) -> web.Response:
    """Return an error response in the form of the client's dialect."""
    body = error.to_anthropic() if speaks_anthropic(request) else error.to_openai()
    # Error messages may contain text that UTF-8 cannot encode, so the body is ASCII.
    headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else {}
    return web.Response(
        status=error.status, body=json.dumps(body).encode(), content_type="application/json", headers=headers
    )


def speaks_anthropic(request: web.Request) -> bool:
    """True if the client speaks Anthropic's dialect: it calls Messages, or sends the header `anthropic-version`."""
    is_messages = get_route(request).endswith(("/messages", "/messages/count_tokens"))
    return is_messages or ANTHROPIC_VERSION_HEADER in request.headers


def get_route(request: web.Request) -> str:
    """Return the route of a request as it was registered, for logs: a path can contain the secret of a session."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None else resource.canonical


def has_token(request: web.Request, token: str) -> bool:
    """True if a request has the token, as `Authorization: Bearer` or, from Anthropic's clients, as `x-api-key`."""
    if is_authorized(request.headers.get(hdrs.AUTHORIZATION, ""), token):
        return True
    key = request.headers.get(API_KEY_HEADER)
    return key is not None and speaks_anthropic(request) and is_authorized(f"Bearer {key}", token)


async def read_body(request: web.Request, max_body_bytes: int, *, keep_nulls: bool = False) -> Any:
    """Return the parsed JSON body of a request; an empty body is an empty object.

    Args:
        request: The request.
        max_body_bytes: Largest body, in bytes.
        keep_nulls: True keeps members that are null, because texts of users contain objects.

    Raises:
        ApiError: The body is compressed, is not JSON, or arrives too slowly.
        HTTPRequestEntityTooLarge: The body is larger than allowed.
        InvalidBodyError: The body is not valid JSON.
    """
    length = request.content_length
    if length == 0 or not request.can_read_body:
        return {}
    if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
        raise ApiError(415, "Compressed bodies are not supported; send the body as is.", "unsupported_encoding")
    if request.content_type != "application/json":
        raise ApiError(415, "Content-Type must be application/json.", "unsupported_media_type")
    if length is not None and length > max_body_bytes:
        raise web.HTTPRequestEntityTooLarge(max_body_bytes, length)
    seconds = transfer_timeout_s(max_body_bytes if length is None else length)
    try:
        async with asyncio.timeout(seconds):
            body = await request.read()
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {seconds:g} s.", "body_too_slow") from None
    if len(body) < _MIN_THREAD_BYTES:
        return read_json(body, keep_nulls=keep_nulls)
    return await asyncio.to_thread(read_json, body, keep_nulls=keep_nulls)
