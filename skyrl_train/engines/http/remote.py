"""An InferenceEngine in another process or machine, behind an HttpEndpoint (server.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from skyrl_train.aio import gather_all
from skyrl_train.engines.base import Capabilities, Completion, EngineHealth, SampleRequest
from skyrl_train.engines.client import ProgressWatchdog
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.json_body import InvalidBodyError, parse_body, write_json
from skyrl_train.engines.http.protocol import (
    DEADLINE_MARGIN_S,
    REMOTE_METHODS,
    REMOTE_WEIGHT_ROUTES,
    Limits,
    RemoteMethod,
    ServerInfo,
    check_route,
    decode_error,
)
from skyrl_train.errors import EngineError, UnsupportedParameter, WeightSyncError
from skyrl_train.listeners import is_loopback
from skyrl_train.weight_sync.protocol import Bucket, Manifest

_ENVELOPE_BYTES = 64
"""Bytes of a call's body besides its requests."""


class RemoteEngine:
    """`engine = await RemoteEngine(url, token, name="...").connect(60)`; then an InferenceEngine like any other.

    Exceptions of the server's engine are raised here with their own types. If the server cannot be reached or dies
    during a call, EngineError is raised within seconds, so that its requests can go to another engine. Calls larger
    than the server's limits are split. `close` leaves the server's engine running.
    """

    capabilities: Capabilities

    def __init__(self, url: str, token: str, *, name: str = "", deadline_s: float = 600.0):
        """`deadline_s`: of every call, and of requests that have none. Raises ConfigError for an invalid address."""
        self._connection = Connection(url, token, name)
        self.name = self._connection.name
        self._deadline_s = deadline_s
        self._watchdog = ProgressWatchdog(name or url, self.health)
        self._limits = Limits()

    async def connect(self, deadline_s: float) -> RemoteEngine:
        """Wait until the server answers and its engine is alive; then set `capabilities`.

        Whoever paused it was lost before it could go on: it does now.

        Raises DeadlineExceeded if that takes more than `deadline_s`, EngineError for a wrong token.
        """
        await self._connection.open()
        try:
            served = await self._connection.wait_until_ready(self._served, deadline_s)
        except BaseException:
            await self.close()
            raise
        self._limits = served.limits
        routes = served.capabilities.weight_routes & REMOTE_WEIGHT_ROUTES
        elsewhere = not is_loopback(urlsplit(self._connection.url).hostname or "")
        self.capabilities = replace(served.capabilities, name=self.name, weight_routes=routes, other_machine=elsewhere)
        return self

    async def _served(self) -> ServerInfo:
        served: ServerInfo = await self._once(REMOTE_METHODS["capabilities"], b"")
        health: EngineHealth = await self._once(REMOTE_METHODS["health"], b"")
        if health.paused:
            await self._once(REMOTE_METHODS["resume"], b"")
        return served

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See InferenceEngine. Cancelling the call closes its connection, upon which the server aborts its requests."""
        # Not less because these have little time left: the engine may be busy with the long ones of others.
        limit = max([self._deadline_s, *(request.deadline_s or 0.0 for request in requests)])
        parts = [
            self._watchdog.watch(self._call("generate", part, deadline_s=math.inf), limit + 2 * DEADLINE_MARGIN_S)
            for part in self._parts(requests)
        ]
        return [completion for part in await gather_all(parts) for completion in part]

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        rows = [list(ids) for ids in token_ids]
        parts = [self._call("score", part, temperature) for part in self._parts(rows)]
        return [logprobs.tolist() for part in await gather_all(parts) for logprobs in part]

    async def abort(self, request_ids: Sequence[str]) -> None:
        await gather_all(self._call("abort", part) for part in self._parts(list(request_ids)))

    # -- traffic -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        await self._call("pause", mode)

    async def resume(self) -> None:
        await self._call("resume")

    async def sleep(self, level: int = 1) -> int:
        return await self._call("sleep", level)  # type: ignore[no-any-return]

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._call("wake_up", None if tags is None else list(tags))

    async def reset_prefix_cache(self) -> None:
        await self._call("reset_prefix_cache")

    async def load_adapter(self, name: str, path: str) -> None:
        """See InferenceEngine; `path` is a folder on the server's machine."""
        await self._call("load_adapter", name, path)

    async def unload_adapter(self, name: str) -> None:
        await self._call("unload_adapter", name)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        check_route(route)
        await self._call(
            "connect_weights",
            route,
            address,
            rank,
            world_size,
            float(timeout_s),
            deadline_s=timeout_s + 2 * DEADLINE_MARGIN_S,
        )

    async def begin_weights(self, manifest: Manifest) -> None:
        await self._call("begin_weights", manifest)

    async def receive_weights(self, bucket: Bucket) -> None:
        if bucket.payload is not None:
            check_route("in_process")
        if any(handle.cuda is not None for handle in bucket.handles):
            raise WeightSyncError(
                f"engine {self.name!r}: an accelerator's memory is not lent over HTTP; use broadcast."
            )
        await self._call("receive_weights", bucket)

    async def commit_weights(self, version: int) -> None:
        await self._call("commit_weights", version)

    # -- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        return replace(await self._call("health"), name=self.name)

    async def close(self) -> None:
        """Close the connections. Closing twice is harmless."""
        await self._connection.close()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def _parts(self, items: Sequence[Any]) -> Iterator[list[Any]]:
        """`items` in order, split so that no call exceeds the server's limits.

        Raises UnsupportedParameter for an item that exceeds them by itself.
        """
        most = self._limits.body_bytes - _ENVELOPE_BYTES
        part: list[Any] = []
        used = 0
        for item in items:
            size = len(write_json(item)) + 1
            if size > most:
                what = getattr(item, "request_id", "a sequence")
                raise UnsupportedParameter(
                    f"Engine {self.name!r} cannot take {what!r}: {size} bytes, its server allows {most}."
                )
            if part and (used + size > most or len(part) == self._limits.requests):
                yield part
                part, used = [], 0
            part.append(item)
            used += size
        if part:
            yield part

    async def _call(self, method: str, *values: Any, deadline_s: float | None = None) -> Any:
        limit = self._deadline_s + 2 * DEADLINE_MARGIN_S if deadline_s is None else deadline_s
        call = REMOTE_METHODS[method]
        body = b"" if call.verb == "GET" else write_json(call.arguments(*values))

        async def attempt(number: int) -> Any:
            if number and method == "generate":
                # The server may not have noticed that the connection broke: the same ids must not run twice.
                await self._once(
                    REMOTE_METHODS["abort"], write_json({"request_ids": [r.request_id for r in values[0]]})
                )
            return await self._once(call, body)

        work = self._connection.retry(method, attempt, repeatable=call.repeatable)
        return await self._connection.with_timeout(method, limit, work)

    async def _once(self, call: RemoteMethod, body: bytes) -> Any:
        status, raw = await self._connection.request(call.verb, call.route, body)
        if status != 200:
            answer = None
            with suppress(ValueError):
                answer = json.loads(raw)
            raise decode_error(status, answer, self.name)
        if call.result is None:
            return None
        try:
            return parse_body(call.answer, raw).result
        except InvalidBodyError as error:
            raise EngineError(
                f"Engine {self.name!r} at {self._connection.url} does not speak this protocol: {error}"
            ) from error


async def is_skyrl_server(connection: Connection, deadline_s: float) -> bool:
    """Whether the server is an HttpEndpoint, even one that answers 401; False for another kind of server.

    Waits for a server to answer. Raises DeadlineExceeded if none does.
    """

    async def status() -> int:
        return (await connection.request("GET", REMOTE_METHODS["capabilities"].route))[0]

    await connection.open()
    try:
        return await connection.wait_until_ready(status, deadline_s) != 404
    finally:
        await connection.close()
