"""An engine whose server is vLLM's or SGLang's own server (native_servers.py) instead of an HttpEndpoint.

Such a server does not respond while it is paused, and does not report the state of its requests. So the client
implements pausing: it aborts running requests at the server, keeps their tokens, and later sends new requests that
continue from these tokens. No request runs at the server while its weights change, so the version of every token is
known.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import reduce
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.aio import mark_exception_retrieved
from skyrl_train.data.token_arrays import Tokens, to_logprob_array, to_token_array
from skyrl_train.data.token_texts import token_text
from skyrl_train.engines.base import (
    PAUSE_MODES,
    Capabilities,
    Completion,
    EngineHealth,
    PauseMode,
    SampleRequest,
    StopReason,
    VersionSpan,
)
from skyrl_train.engines.http.native_servers import NativeServer, ServerCompletion
from skyrl_train.engines.http.protocol import DEADLINE_MARGIN_S
from skyrl_train.engines.lifecycle import (
    ABORT_RETRY_INTERVAL_S,
    MEMORY_TAGS,
    EngineState,
    Lifecycle,
    await_thread_future,
)
from skyrl_train.engines.sampling_params import (
    RequestValidator,
    check_unique_request_ids,
    request_seed,
    with_stop_token,
)
from skyrl_train.engines.token_sampler import StopStrings
from skyrl_train.errors import EngineError, SkyRLError, WeightSyncError
from skyrl_train.models.composite import get_checkpoint_config
from skyrl_train.models.export import rename_shard_files, save_checkpoint_tensors
from skyrl_train.models.loading import load_meta_model, load_tokenizer
from skyrl_train.models.stop_tokens import get_stop_tokens, load_stop_configs
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES, AdapterSpec, Bucket, Manifest, dtype_of
from skyrl_train.weight_sync.receiver import WeightReceiver, reject_adapter


class _NativeRequest:
    """The state of one request, from submission to completion."""

    def __init__(self, request: SampleRequest):
        self.request = request
        self.rid = ""
        """The request's id at the server, which is new each time that the request is sent."""
        self.call_task: asyncio.Task[ServerCompletion] | None = None
        """The running call to the server, or None."""
        self.abort_requested = asyncio.Event()
        """Set if the caller or the deadline aborted the request, which is then not sent again."""
        self.retracted = False
        self.started_at = math.inf
        """time.monotonic() at which the request's time toward its deadline started."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[VersionSpan] = []

    def continuation(self, max_tokens: int) -> SampleRequest:
        """Return the request for the remaining tokens, at most `max_tokens`."""
        request, num_sampled = self.request, len(self.token_ids)
        return replace(
            request,
            token_ids=np.concatenate((request.token_ids, to_token_array(self.token_ids))),
            sampling=replace(request.sampling, max_tokens=max_tokens),
            seed=request_seed(request.seed, "rest", 0, 0, num_sampled) if num_sampled else request.seed,
        )

    def append(self, sampled: ServerCompletion, version: int) -> None:
        """Append tokens that were sampled with weights of `version`."""
        start = len(self.token_ids)
        self.token_ids += sampled.token_ids
        self.logprobs += sampled.logprobs
        if sampled.token_ids:
            if self.versions and self.versions[-1].version == version:
                start = self.versions.pop().start
            self.versions.append(VersionSpan(start, len(self.token_ids), version))

    def truncate(self, length: int) -> None:
        """Drop all sampled tokens after the first `length`."""
        del self.token_ids[length:], self.logprobs[length:]
        self.versions = [replace(span, stop=min(span.stop, length)) for span in self.versions if span.start < length]


class NativeEngine:
    """An InferenceEngine that samples with vLLM's or SGLang's own server.

    This process receives and verifies weights and writes them to a folder, which the server then loads. Fingerprints
    verify the weights up to the folder, and a log-prob probe verifies the rest. `close` leaves the server running.

    Example:
        engine = await NativeEngine(server, model=model, dtype="bfloat16", device="cpu", folder=folder).connect(60)
    """

    capabilities: Capabilities

    def __init__(
        self, server: NativeServer, *, model: str, dtype: str, device: str, folder: str, max_num_seqs: int = 1024
    ):
        """Create an engine that is not connected yet.

        Args:
            server: The server.
            model: Path or name of the model that the server serves, which is also read here.
            dtype: Dtype of the model's weights.
            device: Device of the trainer.
            folder: Folder for weights, which must have the same path on the server's node.
            max_num_seqs: Maximum number of concurrent requests to the server. Other requests wait here, and their time
                toward the deadline has not started.
        """
        self.name = server.connection.name
        self._server = server
        self._model = model
        self._dtype = dtype
        self._device = device
        self._folder = folder
        self._entries: dict[str, _NativeRequest] = {}
        self._ids = (f"{uuid.uuid4().hex[:12]}-{number}" for number in count())
        self._can_send = asyncio.Event()
        """Set while requests may be sent."""
        self._permits = asyncio.Semaphore(max_num_seqs)
        self.lifecycle = Lifecycle(self.name)
        self._num_idle_holds = 0
        """Number of operations that need the server to be idle."""
        self._weights_lock = asyncio.Lock()
        """Held while `score` uses the weights, and while they change."""
        self._background: set[asyncio.Task[None]] = set()
        self._worker = ThreadPoolExecutor(1, f"weights-{self.name}")
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0

    async def connect(self, deadline_s: float) -> NativeEngine:
        """Wait until the server responds, set `capabilities`, and return this engine.

        Raises:
            DeadlineExceeded: The server did not respond within `deadline_s`.
            EngineError: The token is wrong, the server is of another kind, or it was started with wrong options.
            ConfigError: The model cannot be read in this process.
        """
        loop = asyncio.get_running_loop()
        await self._server.connection.open()
        try:
            await self._server.discover(deadline_s)
            self._tokenizer, model, stop_tokens = await asyncio.to_thread(self._read_model)
        except BaseException:
            await self.close()
            raise

        def load_on_server(folder: str) -> None:
            asyncio.run_coroutine_threadsafe(self._load(folder), loop).result()

        root = Path(self._folder) / "".join(c if c.isalnum() else "_" for c in self.name)
        store = CheckpointWeightStore(model, root, self._tokenizer, load_on_server)
        self._receiver = WeightReceiver(store, self.name)
        self.capabilities = self._capabilities()
        max_model_len, vocab_size = self._server.max_model_len, model.config.get_text_config().vocab_size
        self._checks = RequestValidator(self.capabilities, vocab_size, max_model_len, max_model_len - 1)
        self._stop_token_ids = [token for token in sorted(stop_tokens) if token < vocab_size]
        self._update_can_send()
        return self

    def _read_model(self) -> tuple[Any, PreTrainedModel, frozenset[int]]:
        tokenizer = load_tokenizer(self._model)
        stop_tokens = get_stop_tokens(tokenizer, *load_stop_configs(self._model))
        return tokenizer, load_meta_model(self._model, dtype_of(self._dtype)), stop_tokens

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample a completion for each request and return them in request order.

        Requests wait in this process while the engine is paused. Cancelling the call aborts its requests at the server.

        Raises:
            UnsupportedParameter: The server does not support a parameter of a request.
            EngineError: The engine cannot serve now, a request's id is already used, or the server failed.
        """
        for request in requests:
            self._checks.check_request(request, ())
        self.lifecycle.check_serving()
        check_unique_request_ids(self.name, requests, self._entries)
        entries = [_NativeRequest(self._with_stop_tokens(request)) for request in requests]
        self._entries |= {entry.request.request_id: entry for entry in entries}
        tasks = [asyncio.ensure_future(self._run(entry)) for entry in entries]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task, entry in zip(tasks, entries, strict=True):
                task.cancel()
                self._entries.pop(entry.request.request_id, None)  # a task that never started does not remove its entry

    def _with_stop_tokens(self, request: SampleRequest) -> SampleRequest:
        """Return the request with all stop tokens of the model, because a server derives none from the chat
        template."""
        sampling = reduce(with_stop_token, self._stop_token_ids, request.sampling)
        return request if sampling is request.sampling else replace(request, sampling=sampling)

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs of the sequences' tokens; see `InferenceEngine.score`.

        Waits for a weight sync that is running.

        Raises:
            UnsupportedParameter: The server does not support this temperature, or a sequence is empty, too long or has
                invalid ids.
            EngineError: The engine is asleep, closed or not fully loaded, or the server failed.
        """
        sequences = self._checks.check_score(token_ids, temperature)
        self.lifecycle.check_serving()
        async with self._weights_lock:
            self.lifecycle.check_serving()
            return list(await asyncio.gather(*(self._server.score(ids) for ids in sequences)))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests at the server; unknown ids are ignored.

        Their `generate` calls return the tokens sampled so far.
        """
        await self._abort_entries([self._entries[id] for id in request_ids if id in self._entries])

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return nothing: requests to the server do not stream, so their tokens arrive together."""
        return {}

    async def _run(self, entry: _NativeRequest) -> Completion:
        """Run a request once fewer than `max_num_seqs` others are running."""
        permit = asyncio.ensure_future(self._permits.acquire())
        try:
            if await _wait_unless_aborted(entry, permit):
                return await self._run_with_permit(entry)
            self._entries.pop(entry.request.request_id, None)
            return self._completion(entry, StopReason.ABORT)
        finally:  # the permit may have been acquired at the moment of the abort
            if not permit.cancel() and not permit.cancelled():
                self._permits.release()

    async def _run_with_permit(self, entry: _NativeRequest) -> Completion:
        """Send a request, and send it again after every retraction."""
        timer, entry.started_at = None, time.monotonic()
        if entry.request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(
                entry.request.deadline_s, lambda: self._run_in_background(self._abort_entries([entry]))
            )
        try:
            while True:
                if not await _wait_unless_aborted(entry, asyncio.ensure_future(self._can_send.wait())):
                    return self._completion(entry, StopReason.ABORT)
                entry.retracted = False
                version = self._receiver.version
                entry.call_task = asyncio.ensure_future(self._send(entry))
                sampled = await entry.call_task
                self._on_response(entry)
                entry.append(sampled, version)
                is_aborted = sampled.stop_reason == StopReason.ABORT
                if not is_aborted or not entry.retracted or not self._remaining_tokens(entry):
                    return self._completion(entry, sampled.stop_reason)
        except asyncio.CancelledError:
            if entry.call_task is not None:
                self._run_in_background(self._server.abort([entry.rid]))
            raise
        finally:
            self._on_response(entry)
            self._entries.pop(entry.request.request_id, None)
            if timer is not None:
                timer.cancel()

    def _on_response(self, entry: _NativeRequest) -> None:
        entry.call_task = None
        if not any(other.call_task for other in self._entries.values()):
            self.lifecycle.finish_draining()

    def _remaining_tokens(self, entry: _NativeRequest) -> int:
        """Return the number of tokens that may still be sampled for a request."""
        request = entry.request
        limit = min(request.sampling.max_tokens, self._server.max_model_len - len(request.token_ids))
        return limit - len(entry.token_ids)

    async def _send(self, entry: _NativeRequest) -> ServerCompletion:
        request = entry.continuation(self._remaining_tokens(entry))
        limit = self._server.deadline_s if request.deadline_s is None else request.deadline_s + 2 * DEADLINE_MARGIN_S

        async def attempt(number: int) -> ServerCompletion:
            if number:  # the server may not have noticed the broken connection
                await self._server.abort([entry.rid])
            entry.rid = next(self._ids)
            return await self._server.sample(entry.rid, request)

        connection = self._server.connection
        sampled = await connection.with_timeout(
            "generate", limit, connection.retry("generate", attempt, repeatable=True)
        )
        self._generated_tokens += len(sampled.token_ids)
        self._prompt_tokens += len(request.token_ids)
        self._cached_tokens += sampled.cached_tokens
        logprobs = sampled.logprobs
        if len(sampled.token_ids) != len(logprobs) or not all(-9999 < logprob <= 1e-3 for logprob in logprobs):
            raise EngineError(f"Engine {self.name!r}: log-probs are missing or not finite; its weights are broken.")
        return sampled

    async def _abort_entries(self, entries: Iterable[_NativeRequest]) -> None:
        """End requests with their tokens so far, and wait until they have ended at the server."""
        entries = list(entries)
        for entry in entries:
            entry.abort_requested.set()
        await self._stop_on_server(entries)

    async def _stop_on_server(self, entries: Iterable[_NativeRequest]) -> None:
        """Abort requests at the server and wait until they have ended there. They keep their tokens here."""
        entries = list(entries)
        while tasks := {entry.rid: entry.call_task for entry in entries if entry.call_task is not None}:
            await self._server.abort(list(tasks))
            await asyncio.wait(tasks.values(), timeout=ABORT_RETRY_INTERVAL_S)
            await asyncio.sleep(0)  # lets the waiting coroutines take the results

    def _run_in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background and ignore its errors: without a server the request itself fails, too."""

        async def quietly() -> None:
            with suppress(SkyRLError):
                await work

        task = asyncio.ensure_future(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _completion(self, entry: _NativeRequest, reason: str) -> Completion:
        """Return the completion of a request that ended at the server, or before it was sent, for `reason`."""
        length, text = self._find_stop(entry)
        if length is not None:
            entry.truncate(length)
            reason = StopReason.STOP
        elif reason == StopReason.STOP:
            text = token_text(self._tokenizer, entry.token_ids[-1])
        elif reason == StopReason.ABORT and not self._remaining_tokens(entry):
            reason = StopReason.LENGTH
        greedy = entry.request.sampling.temperature == 0
        return Completion(
            request_id=entry.request.request_id,
            token_ids=to_token_array(entry.token_ids),
            logprobs=to_logprob_array([0.0] * len(entry.logprobs) if greedy else entry.logprobs),
            full_logprobs=to_logprob_array(entry.logprobs),
            stop_reason=str(reason),
            versions=entry.versions,
            stop_text=text,
            running_s=max(0.0, time.monotonic() - entry.started_at),
        )

    def _find_stop(self, entry: _NativeRequest) -> tuple[int | None, str | None]:
        """Return the number of tokens up to the request's first stop string or stop token, and its text; None if none.

        Servers miss a stop string that begins before a retraction and ends after it, and SGLang misses stop tokens if
        the request ignores end-of-sequence tokens.
        """
        sampling = entry.request.sampling
        stops = StopStrings(self._tokenizer, sampling.stop) if sampling.stop else None
        if stops is None and not sampling.stop_token_ids:
            return None, None
        for index, token in enumerate(entry.token_ids):
            text = stops.find(entry.token_ids[: index + 1]) if stops and stops.may_end_at(token) else None
            if text is None and token in sampling.stop_token_ids:
                text = token_text(self._tokenizer, token)
            if text is not None:
                return index + 1, text
        return None, None

    # -- pausing and sleeping ----------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """Stop sampling until `resume`, and return when the engine is paused.

        New requests wait in this process, not at the server.

        Args:
            mode: A PauseMode that decides what happens to running requests; see `InferenceEngine.pause`.

        Raises:
            UnsupportedParameter: `mode` is not in capabilities.pause_modes.
        """
        self._checks.check_pause(mode)
        is_running = any(entry.call_task for entry in self._entries.values())
        drained = self.lifecycle.pause(busy=mode == PauseMode.WAIT and is_running)
        self._update_can_send()
        if mode == PauseMode.ABORT:
            await self._abort_entries(self._entries.values())
        elif mode == PauseMode.RETRACT:
            await self._retract()
        await await_thread_future(drained)

    async def resume(self) -> None:
        """Continue after `pause`: send the waiting requests to the server, unless the engine sleeps or is not fully
        loaded."""
        self.lifecycle.resume()
        self._update_can_send()

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> int:
        """Abort all requests and let the server free memory until `wake_up`.

        Args:
            level: 1 frees the KV cache; 2 also discards the weights on an accelerator, so that the engine needs a full
                weight sync.
            keep_weights: Replaces level 2 by level 1, at which vLLM's server moves its weights to host memory.

        Returns:
            Always 0, because servers do not report the freed bytes.
        """
        level = 1 if keep_weights else level
        self.lifecycle.sleep(MEMORY_TAGS, discards_weights=level >= 2 and self._device != "cpu")
        self._update_can_send()
        await self._abort_entries(self._entries.values())
        self.lifecycle.wake_up(MEMORY_TAGS - await self._server.sleep(level))
        return 0

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Let the server allocate the memory that `sleep` freed, and continue to send requests.

        Args:
            tags: Memory to allocate: "weights" or "kv_cache"; None for both. Memory that is not freed is ignored.

        Raises:
            UnsupportedParameter: A tag is unknown.
        """
        self._checks.check_wake_up(tags)
        if freed_tags := self.lifecycle.freed_among(tags):
            await self._server.wake_up(sorted(freed_tags))
            self.lifecycle.wake_up(freed_tags)
        self._update_can_send()

    async def reset_prefix_cache(self) -> None:
        """Drop the server's prefix cache.

        Running requests are aborted at the server for that, and continue afterwards with the tokens sampled so far.
        """
        async with self._server_idle():
            await self._server.reset_prefix_cache()

    async def load_adapter(self, name: str, path: str) -> None:
        """Raise UnsupportedParameter, because adapters are not supported."""
        self._checks.check_adapter(name)

    async def unload_adapter(self, name: str) -> None:
        """Do nothing, because no adapter can be loaded."""

    @asynccontextmanager
    async def _server_idle(self) -> AsyncIterator[None]:
        """Keep the server idle inside the context: retract running requests and hold back new ones."""
        self._num_idle_holds += 1
        self._update_can_send()
        try:
            async with self._weights_lock:
                await self._retract()
                yield
        finally:
            self._num_idle_holds -= 1
            self._update_can_send()

    async def _retract(self) -> None:
        for entry in self._entries.values():
            entry.retracted = True
        await self._stop_on_server(self._entries.values())

    def _update_can_send(self) -> None:
        """Update `_can_send`. Call this after every change of state."""
        closed = self.lifecycle.state is EngineState.CLOSED  # requests are sent then, and fail
        if closed or (self.lifecycle.can_admit and not self._num_idle_holds):
            self._can_send.set()
        else:
            self._can_send.clear()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the trainer's transfer group with this process, which passes the weights on to the server.

        The arguments are those of `InferenceEngine.connect_weights`.

        Raises:
            WeightSyncError: The server does not support the route, or the group did not form in time.
        """
        supported = self.capabilities.weight_routes
        if route in WEIGHT_ROUTES and route not in supported:
            reason = self.capabilities.refusals["broadcast"]
            raise WeightSyncError(
                f"engine {self.name} does not support the weight route {route!r}: {reason} "
                f"Use one of {', '.join(sorted(supported))}."
            )
        await self._call_receiver(self._receiver.connect, route, address, rank, world_size, timeout_s)

    async def begin_weights(self, manifest: Manifest) -> None:
        """Start a weight sync, and check its manifest against the model. The server continues to serve the old weights.

        Raises:
            WeightSyncError: The manifest does not fit.
            EngineError: The engine sleeps without its weights.
        """
        self.lifecycle.check_can_load(manifest)
        await self._call_receiver(self._receiver.begin, manifest)

    async def receive_weights(self, bucket: Bucket) -> None:
        """Receive one bucket in this process on the thread for weight syncs, and verify the fingerprints of its
        tensors. The server gets the weights in `commit_weights`.

        Raises:
            WeightSyncError: The transfer failed, or a tensor's fingerprint is wrong, possibly one of the previous
                bucket.
        """
        await self._call_receiver(self._receiver.receive, bucket)

    async def commit_weights(self, version: int) -> None:
        """Let the server load the received weights and serve them as `version`.

        It runs no requests meanwhile; running ones continue afterwards. The server loads the weights even if the caller
        is cancelled.

        Raises:
            WeightSyncError: A tensor of the manifest has not arrived, or the server did not load the weights.
        """
        await asyncio.shield(mark_exception_retrieved(asyncio.ensure_future(self._commit(version))))

    async def _commit(self, version: int) -> None:
        async with self._server_idle():
            await self._call_receiver(self._receiver.commit, version)
            self.lifecycle.mark_weights_loaded()

    async def _load(self, folder: str) -> None:
        await self._server.load_weights(folder)
        await self._server.reset_prefix_cache()

    async def _call_receiver(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step of a weight sync. Steps run one at a time on their own thread, because they wait for the
        trainer."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, step, *args)
        finally:
            if self._receiver.partially_loaded:
                self.lifecycle.invalidate_weights()
            self._update_can_send()

    # -- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Return the state and counters of this client's requests.

        Requests of other clients of the server are not counted.

        Raises:
            EngineError: The server is not alive, or this engine is closed.
        """
        await self._server.check_alive()
        entries = list(self._entries.values())
        running = sum(entry.call_task is not None for entry in entries)
        return self.lifecycle.health(
            self._receiver.version,
            running=running,
            queued=len(entries) - running,
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prompt_tokens - self._cached_tokens,
            cached_tokens=self._cached_tokens,
        )

    async def close(self) -> None:
        """Close the connections; running requests raise EngineError. A second call does nothing."""
        self.lifecycle.close()
        for task in self._background:
            task.cancel()
        await self._server.connection.close()
        self._update_can_send()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _capabilities(self) -> Capabilities:
        kind = self._server.kind
        truncation = f"a server of {kind} returns one log-prob per token, not one before and one after truncation."
        refusals = {
            **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"), truncation),
            "score.temperature": f"{kind} returns log-probs of prompts at temperature 1 only.",
            "pause.keep": f"a server of {kind} does not respond while it is paused, so its weights cannot be verified.",
            "partial_tokens": f"a server of {kind} is asked for complete responses only.",
            "top_logprobs": f"a server of {kind} is asked for the log-probs of sampled tokens only.",
            "json_schema": f"a server of {kind} returns log-probs after its mask only, which training cannot use.",
            "adapter": f"adapters of a server of {kind} are not managed by this client.",
            "broadcast": f"the weights of a server of {kind} pass through this process, which has no accelerator.",
            **self._server.refusals,
        }
        return Capabilities(
            name=self.name,
            sampling=self._server.sampling,
            weight_routes=WEIGHT_ROUTES if self._device == "cpu" else frozenset({"checkpoint", "in_process"}),
            max_model_len=self._server.max_model_len,
            pause_modes=PAUSE_MODES - {PauseMode.KEEP},
            seeds=self._server.seeds,
            score_temperature=False,
            refusals=refusals,
        )


async def _wait_unless_aborted(entry: _NativeRequest, future: asyncio.Future[Any]) -> bool:
    """Wait for a future and return True, or False if the request is aborted first. An unfinished future is
    cancelled."""
    aborted = asyncio.ensure_future(entry.abort_requested.wait())
    try:
        await asyncio.wait([future, aborted], return_when=asyncio.FIRST_COMPLETED)
        return not entry.abort_requested.is_set()
    finally:
        aborted.cancel()
        future.cancel()


class CheckpointWeightStore:
    """A WeightStore that writes one checkpoint folder per sync, under a temporary name until it is complete."""

    loads_separately = False

    def __init__(
        self,
        model: PreTrainedModel,
        root: Path,
        tokenizer: Any,
        load_on_server: Callable[[str], None],
    ):
        """Create a store.

        Args:
            model: The model, on the meta device.
            root: A folder that nothing else uses.
            tokenizer: The tokenizer to save with the weights.
            load_on_server: Function that makes the server load a folder and returns when it has loaded.
        """
        self._model = model
        self._layout = dict(model.named_parameters(remove_duplicate=False))
        self._root = root
        self._tokenizer = tokenizer
        self._load_on_server = load_on_server
        self._count = 0
        self._files: list[list[str]] = []
        """Names of the tensors in each written file."""
        self._bytes = 0

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        """Return the model's parameters on the meta device, by name.

        Raises:
            WeightSyncError: `adapter` is not None, because servers need merged weights.
        """
        reject_adapter(adapter)
        return self._layout

    def loaded_tensor(self, name: str) -> None:
        """Return None, because the server's tensors cannot be accessed."""
        return None

    @property
    def _unfinished(self) -> Path:
        return self._root / "unfinished"

    def start(self) -> None:
        """Start a checkpoint: delete an unfinished one, and write configuration and tokenizer.

        Raises:
            WeightSyncError: The folder cannot be written.
        """
        self._files, self._bytes = [], 0
        try:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)
            get_checkpoint_config(self._model).save_pretrained(self._unfinished)
            self._tokenizer.save_pretrained(self._unfinished)
        except OSError as error:
            raise self._failed(error) from error

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Write tensors to a new file of the checkpoint.

        Raises:
            WeightSyncError: The file cannot be written.
        """
        path = self._unfinished / f"part-{len(self._files)}.safetensors"
        try:
            # Servers silently skip experts under transformers' own names, so use the names of the checkpoint.
            self._files.append(save_checkpoint_tensors(self._model, dict(tensors), path))
        except (OSError, SafetensorError) as error:
            raise self._failed(error) from error
        self._bytes += sum(tensor.nbytes for _, tensor in tensors)

    def finish(self) -> None:
        """Complete the checkpoint, load it on the server, and delete older checkpoints. Blocks until it is loaded.

        Raises:
            WeightSyncError: The folder cannot be written, or the server cannot load it.
            EngineError: The server failed after loading, when it dropped its prefix cache.
        """
        self._count += 1
        checkpoint = self._root / f"weights_{self._count:06d}"
        try:
            rename_shard_files(self._unfinished, self._files, self._bytes)
            shutil.rmtree(checkpoint, ignore_errors=True)
            self._unfinished.rename(checkpoint)
        except OSError as error:
            raise self._failed(error) from error
        self._load_on_server(str(checkpoint.resolve()))
        for folder in self._root.iterdir():
            if folder != checkpoint:
                shutil.rmtree(folder, ignore_errors=True)

    def _failed(self, error: Exception) -> WeightSyncError:
        return WeightSyncError(
            f"weights for a server could not be written to {self._root}: {error}; set generator.weight_sync_folder to "
            "a folder that this process can write."
        )
