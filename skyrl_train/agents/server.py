"""An HTTP server on which every rollout has a base URL of its own."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn

from aiohttp import HttpVersion11, hdrs, web

from skyrl_train.agents.session import Session, SessionBackend, SessionSettings
from skyrl_train.data.messages import Prompt
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.http.chat_routes import add_chat_routes
from skyrl_train.engines.http.chat_sampler import ChatSampler
from skyrl_train.engines.http.exchange import (
    ApiError,
    describe_any_error,
    describe_http_error,
    error_response,
    read_body,
)
from skyrl_train.engines.http.json_body import Body, parse_body
from skyrl_train.engines.http.protocol import Limits
from skyrl_train.http_server import HttpServer, send

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PREFIX = "/sessions/{session_id}"
_MAX_CLOSED = 1 << 16
"""Closed sessions that are still answered with 410. Older ones are unknown (404)."""


@dataclass
class _RewardBody(Body):
    """The body of POST /sessions/ID/reward."""

    reward: float
    """Reward of the episode."""


class SessionServer:
    """An HTTP server of chat sessions, which listens while the context is entered.

    Example:
        async with SessionServer(client, tokenizer, model_name="policy") as server:
            session = server.open(prompt, sample=0, position=7, settings=settings)
            ...  # a program calls session.base_url
            await server.close(session)
            trajectory = session.trajectory(prompt, 0, temperature)
    """

    def __init__(
        self,
        client: Any,
        tokenizer: Any,
        *,
        model_name: str,
        host: str = "127.0.0.1",
        port: int = 0,
        public_url: str | None = None,
        deadline_s: float = 600.0,
        drain_s: float = 5.0,
    ):
        """Create a server that does not listen yet.

        Args:
            client: The EngineClient that samples.
            tokenizer: The model's tokenizer.
            model_name: Name of the model for clients.
            host: Address to listen on.
            port: Port to listen on; 0 for any free port.
            public_url: URL under which programs reach the server; None for its own address.
            deadline_s: Deadline of converting texts, in seconds.
            drain_s: Seconds that the exit waits for running calls.
        """
        self._client, self._host, self._port = client, host, port
        self._public_url = public_url and public_url.rstrip("/")
        self._limits = Limits()
        self._backend = SessionBackend(
            tokenizer=tokenizer,
            model_name=model_name,
            sampler=ChatSampler(
                tokenizer,
                self._generate,
                limits=self._limits,
                defaults=SamplingParams(max_tokens=1),  # sessions give all parameters
                deadline_s=deadline_s,
                partial_tokens=getattr(client, "partial_tokens", None),
            ),
        )
        self._sessions: dict[str, Session] = {}
        self._closed: OrderedDict[str, None] = OrderedDict()
        self._drain_s = drain_s
        self._server: HttpServer | None = None

    async def __aenter__(self) -> SessionServer:
        app = web.Application(middlewares=[self._respond], client_max_size=self._limits.body_bytes)
        add_chat_routes(
            app, _PREFIX, self._resolve, max_body_bytes=self._limits.body_bytes, expect_handler=self._expect
        )
        app.router.add_post(f"{_PREFIX}/reward", self._set_reward, expect_handler=self._expect)
        app.router.add_route("*", "/{path:(?s:.*)}", self._unknown, expect_handler=self._expect)
        self._server = HttpServer(app, drain_s=self._drain_s)
        await self._server.listen(self._host, self._port)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        for session in [*self._sessions.values()]:
            await self.close(session)
        await self._server.close()

    @property
    def url(self) -> str:
        """URL of the server, such as http://127.0.0.1:8000. Available while it listens."""
        assert self._server is not None
        return self._public_url or self._server.url

    def open(self, prompt: Prompt, *, sample: int, position: int, settings: SessionSettings) -> Session:
        """Open a session for one sample of a prompt.

        Args:
            prompt: The prompt.
            sample: Index of the sample in its group.
            position: Position of the prompt in the run's order, which makes seeds differ between epochs.
            settings: The run's settings.
        """
        id = secrets.token_urlsafe(24)
        session = self._sessions[id] = Session(
            self._backend,
            settings,
            id=id,
            url=f"{self.url}{_PREFIX.format(session_id=id)}",
            uid=prompt.uid,
            sample=sample,
            position=position,
        )
        return session

    async def close(self, session: Session) -> None:
        """Abort the running calls of a session. Later calls get status 410. May be called more than once."""
        if self._sessions.pop(session.id, None) is not None:
            self._closed[session.id] = None
            if len(self._closed) > _MAX_CLOSED:
                self._closed.popitem(last=False)
        await session.close()

    async def _generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample completions, and count their seconds for their session."""
        completions: list[Completion] = await self._client.generate(requests)
        session = self._sessions.get(requests[0].session)
        if session is not None:
            session.record_completions(completions)
        return completions

    # -- routes ------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _respond(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Respond to a request, with all errors in the form of the client's dialect."""
        try:
            response = await handler(request)
        except web.HTTPException as error:
            response = error_response(request, describe_http_error(request, error, self._limits.body_bytes))
        except Exception as error:
            response = error_response(request, describe_any_error(request, error))
        await send(request, response)
        return response

    def _resolve(self, request: web.Request) -> Session:
        """Return the session of a request. Its id in the URL is the secret; keys in headers are ignored."""
        id = request.match_info["session_id"]
        session = self._sessions.get(id)
        if session is not None:
            return session
        if id in self._closed:
            raise ApiError(410, "This session is closed: its rollout has ended.", "session_closed")
        raise ApiError(404, "There is no session with this id.", "session_not_found")

    async def _set_reward(self, request: web.Request) -> web.Response:
        session = self._resolve(request)
        body = await read_body(request, self._limits.body_bytes)
        session.reward = float(parse_body(_RewardBody, body).reward)
        return web.json_response({"reward": session.reward})

    async def _expect(self, request: web.Request) -> None:
        """Respond to "Expect: 100-continue" only for open sessions; ignore other expectations."""
        expects_continue = request.headers[hdrs.EXPECT].lower() == "100-continue" and request.version == HttpVersion11
        if expects_continue and request.match_info.get("session_id") in self._sessions:
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # the response itself has not started

    async def _unknown(self, request: web.Request) -> NoReturn:
        """Raise the error of an unknown route or method."""
        raise web.HTTPNotFound
