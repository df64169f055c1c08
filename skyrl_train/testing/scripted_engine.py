"""An inference engine whose responses come from a function, for tests of code that uses engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from skyrl_train.data.token_arrays import Tokens, to_token_array
from skyrl_train.engines.base import (
    MAX_TOP_LOGPROBS,
    Capabilities,
    Completion,
    EngineHealth,
    SampleRequest,
    SamplingParams,
    TopLogProbs,
    VersionSpan,
)
from skyrl_train.engines.sampling_params import check_options, check_supported
from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.weight_sync.protocol import Bucket, Manifest

AnswerFunction = Callable[[SampleRequest], Sequence[int] | Tokens]
"""A function that returns the token ids sampled for a request."""

ALL_CAPABILITIES = Capabilities(
    name="scripted",
    sampling=frozenset(field.name for field in fields(SamplingParams)),
    weight_routes=frozenset({"in_process"}),
    pause_modes=frozenset({"keep", "abort", "wait"}),
    partial_tokens=True,
    max_top_logprobs=MAX_TOP_LOGPROBS,
    json_schema=True,
)


class _RunningRequest:
    """A request whose answer arrives evenly over its delay, and is computed when it is first needed."""

    def __init__(self, request: SampleRequest, answer: AnswerFunction, delay_s: float):
        self.request = request
        self.delay_s = delay_s
        self.aborted = asyncio.Event()
        self.started_s = time.monotonic()
        self._answer = answer
        self._ids: Tokens | None = None

    def sampled(self) -> Tokens:
        """Return the tokens that have arrived by now."""
        fraction = min(1.0, (time.monotonic() - self.started_s) / self.delay_s) if self.delay_s else 1.0
        return self.answer()[: int(fraction * len(self.answer()))]

    def answer(self) -> Tokens:
        """Return the whole answer."""
        if self._ids is None:
            self._ids = to_token_array(list(self._answer(self.request))[: self.request.sampling.max_tokens])
        return self._ids

    def sampled_at_abort(self) -> Tokens:
        """Return the tokens that somebody may have seen: none if `sampled` was never called."""
        return self.sampled() if self._ids is not None else to_token_array([])


class ScriptedEngine:
    """An InferenceEngine without a model. Every log-prob is -1 nat, and every method records its call in `calls`.

    The k most likely tokens after a sampled token t are t, t + 1, and so on, with -1, -2, ... nats. A `json_schema` is
    accepted and left to the answer function.

    A method whose name is a key of `failures` raises that exception. After `close`, all methods except `close` raise
    EngineError.
    """

    def __init__(
        self,
        answer: AnswerFunction = lambda request: request.token_ids,
        *,
        name: str = "scripted",
        delay_s: float | Callable[[SampleRequest], float] = 0.0,
        capabilities: Capabilities = ALL_CAPABILITIES,
        failures: Mapping[str, Exception] | None = None,
    ):
        """Create an engine that serves version 0.

        Args:
            answer: Returns the sampled token ids of a request, which are truncated to max_tokens. By default it returns
                the prompt.
            name: The engine's name.
            delay_s: Seconds that a request takes, or a function that returns them for a request.
            capabilities: The engine's capabilities, whose name is replaced by `name`.
            failures: Exceptions by the name of the method that raises them. Change `failures` to stop that.
        """
        self.name = name
        self.capabilities = replace(capabilities, name=name)
        self.failures = dict(failures or {})
        self.calls: list[str] = []
        """Names of the methods that were called, in order."""
        self.batches: list[list[SampleRequest]] = []
        """Requests of each call of `generate`."""
        self.version = 0
        self._latest_version, self._is_self_test = -1, False
        self.asleep = self.partially_loaded = self.closed = False
        self._answer = answer
        self.delay_s = delay_s
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._running: dict[str, _RunningRequest] = {}
        self._generated_tokens = 0

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Return a completion for each request, after the delay of the slowest one. A paused engine waits for `resume`.

        Raises:
            UnsupportedParameter: The engine's capabilities lack a sampling parameter.
            EngineError: The engine is partially loaded, asleep or closed.
        """
        self._note("generate")
        self._check_serving()
        self.batches.append(list(requests))
        for request in requests:
            check_supported(request.sampling, self.capabilities)
            check_options(request, self.capabilities)
        delays = [self.delay_s(request) if callable(self.delay_s) else self.delay_s for request in requests]
        running = [_RunningRequest(r, self._answer, delay) for r, delay in zip(requests, delays, strict=True)]
        self._running |= {entry.request.request_id: entry for entry in running}
        try:
            return list(await asyncio.gather(*map(self._complete, running)))
        finally:
            for request in requests:
                self._running.pop(request.request_id, None)

    async def _complete(self, running: _RunningRequest) -> Completion:
        request = running.request
        work = asyncio.ensure_future(self._work(running.delay_s))
        stop = asyncio.ensure_future(running.aborted.wait())
        try:
            await asyncio.wait({work, stop}, timeout=request.deadline_s, return_when=asyncio.FIRST_COMPLETED)
            finished = work.done()
        finally:
            work.cancel()
            stop.cancel()
        ids = running.answer() if finished else running.sampled_at_abort()
        reason = "abort" if not finished else "length" if len(ids) == request.sampling.max_tokens else "stop"
        self._generated_tokens += len(ids)
        logprobs = np.full(len(ids), -1.0, np.float32)
        spans = [VersionSpan(0, len(ids), self.version)] if len(ids) else []
        running_s = time.monotonic() - running.started_s
        top = None
        if request.top_logprobs and len(ids):
            ranks = np.arange(request.top_logprobs)  # the sampled token is the most likely one
            top = TopLogProbs(ids[:, None] + ranks, np.tile(-1.0 - ranks, (len(ids), 1)))
        return Completion(
            request.request_id, ids, logprobs, logprobs, reason, spans, running_s=running_s, top_logprobs=top
        )

    async def _work(self, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._may_run.wait()

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return -1 nat for all tokens but the first of each sequence.

        Raises:
            EngineError: The engine is partially loaded, asleep or closed.
        """
        self._note("score")
        self._check_serving()
        return [[-1.0] * (len(ids) - 1) for ids in token_ids]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests with stop_reason "abort", and no tokens unless `partial_tokens` returned some. Unknown ids are
        ignored."""
        self._note("abort")
        for request_id in request_ids:
            if request_id in self._running:
                self._running[request_id].aborted.set()

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return the tokens of running requests, whose number grows evenly over their delay."""
        self._note("partial_tokens")
        running = [self._running[request_id] for request_id in request_ids if request_id in self._running]
        return {entry.request.request_id: ids for entry in running if len(ids := entry.sampled())}

    async def pause(self, mode: str = "keep") -> None:
        """Hold requests back until `resume`. "abort" ends running requests, and "wait" waits for them first."""
        self._note("pause")
        if mode == "abort":
            await self.abort(list(self._running))
        while mode == "wait" and self._running:
            await asyncio.sleep(0.001)
        self._may_run.clear()

    async def resume(self) -> None:
        """Continue after `pause`."""
        self._note("resume")
        self._may_run.set()

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> int:
        """Reject requests until `wake_up`; return 0, because no memory is freed."""
        self._note("sleep")
        self.asleep = True
        return 0

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Accept requests again, unless `tags` is given and lacks "kv_cache"."""
        self._note("wake_up")
        self.asleep = tags is not None and "kv_cache" not in tags and self.asleep

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Accept weights of any version again. No connection is made, and the arguments are ignored."""
        self._note("connect_weights")
        self._latest_version = -1

    async def begin_weights(self, manifest: Manifest) -> None:
        """Begin a weight sync. Only the version of the manifest is checked.

        Raises:
            WeightSyncError: The version is not newer than the last committed one.
        """
        self._note("begin_weights")
        if manifest.version <= self._latest_version:
            raise WeightSyncError(f"engine {self.name}: version {manifest.version} is stale: {self.version} is served.")
        self._is_self_test = manifest.is_self_test

    async def receive_weights(self, bucket: Bucket) -> None:
        """Mark the weights as partially loaded, and ignore the bucket."""
        self._note("receive_weights")
        self.partially_loaded = True

    async def commit_weights(self, version: int) -> None:
        """Serve `version` from now on."""
        self._note("commit_weights")
        self.version, self.partially_loaded = version, False
        self._latest_version = version - self._is_self_test

    async def reset_prefix_cache(self) -> None:
        """Record the call and do nothing else."""
        self._note("reset_prefix_cache")

    async def load_adapter(self, name: str, path: str) -> None:
        """Record the call and do nothing else."""
        self._note("load_adapter")

    async def unload_adapter(self, name: str) -> None:
        """Record the call and do nothing else."""
        self._note("unload_adapter")

    async def health(self) -> EngineHealth:
        """Return the engine's state and the number of generated tokens."""
        self._note("health")
        return EngineHealth(
            name=self.name,
            version=self.version,
            running=len(self._running),
            paused=not self._may_run.is_set(),
            asleep=self.asleep,
            partially_loaded=self.partially_loaded,
            generated_tokens=self._generated_tokens,
        )

    async def close(self) -> None:
        """Mark the engine as closed."""
        self._note("close")
        self.closed = True

    def _note(self, method: str) -> None:
        self.calls.append(method)
        failure: Any = self.failures.get(method)
        if failure is not None:
            raise failure
        if self.closed and method != "close":
            raise EngineError(f"Engine {self.name!r} is closed.")

    def _check_serving(self) -> None:
        if self.partially_loaded or self.asleep:
            raise EngineError(
                f"Engine {self.name!r} is {'partially loaded' if self.partially_loaded else 'asleep'}. Sync its "
                "weights or wake it up first."
            )
