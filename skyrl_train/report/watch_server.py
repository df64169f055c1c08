"""The read-only web server of `skyrl-train watch`: the viewer page, and an API with the data of runs.

It listens on loopback, requires a token, and never uses a part of a request in a path. Texts of models are sent as
JSON. The page's content security policy, which allows only its own script, is sent as a header, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from aiohttp import hdrs, web

from skyrl_train.errors import ConfigError, DataError
from skyrl_train.http_server import HttpServer, is_loopback_name, send
from skyrl_train.listeners import is_authorized
from skyrl_train.report.rollout_views import Query, RolloutViews, parse_int32
from skyrl_train.report.run_reader import RunReader, open_runs, overview
from skyrl_train.report.untrusted_files import to_json
from skyrl_train.terminal import escape_control_chars

MAX_POINTS = 2000
"""Maximum number of points of a curve."""
_HOST = "127.0.0.1"
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')
"""The page's policy, which allows its script and its style by hash."""
_NO_FRAMES = "frame-ancestors 'none'"
_DENY_ALL = f"default-src 'none'; {_NO_FRAMES}"
_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    hdrs.CACHE_CONTROL: "private, no-cache",
}
_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Answer = Callable[[Mapping[str, str]], Any]


class _WatchedRun:
    """A run that is being watched: its rollouts and its other files, each with a lock for one thread at a time."""

    def __init__(self, files: RunReader):
        self.files, self.files_lock = files, threading.Lock()
        self.rollouts, self.rollouts_lock = RolloutViews(files.folder), threading.Lock()
        self.reader: asyncio.Task[None] | None = None

    def read_ahead(self) -> None:
        """Start to cache texts of rollouts in the background, so that a later search is fast."""
        if self.reader is None or self.reader.done():
            self.reader = asyncio.create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        while await asyncio.to_thread(self._read_block):
            await asyncio.sleep(0.01)  # lets requests take the lock first

    def _read_block(self) -> bool:
        with self.rollouts_lock:
            return self.rollouts.index.read_ahead()

    async def close(self) -> None:
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.wait([self.reader])
        self.rollouts.close()


