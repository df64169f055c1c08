"""The routes of chat APIs, for every server that answers chat requests.

The routes are those of OpenAI's Chat Completions and Responses, and of Anthropic's Messages. A server adds them below a
prefix, and decides for each HTTP request which object answers it. The server itself checks the token and converts
exceptions to error responses (`exchange.error_response`).
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from aiohttp import web

from skyrl_train.data.tokenizer_executor import MIN_THREAD_CHARS
from skyrl_train.data.tool_formats import ModelAnswer
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest, OnProgress
from skyrl_train.engines.http.chat_sampler import UnsupportedFeature
from skyrl_train.engines.http.dialects import chat_completions, messages, responses
from skyrl_train.engines.http.dialects.base import ChatCall
from skyrl_train.engines.http.exchange import ApiError, describe_any_error, get_route, read_body, speaks_anthropic
from skyrl_train.engines.http.json_body import InvalidBodyError, check_unknown_members, write_json
from skyrl_train.http_server import write_deadline

log = logging.getLogger(__name__)
IGNORED_HEADER = "X-Ignored-Parameters"
"""Header of a response that lists the unknown parameters that were ignored."""
_MAX_LISTED = 16
_PLAIN_NAME = re.compile(r"[\w.-]{1,64}", re.ASCII)
_MAX_LOGGED = 256


class ChatResponder(Protocol):
    """An object that answers chat requests: that of an endpoint, or a session of a rollout."""

    def list_models(self) -> Sequence[str]:
        """Return the allowed values of `model`."""

    def find_adapter(self, model: str) -> str | None:
        """Return the adapter that `model` names, or None for the model itself.

        Raises:
            ApiError: The model is unknown.
        """

    async def sample(self, request: ChatRequest, *, on_progress: OnProgress | None = None) -> list[ChatAnswer]:
        """Return the answers to a request; see `ChatSampler.sample`."""

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a request's prompt."""


Resolve = Callable[[web.Request], ChatResponder]
"""A function that returns the object that answers an HTTP request. It raises an ApiError if there is none."""
ExpectHandler = Callable[[web.Request], Awaitable[Any]]
Parse = Callable[[Any, ChatResponder], ChatCall]


def add_chat_routes(
    app: web.Application,
    prefix: str,
    resolve: Resolve,
    *,
    max_body_bytes: int,
    expect_handler: ExpectHandler | None = None,
) -> None:
    """Add the routes of chat APIs to an application.

    Args:
        app: The application.
        prefix: Path before `/v1`, such as "" or "/sessions/{session_id}".
        resolve: Returns the object that answers a request.
        max_body_bytes: Largest body of a request.
        expect_handler: Handler of the header `Expect`; None for that of aiohttp.
    """
    routes = _ChatRoutes(resolve, max_body_bytes)
    for verb, path, handler in (
        ("GET", "/v1/models", routes.list_models),
        ("GET", "/v1/models/{model:.+}", routes.show_model),
        ("POST", "/v1/chat/completions", routes.handler(chat_completions.ChatCompletionRequest, routes.parse_chat)),
        ("POST", "/v1/responses", routes.handler(responses.ResponsesRequest, routes.parse_response)),
        ("GET", "/v1/responses/{response_id}", routes.show_response),
        ("DELETE", "/v1/responses/{response_id}", routes.delete_response),
        ("POST", "/v1/messages", routes.handler(messages.MessagesRequest, routes.parse_message)),
        ("POST", "/v1/messages/count_tokens", routes.count_tokens),
    ):
        app.router.add_route(verb, prefix + path, handler, expect_handler=expect_handler)


