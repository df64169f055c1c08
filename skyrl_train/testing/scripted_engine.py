"""An inference engine that answers from a function, for testing any code that uses engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from skyrl_train.data.token_arrays import Tokens, to_token_array
from skyrl_train.engines.base import (
    Capabilities,
    Completion,
    EngineHealth,
    SampleRequest,
    SamplingParams,
    VersionSpan,
)
from skyrl_train.engines.sampling_params import check_supported
from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.weight_sync.protocol import Bucket, Manifest

AnswerFunction = Callable[[SampleRequest], Sequence[int] | Tokens]

ALL_CAPABILITIES = Capabilities(
    name="scripted",
    sampling=frozenset(field.name for field in fields(SamplingParams)),
    weight_routes=frozenset({"in_process"}),
    pause_modes=frozenset({"keep", "abort", "wait"}),
)


class ScriptedEngine:
    """An engine whose `answer(request)` returns the sampled token ids (cut to max_tokens); log-probs are -1 nat.

    `delay_s` is a number or a function of the request: a call takes as long as its slowest request. `failures` maps a
    method's name to the exception that its next calls raise. `calls` records method names, and `batches` the request
    lists of generate.
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
        self.name = name
        self.capabilities = replace(capabilities, name=name)
        self.failures = dict(failures or {})
        self.calls: list[str] = []
        self.batches: list[list[SampleRequest]] = []
        self.version = 0
        self._newest, self._is_self_test = -1, False
        self.asleep = self.partially_loaded = self.closed = False
        self._answer = answer
        self.delay_s = delay_s
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._aborted: dict[str, asyncio.Event] = {}
        self._generated_tokens = 0

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self._note("generate")
        self._check_serving()
        self.batches.append(list(requests))
        for request in requests:
            check_supported(request.sampling, self.capabilities)
        self._aborted |= {request.request_id: asyncio.Event() for request in requests}
        try:
            return list(await asyncio.gather(*(self._complete(request) for request in requests)))
        finally:
            for request in requests:
                self._aborted.pop(request.request_id, None)

    async def _complete(self, request: SampleRequest) -> Completion:
        aborted = self._aborted[request.request_id]
        delay = self.delay_s(request) if callable(self.delay_s) else self.delay_s
        begun = time.monotonic()
        work = asyncio.ensure_future(self._work(delay))
        stop = asyncio.ensure_future(aborted.wait())
        try:
            await asyncio.wait({work, stop}, timeout=request.deadline_s, return_when=asyncio.FIRST_COMPLETED)
            finished = work.done()
        finally:
            work.cancel()
            stop.cancel()
        ids = list(self._answer(request))[: request.sampling.max_tokens] if finished else []
        reason = "abort" if not finished else "length" if len(ids) == request.sampling.max_tokens else "stop"
        self._generated_tokens += len(ids)
        logprobs = np.full(len(ids), -1.0, np.float32)
        spans = [VersionSpan(0, len(ids), self.version)] if ids else []
        running_s = time.monotonic() - begun
        return Completion(
            request.request_id, to_token_array(ids), logprobs, logprobs, reason, spans, running_s=running_s
        )

    async def _work(self, delay: float) -> None:
        await asyncio.sleep(delay)
        await self._may_run.wait()

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        self._note("score")
        self._check_serving()
        return [[-1.0] * (len(ids) - 1) for ids in token_ids]

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._note("abort")
        for request_id in request_ids:
            if request_id in self._aborted:
                self._aborted[request_id].set()

    async def pause(self, mode: str = "keep") -> None:
        self._note("pause")
        if mode == "abort":
            await self.abort(list(self._aborted))
        while mode == "wait" and self._aborted:
            await asyncio.sleep(0.001)
        self._may_run.clear()

    async def resume(self) -> None:
        self._note("resume")
        self._may_run.set()

    async def sleep(self, level: int = 1) -> int:
        self._note("sleep")
        self.asleep = True
        return 0

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._note("wake_up")
        self.asleep = tags is not None and "kv_cache" not in tags and self.asleep

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        self._note("connect_weights")
        self._newest = -1

    async def begin_weights(self, manifest: Manifest) -> None:
        self._note("begin_weights")
        if manifest.version <= self._newest:
            raise WeightSyncError(f"engine {self.name}: version {manifest.version} is stale: {self.version} is served.")
        self._is_self_test = manifest.rehearsal

    async def receive_weights(self, bucket: Bucket) -> None:
        self._note("receive_weights")
        self.partially_loaded = True

    async def commit_weights(self, version: int) -> None:
        self._note("commit_weights")
        self.version, self.partially_loaded = version, False
        self._newest = version - self._is_self_test

    async def reset_prefix_cache(self) -> None:
        self._note("reset_prefix_cache")

    async def load_adapter(self, name: str, path: str) -> None:
        self._note("load_adapter")

    async def unload_adapter(self, name: str) -> None:
        self._note("unload_adapter")

    async def health(self) -> EngineHealth:
        self._note("health")
        return EngineHealth(
            name=self.name,
            version=self.version,
            running=len(self._aborted),
            paused=not self._may_run.is_set(),
            asleep=self.asleep,
            torn=self.partially_loaded,
            generated_tokens=self._generated_tokens,
        )

    async def close(self) -> None:
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
            raise EngineError(f"Engine {self.name!r} is {'torn' if self.partially_loaded else 'asleep'}.")