class WatchServer:
    """A web server for the viewer page and the data of runs. It serves while its context is active.

    Example:
        async with WatchServer([Path("runs/a")], render_page()) as server:
            print(server.address)
    """

    def __init__(self, folders: Sequence[Path], page: str, port: int = 0):
        """Open the runs. Entering the context starts the server.

        Args:
            folders: Folders of the runs.
            page: HTML of the viewer page, from `viewer_page.render_page`.
            port: Port to listen at, on 127.0.0.1; 0 takes a free one.

        Raises:
            ConfigError: If there is no folder, a folder is not a run's, or two are the same. On entering the context:
                if the port is out of range or in use.
        """
        self._runs = [_WatchedRun(files) for files in open_runs(folders)]
        self._page, self._port = page, port
        policy = _POLICY.search(page)
        assert policy is not None, "the page has no Content-Security-Policy"
        self._policy = f"{policy[1]}; {_NO_FRAMES}"
        self.token = secrets.token_urlsafe(32)
        self._server: HttpServer | None = None

    @property
    def url(self) -> str:
        """The server's base URL, without the token. Only available while the server runs."""
        assert self._server is not None, "the server is not running"
        return self._server.url

    @property
    def address(self) -> str:
        """The URL to open in a browser, with the token. Only available while the server runs.

        The token is in the fragment, which browsers send to no server. They would send a cookie to the servers at all
        ports of this machine.
        """
        return f"{self.url}/#access_token={self.token}"

    async def __aenter__(self) -> WatchServer:
        if not 0 <= self._port < 2**16:
            raise ConfigError(f"--port {self._port}: must be from 1 to {2**16 - 1}, or 0 for any free port.")
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._index)
        for name, answer in self._answers().items():
            app.router.add_get(f"/api/{name}", self._handler(answer))
        server = HttpServer(app, drain_s=1.0)
        try:
            await server.listen(_HOST, self._port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno else error
            raise ConfigError(
                f"--port {self._port}: cannot listen at {_HOST}:{self._port}: {reason}. Choose another port, or 0 for "
                "any free port."
            ) from error
        self._server = server
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._server is not None
        await self._server.close()
        for run in self._runs:
            await run.close()

    # -- access ------------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await self._answer(request, handler)
        response.headers.update({hdrs.CONTENT_SECURITY_POLICY: _DENY_ALL, **_HEADERS, **response.headers})
        await send(request, response)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            return _text(error.status, f"{error.reason}: this server answers GET / and GET /api/... only.")
        except (DataError, OSError) as error:  # OSError: a file of the run cannot be read
            return _text(400, escape_control_chars(str(error)))
        except Exception:
            _log.exception("%s failed", request.path)
            return _text(500, "The request failed; see the terminal of skyrl-train watch for the reason.")

    def _refusal(self, request: web.Request) -> web.Response | None:
        """Return a response that refuses a request from another site or without the token; None to allow the request.

        The page itself contains no data of the runs. So it needs no token, and links on other sites may lead to it.
        """
        if not is_loopback_name(request.headers.get(hdrs.HOST, "")):
            return _text(403, "Use http://127.0.0.1 or http://localhost: other host names are refused.")
        site = request.headers.get("Sec-Fetch-Site", "none")
        is_link = request.path == "/" and request.headers.get("Sec-Fetch-Mode") == "navigate"
        if site not in ("none", "same-origin") and not is_link:
            return _text(403, "Requests from other sites are refused.")
        if request.path == "/" or is_authorized(request.headers.get(hdrs.AUTHORIZATION, ""), self.token):
            return None
        return _text(401, "The token is missing or wrong. Open the address that skyrl-train watch printed.")

    # -- answers -----------------------------------------------------------------------------------------------------

    async def _index(self, request: web.Request) -> web.Response:
        headers = {hdrs.CONTENT_SECURITY_POLICY: self._policy}
        return web.Response(text=self._page, content_type="text/html", headers=headers)

    def _answers(self) -> dict[str, Answer]:
        return {
            "runs": self._overview,
            "metrics": self._metrics,
            "diagnosis": self._diagnosis,
            "rollouts": self._rollouts,
            "rollout": self._views_answer(_rollout),
            "group": self._views_answer(_group),
        }

    def _handler(self, answer: Answer) -> Handler:
        async def handle(request: web.Request) -> web.Response:
            body = (await asyncio.to_thread(lambda: to_json(answer(dict(request.query))))).encode()
            if answer == self._rollouts:
                self._run(request.query).read_ahead()
            etag = f'"{hashlib.blake2b(body, digest_size=16).hexdigest()}"'
            if request.headers.get(hdrs.IF_NONE_MATCH) == etag:
                return web.Response(status=304, headers={hdrs.ETAG: etag})
            return web.Response(body=body, content_type="application/json", headers={hdrs.ETAG: etag})

        return handle

    def _overview(self, params: Mapping[str, str]) -> Any:
        with ExitStack() as stack:
            for run in self._runs:
                stack.enter_context(run.files_lock)
            return overview([run.files for run in self._runs])

    def _metrics(self, params: Mapping[str, str]) -> Any:
        run = self._run(params)
        if run.rollouts_lock.acquire(blocking=False):  # during a search, curves come without the newest quantiles
            try:
                with suppress(OSError):  # curves need no rollouts
                    run.rollouts.index.refresh()
            finally:
                run.rollouts_lock.release()
        with run.files_lock:
            return run.files.metrics(MAX_POINTS, extra_columns=run.rollouts.index.quantiles)

    def _diagnosis(self, params: Mapping[str, str]) -> Any:
        run = self._run(params)
        with run.files_lock:
            return run.files.diagnosis()

    def _rollouts(self, params: Mapping[str, str]) -> Any:
        return self._views_answer(lambda views, other: views.rollouts(Query.from_params(other)))(params)

    def _views_answer(self, answer: Callable[[RolloutViews, Mapping[str, str]], Any]) -> Answer:
        """Return a handler that locks the rollouts of the requested run and passes the other parameters on."""

        def locked_answer(params: Mapping[str, str]) -> Any:
            run = self._run(params)
            other = {name: value for name, value in params.items() if name != "run"}
            with run.rollouts_lock:
                return answer(run.rollouts, other)

        return locked_answer

    def _run(self, params: Mapping[str, str]) -> _WatchedRun:
        run_id = params.get("run", "0")
        ids = [str(number) for number in range(len(self._runs))]
        if run_id not in ids:
            raise DataError(f"run={run_id[:40]!r} is not the id of a run. Choose from {', '.join(ids)}.")
        return self._runs[ids.index(run_id)]


def _rollout(views: RolloutViews, params: Mapping[str, str]) -> Any:
    step, sample = _required_int(params, "step"), _required_int(params, "sample")
    return views.rollout(step, params.get("uid", ""), sample, _optional_int(params, "group"))


def _group(views: RolloutViews, params: Mapping[str, str]) -> Any:
    return views.group(_required_int(params, "step"), params.get("uid", ""), _optional_int(params, "group"))


def _required_int(params: Mapping[str, str], name: str) -> int:
    return parse_int32(name, params.get(name, ""))


def _optional_int(params: Mapping[str, str], name: str) -> int | None:
    return _required_int(params, name) if params.get(name) else None


def _text(status: int, text: str) -> web.Response:
    headers = {hdrs.WWW_AUTHENTICATE: "Bearer"} if status == 401 else {}
    return web.Response(status=status, text=f"{text}\n", content_type="text/plain", headers=headers)
