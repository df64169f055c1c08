"""The HTTP endpoint for an engine or an EngineClient: OpenAI's routes for text, token-level routes for RemoteEngines.

Every route requires the token; no received data is unpickled or executed.
"""

from __future__ import annotations

import asyncio
import copy
import json
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError

from skyrl_train.aio import deadline
from skyrl_train.clock import now
from skyrl_train.engines.base import Capabilities, Completion, EngineHealth, SampleRequest
from skyrl_train.engines.client import PROGRESS_COUNTERS, EngineClient, ProgressWatchdog
from skyrl_train.engines.http.json_body import InvalidBodyError, parse_body, read_json, write_json
from skyrl_train.engines.http.openai import CompletionCall, Translator
from skyrl_train.engines.http.openapi import build_openapi_document
from skyrl_train.engines.http.protocol import (
    DEADLINE_MARGIN_S,
    REMOTE_METHODS,
    SAMPLING_ONLY_LIMITS,
    ConnectWeights,
    Generate,
    Limits,
    LoadAdapter,
    RemoteMethod,
    Result,
    ServerInfo,
    UnloadAdapter,
    encode_error,
)
from skyrl_train.errors import DeadlineExceeded, EngineError, SkyRLError
from skyrl_train.http_server import HttpServer, error_body, send, transfer_timeout_s, write_deadline
from skyrl_train.listeners import Listener, is_authorized
from skyrl_train.report.prometheus import CONTENT_TYPE, RequestMetrics

log = logging.getLogger(__name__)
METRICS_TIMEOUT_S = 5.0
"""How long /metrics waits for the engines' own numbers, which it does without otherwise: scrapers wait for 10 s."""
_CLIENT_CLOSED_REQUEST = 499
"""The status of a request whose client went away before its answer, as nginx counts it."""
ENDPOINT_LISTENER = Listener("The HTTP endpoint", "generator.http_endpoint_host", "generator.http_endpoint_port")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _HttpError(Exception):
    """An answer with an error status that does not come from an engine."""

    def __init__(self, status: int, message: str, code: str, param: str | None = None):
        super().__init__(message)
        self.status, self.code, self.param = status, code, param


