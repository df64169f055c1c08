"""A web server on a free port of 127.0.0.1 for the duration of a test, in place of pages, retrievers and judges."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Request:
    """A request to the server."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


@dataclass(frozen=True)
class Response:
    """A response of the server; `body` is sent unchanged."""

    body: bytes = b""
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class WebServer:
    """A running server with its address and the requests that it received."""

    port: int
    requests: list[Request] = field(default_factory=list)

    @property
    def at(self) -> str:
        """host:port"""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.at}"


@contextmanager
def web_server(answer: Callable[[Request], Response]) -> Iterator[WebServer]:
    """Serve the responses of `answer`, with a thread per connection."""
    server = WebServer(0)

    class Handler(BaseHTTPRequestHandler):
        def _respond(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, dict(self.headers), body)
            server.requests.append(request)
            response = answer(request)
            try:
                self.send_response(response.status)
                for name, value in {"Content-Type": "text/html", **response.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(response.body)))
                self.end_headers()
                self.wfile.write(response.body)
            except OSError:
                pass  # the client has gone

        do_GET = do_POST = do_PUT = do_HEAD = _respond

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass

    with Server(("127.0.0.1", 0), Handler) as running:
        server.port = running.server_address[1]
        thread = threading.Thread(target=running.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            running.shutdown()
            thread.join()
