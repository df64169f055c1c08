"""Serves the page of runs, and what it shows, to whoever has the token: on loopback, from files, read-only.

No part of a request becomes part of a path. What models wrote goes out as JSON, and the page's own policy, which lets
nothing run but its script, is sent as a header, too.
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
"""Of a curve."""
_HOST = "127.0.0.1"
_POLICY = re.compile(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">')
"""In the page: by hashes of its script and its style."""
_NO_FRAMES = "frame-ancestors 'none'"
_NO_PAGE = f"default-src 'none'; {_NO_FRAMES}"
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
    """A run: its rollouts and its other files, each for one thread at a time."""

    def __init__(self, files: RunReader):
        self.files, self.files_lock = files, threading.Lock()
        self.rollouts, self.rollouts_lock = RolloutViews(files.folder), threading.Lock()
        self.reader: asyncio.Task[None] | None = None

    def read_ahead(self) -> None:
        """Have the texts of rollouts in memory when somebody searches them, if they are few enough."""
        if self.reader is None or self.reader.done():
            self.reader = asyncio.create_task(self._read_ahead())

    async def _read_ahead(self) -> None:
        while await asyncio.to_thread(self._read_some):
            await asyncio.sleep(0.01)  # others come first

    def _read_some(self) -> bool:
        with self.rollouts_lock:
            return self.rollouts.index.read_ahead()

    async def close(self) -> None:
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.wait([self.reader])
        self.rollouts.close()


class WatchServer:
    """Serves while it is entered: `async with WatchServer([Path("runs/a")], page()) as server: print(server.address)`.

    Port 0: any free one. Raises ConfigError for a folder that is no run's and, on entering, for a port that is taken.
    """

    def __init__(self, folders: Sequence[Path], page: str, port: int = 0):
        self._runs = [_WatchedRun(files) for files in open_runs(folders)]
        self._page, self._port = page, port
        policy = _POLICY.search(page)
        assert policy is not None, "the page has no policy of its own"
        self._policy = f"{policy[1]}; {_NO_FRAMES}"
        self.token = secrets.token_urlsafe(32)
        self._server: HttpServer | None = None

    @property
    def url(self) -> str:
        assert self._server is not None
        return self._server.url

    @property
    def address(self) -> str:
        """With the token, for a browser: behind #, which is sent to no server. A cookie would be, to those at all other
        ports of this machine."""
        return f"{self.url}/#access_token={self.token}"

    async def __aenter__(self) -> WatchServer:
        if not 0 <= self._port < 2**16:
            raise ConfigError(f"--port {self._port}: must be from 1 to {2**16 - 1}, or 0 for any that is free.")
        app = web.Application(middlewares=[self._guard])
        app.router.add_get("/", self._index)
        for name, answer in self._answers().items():
            app.router.add_get(f"/api/{name}", self._handler(answer))
        server = HttpServer(app, drain_s=1.0)
        try:
            await server.listen(_HOST, self._port)
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else error
            raise ConfigError(
                f"--port {self._port}: cannot listen at {_HOST}:{self._port}: {why}. Choose another, or 0 for any that "
                "is free."
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

    # -- who may ask -------------------------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await self._answer(request, handler)
        response.headers.update({hdrs.CONTENT_SECURITY_POLICY: _NO_PAGE, **_HEADERS, **response.headers})
        await send(request, response)
        return response

    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            return _text(error.status, f"{error.reason}: there are / and /api/..., which are only read.")
        except (DataError, OSError) as error:  # OSError: a file of the run cannot be read
            return _text(400, escape_control_chars(str(error)))
        except Exception:
            _log.exception("%s failed", request.path)
            return _text(500, "The answer could not be made; the terminal of skyrl-train watch says why.")

    def _refusal(self, request: web.Request) -> web.Response | None:
        """For pages of other sites, whatever name of theirs leads here, and for whoever has no token.

        The page itself has nothing of the runs: everybody on this machine gets it, and links from elsewhere lead to it.
        """
        if not is_loopback_name(request.headers.get(hdrs.HOST, "")):
            return _text(403, "Ask at 127.0.0.1 or localhost: other names may be another site's.")
        asked_by = request.headers.get("Sec-Fetch-Site", "none")
        is_link = request.path == "/" and request.headers.get("Sec-Fetch-Mode") == "navigate"
        if asked_by not in ("none", "same-origin") and not is_link:
            return _text(403, "Pages of other sites get no answer.")
        if request.path == "/" or is_authorized(request.headers.get(hdrs.AUTHORIZATION, ""), self.token):
            return None
        return _text(401, "Open the address that skyrl-train watch has printed: it ends with the token.")

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
            "rollout": self._of_rollouts(_rollout),
            "group": self._of_rollouts(_group),
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
        if run.rollouts_lock.acquire(blocking=False):  # a search holds up no curves, at most their newest quantiles
            try:
                with suppress(OSError):  # curves are elsewhere
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
        return self._of_rollouts(lambda views, rest: views.rollouts(Query.from_params(rest)))(params)

    def _of_rollouts(self, answer: Callable[[RolloutViews, Mapping[str, str]], Any]) -> Answer:
        def answered(params: Mapping[str, str]) -> Any:
            run = self._run(params)
            rest = {name: value for name, value in params.items() if name != "run"}
            with run.rollouts_lock:
                return answer(run.rollouts, rest)

        return answered

    def _run(self, params: Mapping[str, str]) -> _WatchedRun:
        given = params.get("run", "0")
        ids = [str(number) for number in range(len(self._runs))]
        if given not in ids:
            raise DataError(f"run={given[:40]!r} is none of the runs, whose ids are {', '.join(ids)}.")
        return self._runs[ids.index(given)]


def _rollout(views: RolloutViews, params: Mapping[str, str]) -> Any:
    return views.rollout(
        _needed(params, "step"), params.get("uid", ""), _needed(params, "sample"), _optional(params, "group")
    )


def _group(views: RolloutViews, params: Mapping[str, str]) -> Any:
    return views.group(_needed(params, "step"), params.get("uid", ""), _optional(params, "group"))


def _needed(params: Mapping[str, str], name: str) -> int:
    return parse_int32(name, params.get(name, ""))


def _optional(params: Mapping[str, str], name: str) -> int | None:
    return _needed(params, name) if params.get(name) else None


def _text(status: int, text: str) -> web.Response:
    headers = {hdrs.WWW_AUTHENTICATE: "Bearer"} if status == 401 else {}
    return web.Response(status=status, text=f"{text}\n", content_type="text/plain", headers=headers)