class HttpEndpoint:
    """Serves while it is entered: `async with HttpEndpoint(client, tokenizer, model_name="policy") as endpoint`.

    Runs on the caller's event loop and does not close the engine. Routes for methods that the engine lacks (weights and
    score, with an EngineClient) answer 501.
    """

    def __init__(
        self,
        engine: Any,
        tokenizer: Any,
        *,
        model_name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        limits: Limits | None = None,
        deadline_s: float = 600.0,
        default_max_tokens: int = 1024,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        control: bool = True,
        drain_s: float = 5.0,
    ):
        """`token`: None generates one, in a file that only this user can read (`token_file`). Port 0: any free one.

        `deadline_s`: the longest deadline of a request. `default_max_tokens`: for completions without a length.
        `control`: whether there are routes to abort, pause, put to sleep and change weights; without them, holders of
        the token can only sample and score, within SAMPLING_LIMITS and under request ids that cannot collide with
        others. `drain_s`: how long exit waits for running requests before it cancels them. Without a tokenizer there
        are no OpenAI routes. Raises ConfigError as `Listener.check_token` does.
        """
        ENDPOINT_LISTENER.check_token(token, host)
        self.token = secrets.token_urlsafe(32) if token is None else token
        self.token_file: Path | None = None
        self._makes_token_file = token is None
        self._engine = engine
        self._watchdog = ProgressWatchdog("engine", self._health_of_all)
        self.model_name = model_name
        self._host, self._port = host, port
        self._limits = limits or (Limits() if control else SAMPLING_ONLY_LIMITS)
        self._deadline_s = deadline_s
        self._control = control
        self._metrics = RequestMetrics()
        self._sessions = "" if control else f"{secrets.token_hex(8)}."
        """Prefix of callers' sessions, without which they could use those of others."""
        self._drain_s = drain_s
        self._translator: Translator | None = None
        if tokenizer is not None:
            self._translator = Translator(
                copy.deepcopy(tokenizer),  # tokenizers are not thread-safe, and this one is used in another thread
                limits=replace(self._limits, prompt_tokens=min(self._limits.prompt_tokens, _max_prompt_tokens(engine))),
                default_max_tokens=default_max_tokens,
                deadline_s=deadline_s,
                chat_template_kwargs=chat_template_kwargs,
            )
        self._adapters: set[str] = set()
        self._thread = ThreadPoolExecutor(1, "http-endpoint")
        self._background: set[asyncio.Task[Any]] = set()
        self._server: HttpServer | None = None

    async def __aenter__(self) -> HttpEndpoint:
        app = web.Application(middlewares=[self._track_request], client_max_size=self._limits.body_bytes)
        app.router.add_get("/health", self._health, expect_handler=self._expect)
        app.router.add_get("/metrics", self._metrics_page, expect_handler=self._expect)
        app.router.add_get("/openapi.json", self._document, expect_handler=self._expect)
        app.router.add_get("/v1/models", self._list_models, expect_handler=self._expect)
        app.router.add_get("/v1/models/{model:.+}", self._show_model, expect_handler=self._expect)
        app.router.add_post("/v1/chat/completions", self._openai("chat"), expect_handler=self._expect)
        app.router.add_post("/v1/completions", self._openai("text"), expect_handler=self._expect)
        for call in [call for call in REMOTE_METHODS.values() if self._control or not call.control]:
            app.router.add_route(call.verb, call.route, self._handler(call), expect_handler=self._expect)
        app.router.add_route("*", "/{path:(?s:.*)}", self._unknown, expect_handler=self._expect)
        self._server = HttpServer(app, drain_s=self._drain_s)
        try:
            await self._server.listen(self._host, self._port)
        except OSError as error:
            raise ENDPOINT_LISTENER.address_error(self._host, self._port, error) from error
        if self._makes_token_file:
            descriptor, path = tempfile.mkstemp(prefix="skyrl-api-key-")  # readable by this user only
            self.token_file = Path(path)
            with os.fdopen(descriptor, "w") as file:
                file.write(self.token)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.close()
        if self._background:
            await asyncio.wait(self._background, timeout=self._drain_s)
        for task in self._background:
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self.token_file is not None:
            self.token_file.unlink(missing_ok=True)

    @property
    def url(self) -> str:
        """The address, e.g. http://127.0.0.1:8000; OpenAI clients need `/v1` appended."""
        assert self._server is not None
        return self._server.url

    # -- every route -------------------------------------------------------------------------------------------------

    @web.middleware
    async def _track_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Answers in time, or ends the connection of a client that does not read; counts both."""
        route, begun, status = _route(request), now(), _CLIENT_CLOSED_REQUEST
        self._metrics.on_request_start(route)
        try:
            response = await self._answer(request, handler)
            await send(request, response)
            status = response.status
            return response
        finally:
            self._metrics.on_request_end(route, status, now() - begun)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Checks the token before anything else, even the route; gives all errors one format."""
        try:
            self._check_token(request)
            return await handler(request)
        except _HttpError as refusal:
            return _error(refusal.status, error_body(refusal.status, str(refusal), refusal.code, refusal.param))
        except InvalidBodyError as error:
            return _error(400, error_body(400, str(error), "invalid_value", error.param or None))
        except SkyRLError as error:
            return _error(*encode_error(error))
        except web.HTTPException as error:
            return self._http_error(request, error)
        except (web.RequestPayloadError, HttpProcessingError):
            return _error(400, error_body(400, "The body ended early or is not HTTP.", "invalid_body"))
        except Exception:
            log.exception("%s %s failed", request.method, request.path)
            return _error(500, error_body(500, "The server made a mistake; its log says more.", "internal_error"))

    def _http_error(self, request: web.Request, error: web.HTTPException) -> web.Response:
        """aiohttp's own refusals: 404, 405, 413."""
        known = {
            404: ("not_found", f"There is no {request.path[:100]!r}."),
            405: ("method_not_allowed", f"{request.path[:100]!r} does not take {request.method[:20]}."),
            413: ("body_too_large", f"The body has more than {self._limits.body_bytes} bytes."),
        }
        code, text = known.get(error.status, ("refused", error.reason or "refused"))
        return _error(error.status, error_body(error.status, text, code))

    async def _unknown(self, request: web.Request) -> NoReturn:
        """Handles unknown routes here: aiohttp would answer an Expect header before the token is checked."""
        if request.path in {resource.canonical for resource in request.app.router.resources()}:
            raise web.HTTPMethodNotAllowed(request.method, [])
        raise web.HTTPNotFound

    async def _expect(self, request: web.Request) -> None:
        """Answers 100-continue only to callers with the token; other expectations have no effect."""
        invited = request.headers[hdrs.EXPECT].lower() == "100-continue" and request.version == HttpVersion11
        if invited and self._has_token(request):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the answer itself has not begun

    def _has_token(self, request: web.Request) -> bool:
        return is_authorized(request.headers.get(hdrs.AUTHORIZATION, ""), self.token)

    def _check_token(self, request: web.Request) -> None:
        if not self._has_token(request):
            raise _HttpError(
                401, "Send the header 'Authorization: Bearer <token>' with this server's token.", "no_token"
            )

    async def _body(self, request: web.Request) -> Any:
        """The parsed body; an empty one is an empty object."""
        length = request.content_length
        if length == 0 or not request.can_read_body:
            return {}
        if request.headers.get(hdrs.CONTENT_ENCODING, "identity").lower() != "identity":
            raise _HttpError(415, "Compressed bodies are not taken.", "unsupported_encoding")
        if request.content_type != "application/json":
            raise _HttpError(415, "Content-Type must be application/json.", "unsupported_media_type")
        if length is not None and length > self._limits.body_bytes:
            raise web.HTTPRequestEntityTooLarge(self._limits.body_bytes, length)
        seconds = transfer_timeout_s(self._limits.body_bytes if length is None else length)
        try:
            async with asyncio.timeout(seconds):
                body = await request.read()
        except TimeoutError:
            text = f"The body did not arrive within {seconds:g} s."
            raise _HttpError(408, text, "body_too_slow") from None
        return read_json(body)

    # -- the token-level wire ----------------------------------------------------------------------------------------

    def _handler(self, call: RemoteMethod) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = await self._body(request) if call.verb == "POST" else {}
            # In a run this is the trainer's event loop, and checking thousands of requests takes long.
            arguments = await asyncio.to_thread(lambda: parse_body(call.arguments, body).checked(self._limits))
            if call.method == "capabilities":
                result: Any = ServerInfo(self.model_name, self._attribute("capabilities"), self._limits)
            elif isinstance(arguments, Generate):
                result = await self._sample(arguments.requests)
            else:
                longest = arguments.timeout_s if isinstance(arguments, ConnectWeights) else self._deadline_s
                result = await self._ask(call.method, arguments.values(), longest + DEADLINE_MARGIN_S)
                self._note_adapter(arguments)
            return _json(write_json(Result(result)))

        return handle

    async def _ask(self, method: str, values: Sequence[Any], deadline_s: float) -> Any:
        async with deadline(method, deadline_s):
            return await self._attribute(method)(*values)

    async def _sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Completions in request order, each within its own deadline or this server's, whichever is shorter."""
        if not requests:
            return []
        prefix = "" if self._control else f"{secrets.token_hex(8)}."
        own = [self._with_unique_ids(request, prefix) for request in requests]
        prompts = {request.group or request.request_id: len(request.token_ids) for request in requests}
        self._metrics.count_prompt_tokens(sum(prompts.values()))
        try:
            work = self._attribute("generate")(own)
            completions: list[Completion] = await self._watchdog.watch(work, self._deadline_s + DEADLINE_MARGIN_S)
        except (asyncio.CancelledError, DeadlineExceeded):
            # The client is gone, or the engine does not respond; an engine in another process would continue.
            task = asyncio.ensure_future(self._abort_quietly([request.request_id for request in own]))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            raise
        self._metrics.count_completion_tokens(sum(len(done.token_ids) for done in completions))
        answered = zip(requests, completions, strict=True)  # arrays do not travel
        return [replace(done, request_id=given.request_id, routing=None) for given, done in answered]

    def _with_unique_ids(self, request: SampleRequest, prefix: str) -> SampleRequest:
        """The request as sent to the engine: with a deadline and, without control, with unique names."""
        return replace(
            request,
            request_id=prefix + request.request_id,
            group=request.group and prefix + request.group,
            session=request.session and self._sessions + request.session,  # goes on in later calls
            deadline_s=min(request.deadline_s or self._deadline_s, self._deadline_s),
        )

    async def _health_of_all(self) -> EngineHealth:
        """The counters of all engines that are served, and their requests."""
        found = await self._attribute("health")()
        every = found if isinstance(found, list) else [found]
        totals = {one: sum(getattr(health, one) for health in every) for one in (*PROGRESS_COUNTERS, "queued")}
        return EngineHealth("all", 0, **totals)

    async def _abort_quietly(self, request_ids: list[str]) -> None:
        try:
            await self._ask("abort", [request_ids], DEADLINE_MARGIN_S)
        except SkyRLError as error:
            log.warning("Requests of a client that went away could not be aborted: %s", error)

    def _attribute(self, name: str) -> Any:
        found = getattr(self._engine, name, None)
        if found is None:
            kind = type(self._engine).__name__
            raise _HttpError(
                501, f"What is served here, {kind}, has no {name}; serve one engine alone.", "not_supported"
            )
        return found

    def _note_adapter(self, arguments: object) -> None:
        """Note loaded adapters: OpenAI's routes accept their names as `model`."""
        if isinstance(arguments, LoadAdapter):
            self._adapters.add(arguments.name)
        elif isinstance(arguments, UnloadAdapter):
            self._adapters.discard(arguments.name)

    # -- OpenAI's routes ---------------------------------------------------------------------------------------------

    def _openai(self, kind: str) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            translator = self._translator
            if translator is None:
                raise _HttpError(501, "This server has no tokenizer: use /generate with token ids.", "not_supported")
            body = await self._body(request)
            call: CompletionCall = await self._run_in_thread(getattr(translator, kind), body, self._adapter(body))
            scores: list[list[float]] = []
            if call.has_prompt_logprobs:
                scores = await self._ask("score", [call.prompts], self._deadline_s + DEADLINE_MARGIN_S)
            completions = await self._sample(call.requests)
            results = call, completions, scores
            if not call.body.stream:
                return _json(await self._run_in_thread(lambda: write_json(translator.answer(*results))))
            chunks = await self._run_in_thread(lambda: list(map(write_json, translator.chunks(*results))))
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
            async with write_deadline(request, sum(map(len, chunks))):
                await response.prepare(request)
                for chunk in chunks:
                    await response.write(b"data: " + chunk + b"\n\n")
                await response.write(b"data: [DONE]\n\n")
            return response

        return handle

    async def _run_in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run in a thread, as tokenizing megabytes takes seconds. Raises DeadlineExceeded."""
        async with deadline("turning text into tokens or back", self._deadline_s):
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args))

    def _adapter(self, body: Any) -> str | None:
        """The adapter that `model` names; None for the model itself. Raises 404 for a name that is not served."""
        name = body.get("model") if isinstance(body, dict) else None
        if not isinstance(name, str):
            return None  # refused when the body is checked
        self._check_model(name)
        return None if name == self.model_name else name

    def _check_model(self, name: str) -> None:
        if name not in self._model_names():
            served = ", ".join(map(repr, self._model_names()))
            problem = f"model={name[:100]!r} is not served here; there is {served}."
            raise _HttpError(404, problem, "model_not_found", "model")

    def _model_names(self) -> list[str]:
        return [self.model_name, *sorted(self._adapters)]

    async def _list_models(self, request: web.Request) -> web.Response:
        return _json(write_json({"object": "list", "data": [_model(name) for name in self._model_names()]}))

    async def _show_model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        self._check_model(name)
        return _json(write_json(_model(name)))

    async def _document(self, request: web.Request) -> web.Response:
        return web.json_response(
            build_openapi_document(self._limits, text=self._translator is not None, control=self._control)
        )

    async def _health(self, request: web.Request) -> web.Response:
        """Answers 200 as long as an engine is alive."""
        answer = await self._ask("health", [], DEADLINE_MARGIN_S)
        if answer == []:
            raise EngineError("No engine is alive.")
        return web.json_response({"status": "ok"})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        """What Prometheus reads."""
        engine: dict[str, int] = {}
        with suppress(SkyRLError, _HttpError):  # the endpoint's own numbers are worth more while engines do not answer
            async with deadline("health of the engines", METRICS_TIMEOUT_S):
                health = await self._health_of_all()
            engine = {"running": health.running, "waiting": health.queued}
        return web.Response(body=self._metrics.text(**engine), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})


def _json(body: bytes, status: int = 200) -> web.Response:
    headers = {"WWW-Authenticate": "Bearer"} if status == 401 else {}
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)


def _error(status: int, body: dict[str, Any]) -> web.Response:
    return _json(json.dumps(body).encode(), status)  # texts of errors may hold what UTF-8 does not


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "skyrl-train"}


def _route(request: web.Request) -> str:
    """The route as it was added: paths that callers make up are one."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None or resource.canonical == "/{path}" else resource.canonical


def _max_prompt_tokens(engine: Any) -> int:
    """The most tokens of a prompt that an engine, or any of a client's, can take; no limit if one does not say."""
    engines = engine.engines if isinstance(engine, EngineClient) else [engine]
    known = [one.capabilities.max_model_len for one in engines if isinstance(one.capabilities, Capabilities)]
    return max(known) if known and len(known) == len(engines) and all(known) else sys.maxsize
