"""A client of an engine that runs in another process or on another node, behind an HttpEndpoint (server.py)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from skyrl_train.aio import gather_all
from skyrl_train.data.token_arrays import Tokens
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
"""Bytes of a call's body in addition to its requests."""


class RemoteEngine:
    """An InferenceEngine behind an HttpEndpoint.

    Exceptions of the server's engine are raised here with their own types. If the server cannot be reached or dies
    during a call, EngineError is raised within seconds, so that its requests can go to another engine. Calls larger
    than the server's limits are split. `close` leaves the server's engine running.

    Example:
        engine = await RemoteEngine(url, token, name="engine 0").connect(deadline_s=60)
    """

    capabilities: Capabilities

    def __init__(self, url: str, token: str, *, name: str = "", deadline_s: float = 600.0):
        """Create an engine that is not connected yet.

        Args:
            url: host:port or http(s)://host:port.
            token: The server's token.
            name: Name of the engine; the URL by default.
            deadline_s: Seconds that a call, or a request without its own deadline, may take.

        Raises:
            ConfigError: `url` is not an address of this form.
        """
        self._connection = Connection(url, token, name)
        self.name = self._connection.name
        self._deadline_s = deadline_s
        self._watchdog = ProgressWatchdog(name or url, self.health)
        self._limits = Limits()

    async def connect(self, deadline_s: float) -> RemoteEngine:
        """Wait until the server responds and its engine is alive, set `capabilities`, and return this engine.

        A paused engine is resumed: the client that paused it died before it could resume it.

        Raises:
            DeadlineExceeded: No server responded within `deadline_s`.
            EngineError: The token is wrong, the server's engine is not alive, or it is another kind of server.
        """
        await self._connection.open()
        try:
            info = await self._connection.wait_until_ready(self._probe_server, deadline_s)
        except BaseException:
            await self.close()
            raise
        self._limits = info.limits
        routes = info.capabilities.weight_routes & REMOTE_WEIGHT_ROUTES
        is_remote = not is_loopback(urlsplit(self._connection.url).hostname or "")
        self.capabilities = replace(info.capabilities, name=self.name, weight_routes=routes, other_machine=is_remote)
        return self

    async def _probe_server(self) -> ServerInfo:
        info: ServerInfo = await self._once(REMOTE_METHODS["capabilities"], b"")
        health: EngineHealth = await self._once(REMOTE_METHODS["health"], b"")
        if health.paused:
            await self._once(REMOTE_METHODS["resume"], b"")
        return info

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample a completion for each request at the server and return them in request order.

        Cancelling the call closes its connection, and the server then aborts the requests. If a connection breaks, the
        requests are aborted at the server and sent again.

        Raises:
            DeadlineExceeded: The engine made no progress for the longest deadline plus a margin.
            UnsupportedParameter: A request exceeds the server's limits, or the engine does not support it.
            EngineError: The server cannot be reached, or its engine raised this error.
        """
        # Short deadlines of these requests do not lower the limit: the engine may be busy with long requests of others.
        limit = max([self._deadline_s, *(request.deadline_s or 0.0 for request in requests)])
        calls = [
            self._watchdog.watch(self._call("generate", part, deadline_s=math.inf), limit + 2 * DEADLINE_MARGIN_S)
            for part in self._split(requests)
        ]
        return [completion for part in await gather_all(calls) for completion in part]

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs of the sequences' tokens from the server; see `InferenceEngine.score`.

        Log-probs that are not finite arrive as NaN.

        Raises:
            UnsupportedParameter: A sequence exceeds the server's limits, or the engine does not support the arguments.
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        rows = [list(ids) for ids in token_ids]
        calls = [self._call("score", part, temperature) for part in self._split(rows)]
        return [logprobs.tolist() for part in await gather_all(calls) for logprobs in part]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests at the server, whose `generate` calls return the tokens sampled so far; unknown ids are
        ignored.

        Raises:
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        await gather_all(self._call("abort", part) for part in self._split(list(request_ids)))

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return the tokens that running requests have sampled so far; see `InferenceEngine.partial_tokens`.

        Raises:
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        if not self.capabilities.partial_tokens:  # a server of an earlier version has no such route
            return {}
        parts = await gather_all(self._call("partial_tokens", part) for part in self._split(list(request_ids)))
        return {request_id: tokens for part in parts for request_id, tokens in part.items()}

    # -- traffic -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """Pause the server's engine until `resume`. This also stops requests of its other clients.

        Args:
            mode: A PauseMode that decides what happens to running requests; see `InferenceEngine.pause`.

        Raises:
            UnsupportedParameter: The engine does not support the mode.
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        await self._call("pause", mode)

    async def resume(self) -> None:
        """Let the server's engine continue sampling after `pause`.

        Raises:
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        await self._call("resume")

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> int:
        """Let the server's engine stop sampling and free memory.

        Args:
            level: 1 frees the KV cache; 2 also frees the weights.
            keep_weights: True to free only the KV cache, also in vLLM, which otherwise moves weights at level 1.

        Returns:
            Number of bytes freed on the server's device, as its engine reports it.

        Raises:
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        return await self._call("sleep", level, keep_weights)  # type: ignore[no-any-return]

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Let the server's engine allocate the memory that `sleep` freed.

        Args:
            tags: Memory to allocate: "weights" or "kv_cache"; None for both.

        Raises:
            UnsupportedParameter: A tag is unknown.
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        await self._call("wake_up", None if tags is None else list(tags))

    async def reset_prefix_cache(self) -> None:
        """Drop the prefix cache of the server's engine.

        Raises:
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        await self._call("reset_prefix_cache")

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter into the server's engine, replacing an adapter of the same name.

        Args:
            name: Name of the adapter.
            path: Folder on the server's node, not on this one, that peft's `save_pretrained` wrote.

        Raises:
            UnsupportedParameter: The engine does not support adapters.
            EngineError: The adapter does not fit the model, or the server cannot be reached.
            DeadlineExceeded: The server did not answer in time.
        """
        await self._call("load_adapter", name, path)

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter from the server's engine. The name is the one that `load_adapter` got.

        Raises:
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        await self._call("unload_adapter", name)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Let the server's engine join the trainer's transfer group. Routes without a group do nothing.

        The arguments are those of `InferenceEngine.connect_weights`.

        Raises:
            WeightSyncError: The route does not work over HTTP, or the server's engine raised this error.
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
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
        """Start a weight sync at the server's engine, which checks the manifest and still serves the old weights.

        Raises:
            WeightSyncError: The manifest does not fit the model.
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        await self._call("begin_weights", manifest)

    async def receive_weights(self, bucket: Bucket) -> None:
        """Let the server's engine receive one bucket over the weight sync route, verify its tensors and load them.

        Only the description of the bucket is sent over HTTP.

        Raises:
            WeightSyncError: The bucket refers to tensors of this process or to memory of an accelerator, which HTTP
                cannot carry, or the server's engine raised this error.
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        if bucket.payload is not None:
            check_route("in_process")
        if any(handle.cuda is not None for handle in bucket.handles):
            raise WeightSyncError(
                f"engine {self.name!r}: GPU memory cannot be shared over HTTP. Set "
                "generator.weight_sync_route=broadcast."
            )
        await self._call("receive_weights", bucket)

    async def commit_weights(self, version: int) -> None:
        """Finish a weight sync: the server's engine verifies the loaded tensors and serves `version`.

        Raises:
            WeightSyncError: A tensor of the manifest has not arrived, or verification failed.
            EngineError: The server cannot be reached, or its engine raised this error.
            DeadlineExceeded: The server did not answer in time.
        """
        await self._call("commit_weights", version)

    # -- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Return the state and counters of the server's engine, under the name that the engine has in this process.

        Raises:
            EngineError: The server cannot be reached, or its engine is broken or closed.
            DeadlineExceeded: The server did not answer in time.
        """
        return replace(await self._call("health"), name=self.name)

    async def close(self) -> None:
        """Close the connections. The server's engine keeps running. A second call does nothing."""
        await self._connection.close()

    # -- HTTP --------------------------------------------------------------------------------------------------------

    def _split(self, items: Sequence[Any]) -> Iterator[list[Any]]:
        """Split `items` in order, so that no call exceeds the server's limits.

        Raises:
            UnsupportedParameter: One item alone exceeds the limits.
        """
        max_bytes = self._limits.body_bytes - _ENVELOPE_BYTES
        part: list[Any] = []
        part_bytes = 0
        for item in items:
            item_bytes = len(write_json(item)) + 1
            if item_bytes > max_bytes:
                label = getattr(item, "request_id", "a sequence")
                raise UnsupportedParameter(
                    f"Engine {self.name!r} cannot receive {label!r}: it has {item_bytes} bytes, and the server allows "
                    f"{max_bytes}. Shorten it."
                )
            if part and (part_bytes + item_bytes > max_bytes or len(part) == self._limits.requests):
                yield part
                part, part_bytes = [], 0
            part.append(item)
            part_bytes += item_bytes
        if part:
            yield part

    async def _call(self, method: str, *values: Any, deadline_s: float | None = None) -> Any:
        limit = self._deadline_s + 2 * DEADLINE_MARGIN_S if deadline_s is None else deadline_s
        call = REMOTE_METHODS[method]
        body = b"" if call.verb == "GET" else write_json(call.arguments(*values))

        async def attempt(number: int) -> Any:
            if number and method == "generate":
                # The server may not have noticed the broken connection, and the same ids must not run twice.
                await self._once(
                    REMOTE_METHODS["abort"], write_json({"request_ids": [r.request_id for r in values[0]]})
                )
            return await self._once(call, body)

        work = self._connection.retry(method, attempt, repeatable=call.repeatable)
        return await self._connection.with_timeout(method, limit, work)

    async def _once(self, call: RemoteMethod, body: bytes) -> Any:
        status, raw = await self._connection.request(call.verb, call.route, body)
        if status != 200:
            error_body = None
            with suppress(ValueError):
                error_body = json.loads(raw)
            raise decode_error(status, error_body, self.name)
        if call.result is None:
            return None
        try:
            return parse_body(call.response_type, raw).result
        except InvalidBodyError as error:
            raise EngineError(
                f"Engine {self.name!r} at {self._connection.url} sent an answer that does not follow the protocol of "
                f"skyrl-train servers: {error} Check that the URL is right, and that the server runs the same version "
                "of skyrl-train as this process."
            ) from error


async def is_skyrl_server(connection: Connection, deadline_s: float) -> bool:
    """Wait until a server responds and return True if it is an HttpEndpoint, even if it rejects the token.

    Opens the connection and closes it again.

    Raises:
        DeadlineExceeded: No server responded within `deadline_s`.
        EngineError: The response is not HTTP.
    """

    async def status() -> int:
        return (await connection.request("GET", REMOTE_METHODS["capabilities"].route))[0]

    await connection.open()
    try:
        return await connection.wait_until_ready(status, deadline_s) != 404
    finally:
        await connection.close()
