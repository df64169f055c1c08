"""GET /metrics for a scraper, from a thread of the run's driver that costs no more whatever clients do."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer
from typing import Any

from skyrl_train.listening import API_KEY, Listener, has_token, is_loopback, url_of

METRICS = Listener("/metrics of the run", "trainer.metrics_host", "trainer.metrics_port")
PATH = "/metrics"
PATIENCE_S = 5.0
"""What a client has for its question and for taking the answer; others wait meanwhile."""
_POLL_S = 0.1
_log = logging.getLogger(__name__)


def check_metrics_address(host: str, port: int | None) -> None:
    """Raises ConfigError for an address that needs a token and has none, or that is in use; None listens nowhere."""
    if port is not None:
        _token_for(host)
        METRICS.check_address(host, port)


class MetricsServer:
    """Answers with `text()`, made anew each time. Port 0: any free one.

    At an address that other machines reach, only those who send the token of SKYRL_API_KEY get it. Raises ConfigError
    as `check_metrics_address` does.
    """

    def __init__(self, host: str, port: int, text: Callable[[], bytes], content_type: str):
        token = _token_for(host)
        try:
            self._server = _Server(host, port, token, text, content_type)
        except OSError as error:
            raise METRICS.cannot_listen(host, port, error) from error
        self.url = url_of(self._server.socket) + PATH
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_S,), name="metrics server", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """The port is free afterwards; takes at most PATIENCE_S, if a client is slow."""
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(TCPServer):
    """One client at a time. Not an HTTPServer: that looks up the host's name, which can take long."""

    allow_reuse_address = True

    def __init__(self, host: str, port: int, token: str | None, text: Callable[[], bytes], content_type: str):
        self.token, self.text, self.content_type = token, text, content_type
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, address = found[0]
        super().__init__(address, _Handler)  # type: ignore[arg-type]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that go away are no news; otherwise the log says what is wrong, instead of the terminal."""
        if not isinstance(sys.exc_info()[1], OSError):
            _log.info("%s could not be answered", PATH, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def handle(self) -> None:
        limit = threading.Timer(PATIENCE_S, _end, [self.connection])
        limit.start()
        try:
            super().handle()
        finally:
            limit.cancel()

    def do_GET(self) -> None:
        server = self.server
        if server.token is not None and not has_token(self.headers.get("Authorization", ""), server.token):
            self._send(401, f"Send the header 'Authorization: Bearer <token>' with the token of {API_KEY}.\n".encode())
        elif self.path.partition("?")[0] != PATH:
            self._send(404, f"There is {PATH}.\n".encode())
        else:
            self._send(200, server.text(), server.content_type)

    def _send(self, status: int, body: bytes, content_type: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a scrape every few seconds is no news."""


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # it may have ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def _token_for(host: str) -> str | None:
    """None on loopback: whoever is on this machine may read. Raises ConfigError for other hosts without a token."""
    if is_loopback(host):
        return None
    token = os.environ.get(API_KEY)
    METRICS.check_token(token, host)
    return token
