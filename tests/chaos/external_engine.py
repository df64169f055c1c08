"""An external engine behind connections that can be dropped."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from skyrl_train.cluster.addresses import free_address
from skyrl_train.listeners import API_KEY_ENV
from tests.support.serve_process import serving

TOKEN = "a-token-for-chaos"
_HOST = "127.0.0.1"


class Proxy:
    """A proxy between its own address and `port` whose connections can be dropped."""

    def __init__(self, port: int):
        self._port = port
        self._open: list[socket.socket] = []
        self._listening = socket.create_server((_HOST, 0))
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        return f"{_HOST}:{self._listening.getsockname()[1]}"

    def drop(self) -> bool:
        """Drop all connections. Return True if there were any."""
        dropped, self._open = self._open, []
        for connection in dropped:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
        return bool(dropped)

    def close(self) -> None:
        self._listening.close()
        self.drop()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listening.accept()
                try:
                    server = socket.create_connection((_HOST, self._port))
                except OSError:
                    client.close()
                    continue
                self._open += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._forward, args=(source, sink), daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for connection in (source, sink):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            with suppress(ValueError):
                self._open.remove(connection)


@contextmanager
def external_engine(model: str) -> Iterator[Proxy]:
    """Run `serve` with one transformers engine behind a proxy, and yield the proxy."""
    _, port = free_address(_HOST)
    keys = [f"trainer.policy.model.path={model}", f"generator.http_endpoint_port={port}", "data.train_data=[none]"]
    command = [sys.executable, "-m", "skyrl_train.entrypoints.serve", *keys]
    with serving(command, **{API_KEY_ENV: TOKEN}), closing(Proxy(port)) as proxy:
        yield proxy
