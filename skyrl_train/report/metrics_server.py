"""GET /metrics for a scraper, from a thread of the run's driver that costs no more whatever clients do."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

from aiohttp import hdrs, web

from skyrl_train.http_server import HttpServer, is_loopback_name, send
from skyrl_train.listening import API_KEY, Listener, has_token, is_loopback

METRICS = Listener("/metrics of the run", "trainer.metrics_host", "trainer.metrics_port")
PATH = "/metrics"
MAX_CONNECTIONS = 64
"""At the same time: few scrape a run, which needs its descriptors itself."""
_log = logging.getLogger(__name__)


def check_metrics_address(host: str, port: int | None) -> None:
    """Raises ConfigError for an address that needs a token and has none, or that is in use; None listens nowhere."""
    if port is not None:
        _token_for(host)
        METRICS.check_address(host, port)


class MetricsServer:
    """Answers with `text()`, made anew each time. Port 0: any free one.

    On loopback everybody on this machine gets it, but not the pages of other sites: the request must name this machine.
    At an address that other machines reach, only those who send the token of SKYRL_API_KEY get it. Raises ConfigError
    as `check_metrics_address` does.
    """

    def __init__(self, host: str, port: int, text: Callable[[], bytes], content_type: str):
        self._token = _token_for(host)
        self._text, self._content_type = text, content_type
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(PATH, self._metrics)
        self._server = HttpServer(app, drain_s=0.0, most=MAX_CONNECTIONS)
        opened: Future[asyncio.AbstractEventLoop] = Future()
        self._ends = asyncio.Event()
        serve = self._serve(host, port, opened)
        self._thread = threading.Thread(target=asyncio.run, args=(serve,), name="metrics server", daemon=True)
        self._thread.start()
        try:
            self._loop = opened.result()
        except OSError as error:
            self._thread.join()
            raise METRICS.cannot_listen(host, port, error) from error
        self.url = self._server.url + PATH

    def close(self) -> None:
        """End all connections; the port is free afterwards. Closing twice is harmless."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join()

    async def _serve(self, host: str, port: int, opened: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            await self._server.listen(host, port)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(asyncio.get_running_loop())
        await self._ends.wait()
        await self._server.close()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            response = _answer(error.status, f"{error.reason}: there is GET {PATH}.")
        except Exception:
            _log.info("%s could not be answered", PATH, exc_info=True)
            response = _answer(500, "The numbers could not be read; the run's log says why.")
        await send(request, response)
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._token is None:
            if is_loopback_name(request.headers.get(hdrs.HOST, "")):
                return None
            return _answer(403, "Ask at 127.0.0.1 or localhost: other names may be another site's.")
        if has_token(request.headers.get(hdrs.AUTHORIZATION, ""), self._token):
            return None
        return _answer(401, f"Send the header 'Authorization: Bearer <token>' with the token of {API_KEY}.")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._text(), headers={hdrs.CONTENT_TYPE: self._content_type})


def _answer(status: int, text: str) -> web.Response:
    headers = {hdrs.WWW_AUTHENTICATE: "Bearer"} if status == 401 else {}
    return web.Response(status=status, text=f"{text}\n", content_type="text/plain", headers=headers)


def _token_for(host: str) -> str | None:
    """None on loopback: whoever is on this machine may read. Raises ConfigError for other hosts without a token."""
    if is_loopback(host):
        return None
    token = os.environ.get(API_KEY)
    METRICS.check_token(token, host)
    return token