class _ChatRoutes:
    def __init__(self, resolve: Resolve, max_body_bytes: int):
        self._resolve, self._max_body_bytes = resolve, max_body_bytes
        self._logged: set[str] = set()
        self._stores: WeakKeyDictionary[ChatResponder, responses.ResponseStore] = WeakKeyDictionary()

    def _store(self, responder: ChatResponder) -> responses.ResponseStore:
        """Return the stored responses of an object, so that sessions cannot see those of others."""
        store = self._stores.get(responder)
        if store is None:
            store = self._stores[responder] = responses.ResponseStore()
        return store

    # -- models ------------------------------------------------------------------------------------------------------

    async def list_models(self, request: web.Request) -> web.Response:
        names = self._resolve(request).list_models()
        models = [_model(name, request) for name in names]
        if not speaks_anthropic(request):
            return _json({"object": "list", "data": models})
        return _json({"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]})

    async def show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._resolve(request).find_adapter(name)
        return _json(_model(name, request))

    # -- dialects ----------------------------------------------------------------------------------------------------

    def parse_chat(self, body: Any, responder: ChatResponder) -> ChatCall:
        return chat_completions.parse(body)

    def parse_response(self, body: Any, responder: ChatResponder) -> ChatCall:
        return responses.parse(body, self._store(responder))

    def parse_message(self, body: Any, responder: ChatResponder) -> ChatCall:
        return messages.parse(body)

    async def show_response(self, request: web.Request) -> web.Response:
        return _json(self._store(self._resolve(request)).get(request.match_info["response_id"]))

    async def delete_response(self, request: web.Request) -> web.Response:
        id = request.match_info["response_id"]
        self._store(self._resolve(request)).remove(id)
        return _json({"id": id, "object": "response.deleted", "deleted": True})

    async def count_tokens(self, request: web.Request) -> web.Response:
        responder = self._resolve(request)
        body = await read_body(request, self._max_body_bytes, keep_nulls=True)
        adapter = _find_adapter(responder, body)
        ignored = check_unknown_members(messages.CountTokensRequest, body)
        parsed = await _run(request.content_length or self._max_body_bytes, lambda: messages.parse_count(body))
        count = await responder.count_tokens(replace(parsed, adapter=adapter))
        return _json({"input_tokens": count}, self._report_ignored(request, ignored))

    def handler(self, kind: Any, parse: Parse) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        """Return the handler of a route that samples.

        Args:
            kind: Class of the body.
            parse: Returns the call with a body.
        """

        async def handle(request: web.Request) -> web.StreamResponse:
            responder = self._resolve(request)
            call, headers = await self._read_call(request, responder, kind, parse)
            if call.stream:
                return await self._stream(request, responder, call, headers)
            answers = await _sample(responder, call, None)
            size = sum(len(answer.completion.token_ids) for answer in answers)
            return _json(await _run(size, lambda: write_json(call.respond(answers))), headers)

        return handle

    async def _read_call(
        self, request: web.Request, responder: ChatResponder, kind: Any, parse: Parse
    ) -> tuple[ChatCall, dict[str, str]]:
        """Return a call, and the headers of its response."""
        body = await read_body(request, self._max_body_bytes, keep_nulls=True)
        adapter = _find_adapter(responder, body)
        ignored = check_unknown_members(kind, body)
        call = await _run(request.content_length or self._max_body_bytes, lambda: parse(body, responder))
        call.request = replace(call.request, adapter=adapter)
        return call, self._report_ignored(request, ignored)

    def _report_ignored(self, request: web.Request, names: Sequence[str]) -> dict[str, str]:
        """Log names of parameters that are ignored, each once, and return the header that lists them."""
        names = [name for name in names if _PLAIN_NAME.fullmatch(name)]
        for name in names:
            if name not in self._logged and len(self._logged) < _MAX_LOGGED:
                self._logged.add(name)
                log.warning("%s: the unknown parameter %r is ignored.", get_route(request), name)
        return {IGNORED_HEADER: ", ".join(names[:_MAX_LISTED])} if names else {}

    async def _stream(
        self, request: web.Request, responder: ChatResponder, call: ChatCall, headers: dict[str, str]
    ) -> web.StreamResponse:
        """Send a response as a stream. An error before its first event is an ordinary error response."""
        stream = call.open_stream()
        partial: dict[int, ModelAnswer] = {}
        changed = asyncio.Event()

        def on_progress(index: int, answer: ModelAnswer) -> None:
            partial[index] = answer
            changed.set()

        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", **headers}
        )
        work = asyncio.ensure_future(_sample(responder, call, on_progress))
        try:
            while await _wait_for_progress(work, changed):
                events = b"".join(stream.update(index, partial[index]) for index in sorted(partial))
                partial.clear()
                await _send_events(request, response, events)
            answers = work.result()
            size = sum(len(answer.completion.token_ids) for answer in answers)
            await _send_events(request, response, await _run(size, lambda: stream.finish(answers)))
        except Exception as error:
            if not response.prepared:
                raise
            await _send_events(request, response, stream.fail(describe_any_error(request, error)))
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
        return response


async def _wait_for_progress(work: asyncio.Future[Any], changed: asyncio.Event) -> bool:
    """Wait until there is progress, and return True; return False once the work has ended."""
    waiter = asyncio.ensure_future(changed.wait())
    try:
        await asyncio.wait({work, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
    changed.clear()
    return not work.done()


async def _send_events(request: web.Request, response: web.StreamResponse, events: bytes) -> None:
    if events:
        async with write_deadline(request, len(events)):
            if not response.prepared:
                await response.prepare(request)
            await response.write(events)


async def _sample(responder: ChatResponder, call: ChatCall, on_progress: OnProgress | None) -> list[ChatAnswer]:
    try:
        return await responder.sample(call.request, on_progress=on_progress)
    except UnsupportedFeature as error:
        raise ApiError(400, str(error), "UnsupportedParameter", call.params.get(error.feature)) from error
    except InvalidBodyError as error:
        name = call.params.get(error.param)
        if name is None:
            raise
        raise InvalidBodyError(name, "", message=str(error).replace(error.param, name, 1)) from error


async def _run(size: int, work: Callable[[], Any]) -> Any:
    """Run `work` on the event loop, or in a thread if it processes many characters or tokens."""
    return await asyncio.to_thread(work) if size >= MIN_THREAD_CHARS else work()


def _find_adapter(responder: ChatResponder, body: Any) -> str | None:
    name = body.get("model") if isinstance(body, dict) else None
    return responder.find_adapter(name) if isinstance(name, str) else None  # the check of the body rejects others


def _model(name: str, request: web.Request) -> dict[str, Any]:
    if speaks_anthropic(request):
        created = "1970-01-01T00:00:00Z"
        return {"type": "model", "id": name, "display_name": name, "created_at": created, "lifecycle": "active"}
    return {"id": name, "object": "model", "created": 0, "owned_by": "skyrl-train"}


def _json(body: Any, headers: dict[str, str] | None = None) -> web.Response:
    data = body if isinstance(body, bytes) else write_json(body)
    return web.Response(body=data, content_type="application/json", headers=headers)
