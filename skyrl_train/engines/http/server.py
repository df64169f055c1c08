"""The HTTP endpoint of an engine or an EngineClient: OpenAI's routes for text, token-level routes for RemoteEngines.

Every route requires the token, and no received data is unpickled or executed.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import os
import secrets
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from aiohttp import HttpVersion11, hdrs, web

from skyrl_train.aio import deadline
from skyrl_train.clock import now
from skyrl_train.engines.base import Capabilities, Completion, EngineHealth, SampleRequest, SamplingParams
from skyrl_train.engines.client import PROGRESS_COUNTERS, EngineClient, ProgressWatchdog
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest, OnProgress
from skyrl_train.engines.http.chat_routes import add_chat_routes
from skyrl_train.engines.http.chat_sampler import ChatSampler
from skyrl_train.engines.http.exchange import (
    ApiError,
    describe_any_error,
    describe_http_error,
    error_response,
    has_token,
    read_body,
)
from skyrl_train.engines.http.json_body import parse_body, write_json
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
)
from skyrl_train.errors import DeadlineExceeded, EngineError, SkyRLError
from skyrl_train.http_server import HttpServer, send, write_deadline
from skyrl_train.listeners import Listener
from skyrl_train.report.prometheus import CONTENT_TYPE, RequestMetrics

log = logging.getLogger(__name__)
METRICS_TIMEOUT_S = 5.0
"""Seconds that /metrics waits for the engines' counters before it omits them. Scrapers usually wait for 10 s."""
_CLIENT_CLOSED_REQUEST = 499
"""Status that is counted for a request whose client disconnected before the response, as in nginx."""
ENDPOINT_LISTENER = Listener("The HTTP endpoint", "generator.http_endpoint_host", "generator.http_endpoint_port")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpEndpoint:
    """An HTTP server for an engine or an EngineClient, which listens while the context is entered.

    It runs on the caller's event loop and does not close the engine. Routes for methods that the engine lacks (weights
    and `score`, with an EngineClient) respond with status 501.

    Example:
        async with HttpEndpoint(client, tokenizer, model_name="policy") as endpoint:
            print(endpoint.url)
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
        """Create an endpoint that does not listen yet.

        Args:
            engine: An InferenceEngine or an EngineClient.
            tokenizer: The model's tokenizer, which is copied. With None, OpenAI's completion routes respond with 501.
            model_name: Name of the model in OpenAI's routes.
            host: Address to listen on.
            port: Port to listen on; 0 for any free port.
            token: Bearer token of all calls. None generates one and writes it to `token_file`, which only this user can
                read.
            limits: Limits of a call; Limits() by default, or SAMPLING_ONLY_LIMITS without control routes.
            deadline_s: Longest deadline of a request, in seconds, and deadline of other calls.
            default_max_tokens: max_tokens of completions without it.
            chat_template_kwargs: Keyword arguments of the chat template.
            control: True for routes that abort, pause, sleep and change weights. Without them, callers can only sample
                and score, and their request ids cannot collide with the ids of other requests.
            drain_s: Seconds that the exit waits for running requests before it cancels them.

        Raises:
            ConfigError: The token is not safe for this host; see `Listener.check_token`.
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
        """Prefix of callers' sessions, so that they cannot use the sessions of the run."""
        self._drain_s = drain_s
        self._translator: Translator | None = None
        self._sampler: ChatSampler | None = None
        if tokenizer is not None:
            limits = replace(self._limits, prompt_tokens=min(self._limits.prompt_tokens, _max_prompt_tokens(engine)))
            self._translator = Translator(
                copy.deepcopy(tokenizer),  # tokenizers are not thread-safe, and this one is used in another thread
                limits=limits,
                default_max_tokens=default_max_tokens,
                deadline_s=deadline_s,
            )
            self._sampler = ChatSampler(
                tokenizer,
                partial(self._sample, are_ids_unique=True),
                limits=limits,
                defaults=SamplingParams(max_tokens=default_max_tokens),
                deadline_s=deadline_s,
                chat_template_kwargs=chat_template_kwargs,
                partial_tokens=getattr(engine, "partial_tokens", None),
                capabilities=next(iter(_capabilities(engine)), None),
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
        app.router.add_post("/v1/completions", self._complete_text, expect_handler=self._expect)
        add_chat_routes(app, "", lambda _: self, max_body_bytes=self._limits.body_bytes, expect_handler=self._expect)
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
        """The URL, such as http://127.0.0.1:8000. OpenAI clients need `/v1` appended. Available while listening."""
        assert self._server is not None
        return self._server.url

    # -- all routes --------------------------------------------------------------------------------------------------

    @web.middleware
    async def _track_request(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Respond to a request and count it. Close the connection of a client that does not read the response."""
        route, started_at, status = _route(request), now(), _CLIENT_CLOSED_REQUEST
        self._metrics.on_request_start(route)
        try:
            response = await self._answer(request, handler)
            await send(request, response)
            status = response.status
            return response
        finally:
            self._metrics.on_request_end(route, status, now() - started_at)

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token before anything else, call the handler, and convert all errors to one format."""
        try:
            if not has_token(request, self.token):
                text = "Send the header 'Authorization: Bearer <token>' with this server's token."
                raise ApiError(401, text, "no_token")
            return await handler(request)
        except web.HTTPException as error:
            return error_response(request, describe_http_error(request, error, self._limits.body_bytes))
        except Exception as error:
            return error_response(request, describe_any_error(request, error))

    async def _unknown(self, request: web.Request) -> NoReturn:
        """Raise the error of an unknown route or method.

        aiohttp's own handling would respond to an Expect header before the token is checked.
        """
        if request.path in {resource.canonical for resource in request.app.router.resources()}:
            raise web.HTTPMethodNotAllowed(request.method, [])
        raise web.HTTPNotFound

    async def _expect(self, request: web.Request) -> None:
        """Respond to "Expect: 100-continue" only for callers with the token; ignore other expectations."""
        expects_continue = request.headers[hdrs.EXPECT].lower() == "100-continue" and request.version == HttpVersion11
        if expects_continue and has_token(request, self.token):
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the response itself has not started

    # -- the token-level protocol ------------------------------------------------------------------------------------

    def _handler(self, call: RemoteMethod) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = await read_body(request, self._limits.body_bytes) if call.verb == "POST" else {}
            # In a run this is the trainer's event loop, and checking thousands of requests takes a long time.
            arguments = await asyncio.to_thread(lambda: parse_body(call.arguments, body).checked(self._limits))
            if call.method == "capabilities":
                result: Any = ServerInfo(self.model_name, self._attribute("capabilities"), self._limits)
            elif isinstance(arguments, Generate):
                result = await self._sample(arguments.requests)
            else:
                limit = arguments.timeout_s if isinstance(arguments, ConnectWeights) else self._deadline_s
                result = await self._call_engine(call.method, arguments.values(), limit + DEADLINE_MARGIN_S)
                self._record_adapter(arguments)
            return web.Response(body=write_json(Result(result)), content_type="application/json")

        return handle

    async def _call_engine(self, method: str, values: Sequence[Any], deadline_s: float) -> Any:
        async with deadline(method, deadline_s):
            return await self._attribute(method)(*values)

    async def _sample(self, requests: Sequence[SampleRequest], *, are_ids_unique: bool = False) -> list[Completion]:
        """Sample completions in request order. Each request has its own deadline, limited by the server's deadline."""
        if not requests:
            return []
        prefix = "" if self._control or are_ids_unique else f"{secrets.token_hex(8)}."
        engine_requests = [self._with_unique_ids(request, prefix) for request in requests]
        prompts = {request.group or request.request_id: len(request.token_ids) for request in requests}
        self._metrics.count_prompt_tokens(sum(prompts.values()))
        try:
            work = self._attribute("generate")(engine_requests)
            completions: list[Completion] = await self._watchdog.watch(work, self._deadline_s + DEADLINE_MARGIN_S)
        except (asyncio.CancelledError, DeadlineExceeded):
            # The client disconnected, or the engine does not respond. An engine in another process would continue.
            task = asyncio.ensure_future(self._abort_quietly([request.request_id for request in engine_requests]))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            raise
        self._metrics.count_completion_tokens(sum(len(completion.token_ids) for completion in completions))
        return [
            replace(completion, request_id=request.request_id, routing=None)  # the protocol does not send the routing
            for request, completion in zip(requests, completions, strict=True)
        ]

    def _with_unique_ids(self, request: SampleRequest, prefix: str) -> SampleRequest:
        """Return the request for the engine: with a deadline and, without control routes, with unique names."""
        return replace(
            request,
            request_id=prefix + request.request_id,
            group=request.group and prefix + request.group,
            session=request.session and self._sessions + request.session,  # sessions continue in later calls
            deadline_s=min(request.deadline_s or self._deadline_s, self._deadline_s),
        )

    async def _health_of_all(self) -> EngineHealth:
        """Return the counters and numbers of requests, summed over all engines."""
        health = await self._attribute("health")()
        healths = health if isinstance(health, list) else [health]
        names = (*PROGRESS_COUNTERS, "queued", "draft_steps", "accepted_drafts")
        return EngineHealth("all", 0, **{name: sum(getattr(health, name) for health in healths) for name in names})

    async def _abort_quietly(self, request_ids: list[str]) -> None:
        try:
            await self._call_engine("abort", [request_ids], DEADLINE_MARGIN_S)
        except SkyRLError as error:
            log.warning("Could not abort the requests of a client that disconnected: %s", error)

    def _attribute(self, name: str) -> Any:
        attribute = getattr(self._engine, name, None)
        if attribute is None:
            kind = type(self._engine).__name__
            raise ApiError(
                501, f"This server serves {kind}, which has no {name}; serve a single engine for that.", "not_supported"
            )
        return attribute

    def _record_adapter(self, arguments: object) -> None:
        """Record loaded adapters, whose names OpenAI's routes accept as `model`."""
        if isinstance(arguments, LoadAdapter):
            self._adapters.add(arguments.name)
        elif isinstance(arguments, UnloadAdapter):
            self._adapters.discard(arguments.name)

    # -- texts -------------------------------------------------------------------------------------------------------

    async def sample(self, request: ChatRequest, *, on_progress: OnProgress | None = None) -> list[ChatAnswer]:
        """Return the answers to a chat request; see `ChatSampler.sample`."""
        return await self._get_sampler().sample(request, on_progress=on_progress)

    async def count_tokens(self, request: ChatRequest) -> int:
        """Return the number of tokens of a chat request's prompt."""
        return await self._get_sampler().count_tokens(request)

    def list_models(self) -> list[str]:
        """Return the allowed values of `model` in requests: the model and the loaded adapters."""
        return [self.model_name, *sorted(self._adapters)]

    def find_adapter(self, model: str) -> str | None:
        """Return the adapter that `model` names, or None for the model itself.

        Raises:
            ApiError: The model is unknown.
        """
        if model not in self.list_models():
            names = ", ".join(map(repr, self.list_models()))
            problem = f"model={model[:100]!r} is not served here. Choose one of: {names}."
            raise ApiError(404, problem, "model_not_found", "model")
        return None if model == self.model_name else model

    def _get_sampler(self) -> ChatSampler:
        if self._sampler is None:
            raise _no_tokenizer()
        return self._sampler

    async def _complete_text(self, request: web.Request) -> web.StreamResponse:
        translator = self._translator
        if translator is None:
            raise _no_tokenizer()
        body = await read_body(request, self._limits.body_bytes)
        name = body.get("model") if isinstance(body, dict) else None
        adapter = self.find_adapter(name) if isinstance(name, str) else None  # the check of the body rejects others
        call: CompletionCall = await self._run_in_thread(translator.text, body, adapter)
        scores: list[list[float]] = []
        if call.has_prompt_logprobs:
            scores = await self._call_engine("score", [call.prompts], self._deadline_s + DEADLINE_MARGIN_S)
        completions = await self._sample(call.requests)
        if not call.body.stream:
            data = await self._run_in_thread(lambda: write_json(translator.to_response(call, completions, scores)))
            return web.Response(body=data, content_type="application/json")
        chunks = await self._run_in_thread(lambda: list(map(write_json, translator.chunks(call, completions, scores))))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        async with write_deadline(request, sum(map(len, chunks))):
            await response.prepare(request)
            for chunk in chunks:
                await response.write(b"data: " + chunk + b"\n\n")
            await response.write(b"data: [DONE]\n\n")
        return response

    async def _run_in_thread(self, work: Callable[..., Any], *args: Any) -> Any:
        """Run `work` in the endpoint's thread, because tokenizing megabytes takes seconds."""
        async with deadline("converting text to tokens or tokens to text", self._deadline_s):
            return await asyncio.get_running_loop().run_in_executor(self._thread, lambda: work(*args))

    async def _document(self, request: web.Request) -> web.Response:
        return web.json_response(
            build_openapi_document(self._limits, text=self._translator is not None, control=self._control)
        )

    async def _health(self, request: web.Request) -> web.Response:
        """Respond with 200 while an engine is alive."""
        health = await self._call_engine("health", [], DEADLINE_MARGIN_S)
        if health == []:
            raise EngineError("No engine is alive.")
        return web.json_response({"status": "ok"})

    async def _metrics_page(self, request: web.Request) -> web.Response:
        """Respond with the metrics in Prometheus' text format."""
        engine: dict[str, int] = {}
        with suppress(SkyRLError, ApiError):  # the endpoint's own metrics are useful when engines do not respond
            async with deadline("health of the engines", METRICS_TIMEOUT_S):
                health = await self._health_of_all()
            engine = {"running": health.running, "waiting": health.queued}
        return web.Response(body=self._metrics.text(**engine), headers={hdrs.CONTENT_TYPE: CONTENT_TYPE})


def _no_tokenizer() -> ApiError:
    return ApiError(501, "This server has no tokenizer: use /generate with token ids.", "not_supported")


def _route(request: web.Request) -> str:
    """Return the route as it was registered; "unknown" stands for all unregistered paths."""
    resource = request.match_info.route.resource
    return "unknown" if resource is None or resource.canonical == "/{path}" else resource.canonical


def _capabilities(engine: Any) -> list[Capabilities]:
    """Return the capabilities of all engines that report them."""
    engines = engine.engines if isinstance(engine, EngineClient) else [engine]
    return [each.capabilities for each in engines if isinstance(each.capabilities, Capabilities)]


def _max_prompt_tokens(engine: Any) -> int:
    """Return the longest prompt that any of the engines accepts, in tokens; no limit if an engine does not report
    it."""
    engines = engine.engines if isinstance(engine, EngineClient) else [engine]
    lengths = [each.max_model_len for each in _capabilities(engine)]
    return max(lengths) if lengths and len(lengths) == len(engines) and all(lengths) else sys.maxsize
