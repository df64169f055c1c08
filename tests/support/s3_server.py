"""A real S3 server (moto) on a free port of 127.0.0.1, whose requests a test can block or reject."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("moto", reason="moto or flask is not installed: install the extra dev")
pytest.importorskip("s3fs", reason="s3fs is not installed: install the extra s3")

ACCESS_KEY, SECRET_KEY = "AKIASKYRLTESTONLY42", "test/only+SecretKey0123456789abcdefghijk"
BUCKET = "runs"


@dataclass
class S3Server:
    """A running server with the bucket BUCKET."""

    port: int
    reject_pattern: str = ""
    """Requests whose "METHOD /path" matches this are answered with `reject_status`, like an expired token."""
    reject_status: str = "403 Forbidden"
    reject_condition: str = ""
    """Requests with a header whose name starts with this (`HTTP_IF_`) are rejected, too."""
    lose_answer_pattern: str = ""
    """The first request that matches this is executed and answered with 500, as if the response had been lost."""
    block_pattern: str = ""
    """Requests that match this wait until `unblock`."""
    is_blocking: threading.Event = field(default_factory=threading.Event)
    """Set once a request waits."""
    seen: list[str] = field(default_factory=list)
    """All requests so far, as "METHOD /path"."""
    _unblocked: threading.Event = field(default_factory=threading.Event)

    @property
    def environment(self) -> dict[str, str]:
        """The AWS variables with which a process reaches the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def objects(self) -> dict[str, bytes]:
        """Return the content of all objects of the bucket by key."""
        keys = self._keys()
        return {key: keys[key].value for key in keys}

    @staticmethod
    def _keys() -> Any:
        from moto.s3.models import s3_backends

        return next(backend["global"] for backend in s3_backends.values()).buckets[BUCKET].keys

    def unblock(self) -> None:
        self.block_pattern = ""
        self._unblocked.set()

    def empty(self) -> None:
        """Delete all objects, and reset the patterns and the recorded requests."""
        self.block_pattern = self.reject_pattern = self.reject_condition = self.lose_answer_pattern = ""
        self.reject_status = "403 Forbidden"
        keys = self._keys()
        for key in [*keys]:
            keys.pop(key)  # This closes the object's file.
        self.seen.clear()
        self.is_blocking, self._unblocked = threading.Event(), threading.Event()

    def pass_through(self, request: str) -> bool:
        """Record a request and block it if it matches; return False if it must be rejected."""
        self.seen.append(request)
        if self.block_pattern and re.search(self.block_pattern, request):
            self.is_blocking.set()
            self._unblocked.wait()
        return not (self.reject_pattern and re.search(self.reject_pattern, request))


@contextmanager
def s3_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """Run a server, with the environment variables of this process set to reach it."""
    from moto.s3.models import s3_backends
    from moto.server import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    state = S3Server(0)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = DomainDispatcherApplication(create_backend_app)

    def gate(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        request = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"
        conditional = state.reject_condition and any(name.startswith(state.reject_condition) for name in environ)
        if not state.pass_through(request) or conditional:
            start_response(state.reject_status, [("Content-Length", "0")])
            return []
        if state.lose_answer_pattern and re.search(state.lose_answer_pattern, request):
            state.lose_answer_pattern = ""
            list(application(environ, lambda *response: None))
            start_response("500 Internal Server Error", [("Content-Length", "0")])
            return []
        return application(environ, start_response)

    server = make_server("127.0.0.1", 0, gate, threaded=True)
    state.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    for name, value in state.environment.items():
        monkeypatch.setenv(name, value)
    try:
        import s3fs

        s3fs.S3FileSystem.clear_instance_cache()
        s3fs.S3FileSystem(use_listings_cache=False).mkdir(BUCKET)
        yield state
    finally:
        state.unblock()
        server.shutdown()
        thread.join()
        server.server_close()
        s3_backends.reset()
