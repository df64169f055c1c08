"""An engine whose server is vLLM's or SGLang's own (native_servers.py) instead of ours.

A paused server of these does not answer, and cannot tell the state of its requests. So this end does the pausing: it
aborts running requests at the server, keeps their tokens here, and later sends them again to continue from there. No
request runs at the server when its weights change, so the version of every token is known.
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
from skyrl_train.data.token_arrays import to_logprob_array, to_token_array
from skyrl_train.data.token_texts import token_text
from skyrl_train.engines.base import PAUSE_MODES, Capabilities, Completion, EngineHealth, SampleRequest, VersionSpan
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
    """One request, from submission to completion."""

    def __init__(self, request: SampleRequest):
        self.request = request
        self.rid = ""
        """The request's id at the server: a new one each time that it is sent."""
        self.call_task: asyncio.Task[ServerCompletion] | None = None
        """The call to the server, while there is one."""
        self.abort_requested = asyncio.Event()
        """Set if it was aborted, by its caller or its deadline: it is not sent again."""
        self.retracted = False
        self.started_at = math.inf
        """time.monotonic() at which its clock started."""
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[VersionSpan] = []

    def continuation(self, room: int) -> SampleRequest:
        """The request for the remaining tokens, `room` at most."""
        request, done = self.request, len(self.token_ids)
        return replace(
            request,
            token_ids=np.concatenate((request.token_ids, to_token_array(self.token_ids))),
            sampling=replace(request.sampling, max_tokens=room),
            seed=request_seed(request.seed, "rest", 0, 0, done) if done else request.seed,
        )

    def append(self, sampled: ServerCompletion, version: int) -> None:
        """Append sampled tokens."""
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
    """`engine = await NativeEngine(server, ...).connect(60)`; then an InferenceEngine like any other.

    Weights are received, checked and written to a folder here, which the server then loads. Fingerprints verify them up
    to the folder, a log-prob probe verifies the rest. `close` leaves the server running.
    """

    capabilities: Capabilities

    def __init__(
        self, server: NativeServer, *, model: str, dtype: str, device: str, folder: str, max_num_seqs: int = 1024
    ):
        """`model`: the server's. `folder`: for weights, with the same path on both sides. `device`: the trainer's.

        `max_num_seqs`: the most requests that the server has at a time; others wait here, and their clocks with them.
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
        """Whether requests may be sent."""
        self._permits = asyncio.Semaphore(max_num_seqs)
        self.lifecycle = Lifecycle(self.name)
        self._num_idle_holds = 0
        """How many operations need the server to be idle."""
        self._weights_lock = asyncio.Lock()
        """Held while a score uses the weights, or while they change."""
        self._background: set[asyncio.Task[None]] = set()
        self._worker = ThreadPoolExecutor(1, f"weights-{self.name}")
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0

    async def connect(self, deadline_s: float) -> NativeEngine:
        """Wait until the server answers; then set `capabilities`.

        Raises DeadlineExceeded if that takes more than `deadline_s`, EngineError for a wrong token or server,
        ConfigError for a model that cannot be read here.
        """
        loop = asyncio.get_running_loop()
        await self._server.connection.open()
        try:
            await self._server.discover(deadline_s)
            self._tokenizer, model, ends = await asyncio.to_thread(self._read_model)
        except BaseException:
            await self.close()
            raise

        def hand_over(folder: str) -> None:
            asyncio.run_coroutine_threadsafe(self._load(folder), loop).result()

        place = Path(self._folder) / "".join(c if c.isalnum() else "_" for c in self.name)
        store = CheckpointWeightStore(model, place, self._tokenizer, hand_over)
        self._receiver = WeightReceiver(store, self.name)
        self.capabilities = self._capabilities()
        longest, vocab_size = self._server.max_model_len, model.config.get_text_config().vocab_size
        self._checks = RequestValidator(self.capabilities, vocab_size, longest, longest - 1)
        self._stop_token_ids = [end for end in sorted(ends) if end < vocab_size]
        self._update_can_send()
        return self

    def _read_model(self) -> tuple[Any, PreTrainedModel, frozenset[int]]:
        tokenizer = load_tokenizer(self._model)
        ends = get_stop_tokens(tokenizer, *load_stop_configs(self._model))
        return tokenizer, load_meta_model(self._model, dtype_of(self._dtype)), ends

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See InferenceEngine. Cancelling the call aborts its requests at the server."""
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
                self._entries.pop(entry.request.request_id, None)  # a task that never began does not do it

    def _with_stop_tokens(self, request: SampleRequest) -> SampleRequest:
        """Return the request with all end tokens spelled out: a server does not derive any from the chat template."""
        sampling = reduce(with_stop_token, self._stop_token_ids, request.sampling)
        return request if sampling is request.sampling else replace(request, sampling=sampling)

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """See InferenceEngine."""
        plain = self._checks.check_score(token_ids, temperature)
        self.lifecycle.check_serving()
        async with self._weights_lock:
            self.lifecycle.check_serving()
            return list(await asyncio.gather(*(self._server.score(ids) for ids in plain)))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See InferenceEngine."""
        await self._end([self._entries[one] for one in request_ids if one in self._entries])

    async def _run(self, entry: _NativeRequest) -> Completion:
        """Send a request once the server has room for it."""
        seat = asyncio.ensure_future(self._permits.acquire())
        try:
            if await _wait_unless_aborted(entry, seat):
                return await self._run_with_permit(entry)
            self._entries.pop(entry.request.request_id, None)
            return self._completion(entry, "abort")
        finally:  # it may have been got just as the request was ended
            if not seat.cancel() and not seat.cancelled():
                self._permits.release()

    async def _run_with_permit(self, entry: _NativeRequest) -> Completion:
        """Send a request, and again after every retraction."""
        timer, entry.started_at = None, time.monotonic()
        if entry.request.deadline_s is not None:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(entry.request.deadline_s, lambda: self._begin(self._end([entry])))
        try:
            while True:
                if not await _wait_unless_aborted(entry, asyncio.ensure_future(self._can_send.wait())):
                    return self._completion(entry, "abort")
                entry.retracted = False
                version = self._receiver.version
                entry.call_task = asyncio.ensure_future(self._send(entry))
                sampled = await entry.call_task
                self._on_response(entry)
                entry.append(sampled, version)
                if sampled.stop_reason != "abort" or not entry.retracted or not self._room(entry):
                    return self._completion(entry, sampled.stop_reason)
        except asyncio.CancelledError:
            if entry.call_task is not None:
                self._begin(self._server.abort([entry.rid]))
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

    def _room(self, entry: _NativeRequest) -> int:
        """The number of tokens that may still be sampled for it."""
        request = entry.request
        longest = min(request.sampling.max_tokens, self._server.max_model_len - len(request.token_ids))
        return longest - len(entry.token_ids)

    async def _send(self, entry: _NativeRequest) -> ServerCompletion:
        request = entry.continuation(self._room(entry))
        limit = self._server.deadline_s if request.deadline_s is None else request.deadline_s + 2 * DEADLINE_MARGIN_S

        async def attempt(number: int) -> ServerCompletion:
            if number:  # the server may not have noticed that the connection broke
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
        if len(sampled.token_ids) != len(sampled.logprobs) or not all(-9999 < one <= 1e-3 for one in sampled.logprobs):
            raise EngineError(f"Engine {self.name!r}: log-probs are missing or not finite; its weights are broken.")
        return sampled

    async def _end(self, entries: Iterable[_NativeRequest]) -> None:
        entries = list(entries)
        for entry in entries:
            entry.abort_requested.set()
        await self._stop(entries)

    async def _stop(self, entries: Iterable[_NativeRequest]) -> None:
        """Abort `entries` at the server and wait until they have ended there; they keep their tokens."""
        entries = list(entries)
        while flying := {entry.rid: entry.call_task for entry in entries if entry.call_task is not None}:
            await self._server.abort(list(flying))
            await asyncio.wait(flying.values(), timeout=ABORT_RETRY_INTERVAL_S)
            await asyncio.sleep(0)  # lets the tasks that wait for them take the result

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run in the background. Errors are ignored: if the server is gone, the request itself will fail, too."""

        async def quietly() -> None:
            with suppress(SkyRLError):
                await work

        task = asyncio.ensure_future(quietly())
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def _completion(self, entry: _NativeRequest, reason: str) -> Completion:
        length, text = self._find_stop(entry)
        if length is not None:
            entry.truncate(length)
            reason = "stop"
        elif reason == "stop":
            text = token_text(self._tokenizer, entry.token_ids[-1])
        elif reason == "abort" and not self._room(entry):
            reason = "length"
        greedy = entry.request.sampling.temperature == 0
        return Completion(
            request_id=entry.request.request_id,
            token_ids=to_token_array(entry.token_ids),
            logprobs=to_logprob_array([0.0] * len(entry.logprobs) if greedy else entry.logprobs),
            full_logprobs=to_logprob_array(entry.logprobs),
            stop_reason=reason,
            versions=entry.versions,
            stop_text=text,
            running_s=max(0.0, time.monotonic() - entry.started_at),
        )

    def _find_stop(self, entry: _NativeRequest) -> tuple[int | None, str | None]:
        """Number of tokens up to the first of the request's stop strings or stop tokens, and its text.

        Servers miss a stop string that begins before a retraction and ends after it, and SGLang misses stop tokens if
        the end of sequence is ignored.
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

    # -- traffic -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """See InferenceEngine. Requests that come while paused wait here for `resume`."""
        self._checks.check_pause(mode)
        flying = any(entry.call_task for entry in self._entries.values())
        drained = self.lifecycle.pause(busy=mode == "wait" and flying)
        self._update_can_send()
        if mode == "abort":
            await self._end(self._entries.values())
        elif mode == "retract":
            await self._retract()
        await await_thread_future(drained)

    async def resume(self) -> None:
        self.lifecycle.resume()
        self._update_can_send()

    async def sleep(self, level: int = 1) -> int:
        """See InferenceEngine. Running requests end as aborted. Returns 0: servers do not say what they free."""
        self.lifecycle.sleep(MEMORY_TAGS, discards_weights=level >= 2 and self._device != "cpu")
        self._update_can_send()
        await self._end(self._entries.values())
        self.lifecycle.wake_up(MEMORY_TAGS - await self._server.sleep(level))
        return 0

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See InferenceEngine."""
        self._checks.check_wake_up(tags)
        if woken := self.lifecycle.freed_among(tags):
            await self._server.wake_up(sorted(woken))
            self.lifecycle.wake_up(woken)
        self._update_can_send()

    async def reset_prefix_cache(self) -> None:
        """See InferenceEngine. Running requests are sent again."""
        async with self._server_idle():
            await self._server.reset_prefix_cache()

    async def load_adapter(self, name: str, path: str) -> None:
        """Always raises UnsupportedParameter: see capabilities.refusals."""
        self._checks.check_adapter(name)

    async def unload_adapter(self, name: str) -> None:
        """Does nothing, as no adapter can be loaded."""

    @asynccontextmanager
    async def _server_idle(self) -> AsyncIterator[None]:
        """While inside, no request runs at the server."""
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
        await self._stop(self._entries.values())

    def _update_can_send(self) -> None:
        """After any change of state: update whether requests may be sent."""
        closed = self.lifecycle.state is EngineState.CLOSED  # whoever waits then finds the connection closed
        if closed or (self.lifecycle.can_admit and not self._num_idle_holds):
            self._can_send.set()
        else:
            self._can_send.clear()

    # -- weights -----------------------------------------------------------------------------------------------------

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        known = self.capabilities.weight_routes
        if route in WEIGHT_ROUTES and route not in known:
            reason = self.capabilities.refusals["broadcast"]
            raise WeightSyncError(
                f"engine {self.name}: no weight route {route!r}: {reason} Use {', '.join(sorted(known))}."
            )
        await self._call_receiver(self._receiver.connect, route, address, rank, world_size, timeout_s)

    async def begin_weights(self, manifest: Manifest) -> None:
        self.lifecycle.check_can_load(manifest)
        if manifest.base_version is not None:
            raise WeightSyncError(f"engine {self.name}: {self.capabilities.refusals['partial_weights']}")
        await self._call_receiver(self._receiver.begin, manifest)

    async def receive_weights(self, bucket: Bucket) -> None:
        await self._call_receiver(self._receiver.receive, bucket)

    async def commit_weights(self, version: int) -> None:
        """See InferenceEngine. It completes even if its caller is cancelled: no request runs while the server loads."""
        await asyncio.shield(mark_exception_retrieved(asyncio.ensure_future(self._commit(version))))

    async def _commit(self, version: int) -> None:
        async with self._server_idle():
            await self._call_receiver(self._receiver.commit, version)
            self.lifecycle.mark_weights_loaded()

    async def _load(self, folder: str) -> None:
        await self._server.load_weights(folder)
        await self._server.reset_prefix_cache()

    async def _call_receiver(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step of a weight sync; steps run one at a time on their own thread, as they wait for the trainer."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._worker, step, *args)
        finally:
            if self._receiver.partially_loaded:
                self.lifecycle.invalidate_weights()
            self._update_can_send()

    # -- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """See InferenceEngine; the counters are of this end. Raises EngineError if the server is not alive."""
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
        """Close the connections; running requests get EngineError. Closing twice is harmless."""
        self.lifecycle.close()
        for task in self._background:
            task.cancel()
        await self._server.connection.close()
        self._update_can_send()
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _capabilities(self) -> Capabilities:
        kind = self._server.kind
        one = f"a server of {kind} tells one log-prob a token, not that before and that after truncation."
        refusals = {
            **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty", "min_tokens"), one),
            "score.temperature": f"{kind} gives log-probs of prompts at temperature 1 only.",
            "pause.keep": f"a server of {kind} answers nothing while it is paused, so its weights could not be proven.",
            "partial_weights": f"a server of {kind} loads whole checkpoints.",
            "adapter": f"adapters of a server of {kind} are not managed from here.",
            "broadcast": f"the weights of a server of {kind} pass through this process, which has no accelerator.",
            **self._server.refusals,
        }
        return Capabilities(
            name=self.name,
            sampling=self._server.sampling,
            weight_routes=WEIGHT_ROUTES if self._device == "cpu" else frozenset({"checkpoint", "in_process"}),
            max_model_len=self._server.max_model_len,
            pause_modes=PAUSE_MODES - {"keep"},
            partial_weights=False,
            seeds=self._server.seeds,
            score_temperature=False,
            refusals=refusals,
        )


async def _wait_unless_aborted(entry: _NativeRequest, waited: asyncio.Future[Any]) -> bool:
    """Wait; returns whether it came before the request was ended. It is cancelled otherwise, unless it is done."""
    ended = asyncio.ensure_future(entry.abort_requested.wait())
    try:
        await asyncio.wait([waited, ended], return_when=asyncio.FIRST_COMPLETED)
        return not entry.abort_requested.is_set()
    finally:
        ended.cancel()
        waited.cancel()


class CheckpointWeightStore:
    """A WeightStore that writes a folder per sync, under a temporary name until it is complete."""

    def __init__(
        self,
        model: PreTrainedModel,
        root: Path,
        tokenizer: Any,
        load_on_server: Callable[[str], None],
    ):
        """`model`: on the meta device. `root`: a folder that nothing else uses.

        `hand_over` makes the server load a folder, and returns once it has.
        """
        self._model = model
        self._layout = dict(model.named_parameters(remove_duplicate=False))
        self._root = root
        self._tokenizer = tokenizer
        self._load_on_server = load_on_server
        self._count = 0
        self._files: list[list[str]] = []
        """Names of the tensors in each file written."""
        self._bytes = 0

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        reject_adapter(adapter)
        return self._layout

    def loaded_tensor(self, name: str) -> None:
        """None: the server's tensors cannot be accessed."""
        return None

    @property
    def _unfinished(self) -> Path:
        return self._root / "unfinished"

    def start(self) -> None:
        self._files, self._bytes = [], 0
        try:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)
            get_checkpoint_config(self._model).save_pretrained(self._unfinished)
            self._tokenizer.save_pretrained(self._unfinished)
        except OSError as error:
            raise self._failed(error) from error

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        path = self._unfinished / f"part-{len(self._files)}.safetensors"
        try:
            # Servers silently skip experts under transformers' own names, so they get the checkpoint's names.
            self._files.append(save_checkpoint_tensors(self._model, dict(tensors), path))
        except (OSError, SafetensorError) as error:
            raise self._failed(error) from error
        self._bytes += sum(tensor.nbytes for _, tensor in tensors)

    def finish(self) -> None:
        self._count += 1
        done = self._root / f"weights_{self._count:06d}"
        try:
            rename_shard_files(self._unfinished, self._files, self._bytes)
            shutil.rmtree(done, ignore_errors=True)
            self._unfinished.rename(done)
        except OSError as error:
            raise self._failed(error) from error
        self._load_on_server(str(done.resolve()))
        for old in self._root.iterdir():
            if old != done:
                shutil.rmtree(old, ignore_errors=True)

    def _failed(self, error: Exception) -> WeightSyncError:
        return WeightSyncError(
            f"weights for a server could not be written to {self._root}: {error}; set generator.weight_sync_folder."
        )
