"""Requests to SGLang, and commands to its scheduler. All of this runs on the event loop of SGLangProcesses."""

from __future__ import annotations

import asyncio
import base64
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, Literal

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.aio import mark_exception_retrieved
from skyrl_train.data.token_arrays import Tokens, to_logprob_array, to_token_array
from skyrl_train.data.token_texts import token_text
from skyrl_train.engines.base import Completion, SampleRequest, TopLogProbs, VersionSpan
from skyrl_train.engines.lifecycle import (
    ABORT_RETRY_INTERVAL_S,
    Lifecycle,
    RequestDeadlines,
    await_thread_future,
    tags_freed_at_level,
)
from skyrl_train.engines.sampling_params import check_logprobs, check_unique_request_ids
from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.receiver import WeightReceiver


class _SGLangRequest:
    """A request and its state, from submission to completion."""

    def __init__(self, request: SampleRequest, rid: str, loop: asyncio.AbstractEventLoop):
        self.request = request
        self.rid = rid
        """SGLang's id of the request. No id is a prefix of another, because SGLang aborts by prefix."""
        self.done: asyncio.Future[Completion] = loop.create_future()
        self.aborted = False
        self.is_streamed = False
        """True if SGLang's process sends the request's tokens after every step."""


class RequestManager:
    """A front end that sends requests to SGLang while the life cycle allows it, and pauses its scheduler otherwise."""

    def __init__(
        self,
        manager: Any,
        tokenizer: PreTrainedTokenizerBase,
        eos: frozenset[int],
        lifecycle: Lifecycle,
        *,
        max_model_len: int,
        on_cpu: bool,
        max_num_seqs: int,
        routing_shape: tuple[int, int] | None = None,
    ):
        """Create a manager without requests.

        Args:
            manager: SGLang's TokenizerManager.
            tokenizer: The model's tokenizer, for `Completion.stop_text`.
            eos: The model's end-of-sequence tokens.
            lifecycle: The engine's state.
            max_model_len: Maximum length of a prompt with its response, in tokens.
            on_cpu: True if the model is served on a CPU, where no memory is freed.
            max_num_seqs: How many requests SGLang runs at a time.
            routing_shape: Number of layers and of experts per token, if SGLang returns the experts of each token.
        """
        self.receiver: WeightReceiver
        """The engine's weight receiver. It must be set before the first request."""
        self.adapters: dict[str, str] = {}
        """SGLang's name of each loaded adapter, by the adapter's name."""
        self.generated_tokens = self.prompt_tokens = self.cached_tokens = 0
        self._manager = manager
        self._tokenizer = tokenizer
        self._eos = eos
        self._lifecycle = lifecycle
        self._name = lifecycle.name
        self._max_model_len = max_model_len
        self._on_cpu = on_cpu
        self._routing_shape = routing_shape
        self._entries: dict[str, _SGLangRequest] = {}
        self._waiting: list[_SGLangRequest] = []
        """The requests in `_entries` that SGLang does not have yet."""
        self._deadlines = RequestDeadlines(max_num_seqs)
        self._timer: asyncio.TimerHandle | None = None
        """Timer of the next deadline."""
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduler_paused = False
        self._scheduler_lock = asyncio.Lock()
        """Held while the state of SGLang's scheduler changes, or must not change."""
        self._memory_lock = asyncio.Lock()
        """Held while memory is freed or allocated, or must not be. It is acquired before `_scheduler_lock`."""

    @property
    def running(self) -> int:
        """Number of requests sent to SGLang."""
        return len(self._entries) - len(self._waiting)

    @property
    def queued(self) -> int:
        """Number of requests that have not been sent to SGLang yet."""
        return len(self._waiting)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample the requests, and return completions in request order. Cancelling the call aborts its requests.

        Raises:
            UnsupportedParameter: Another active request has the same id.
            EngineError: The engine is partially loaded, asleep or closed, or SGLang fails. If one request fails, the
                others are aborted first.
        """
        self._lifecycle.check_serving()
        check_unique_request_ids(self._name, requests, self._entries)
        loop = asyncio.get_running_loop()
        entries = [_SGLangRequest(request, f"{next(self._numbers)}.", loop) for request in requests]
        for entry in entries:
            self._entries[entry.request.request_id] = entry
            self._waiting.append(entry)
        self._deadlines.add((request.request_id, request.deadline_s) for request in requests)
        self._set_timer()
        self._send_waiting()
        try:
            return list(
                await asyncio.gather(*(asyncio.shield(mark_exception_retrieved(entry.done)) for entry in entries))
            )
        except asyncio.CancelledError:
            self._begin(self._abort(entries))
            raise
        except EngineError:  # The caller sends all requests of the call again, with the same ids.
            await self._abort(entries)
            raise

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests and wait until they have ended, so that their ids can be used again.

        Unknown ids are ignored.
        """
        await self._abort([self._entries[request_id] for request_id in request_ids if request_id in self._entries])

    async def _abort(self, entries: Sequence[_SGLangRequest]) -> None:
        while active := [entry for entry in entries if not entry.done.done()]:
            async with self._scheduler_lock:
                self._abort_once(active)
            await asyncio.wait([entry.done for entry in active], timeout=ABORT_RETRY_INTERVAL_S)

    async def partial_tokens(self, request_ids: Iterable[str]) -> dict[str, Tokens]:
        """Return the tokens of running requests that SGLang's process has sent, by request id."""
        tokens: dict[str, Tokens] = {}
        for request_id in request_ids:
            entry = self._entries.get(request_id)
            state = self._manager.rid_to_state.get(entry.rid) if entry is not None else None
            if entry is None or state is None or not state.dispatched:
                continue
            if not entry.is_streamed:
                entry.is_streamed = True
                self._stream(entry)
            if state.output_ids:
                tokens[request_id] = to_token_array(state.output_ids)
        return tokens

    def _stream(self, entry: _SGLangRequest) -> None:
        from sglang.srt.managers.io_struct import SetInternalStateReq

        from skyrl_train.engines.sglang.scheduler import STREAM

        self._manager._dispatch_to_scheduler(SetInternalStateReq(server_args={f"{STREAM}{entry.rid}": 1}))

    def fail_all(self) -> None:
        """Fail all requests with the error that ended the engine, and complete pending pauses."""
        self._waiting = []
        for entry in list(self._entries.values()):
            self._end(entry, self._lifecycle.end_error)
        self._lifecycle.finish_draining()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        remaining = self._deadlines.next_deadline() - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(remaining, self._expire) if remaining < math.inf else None

    def _expire(self) -> None:
        """Abort the requests whose deadlines have passed. The end of a request sets the next timer."""
        expired = self._deadlines.expired()
        if expired:
            self._begin(self.abort(expired))
        else:  # The timer fired slightly early.
            self._set_timer()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background, and keep a reference to its task until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, entry: _SGLangRequest) -> None:
        """Send a request to SGLang and wait for its end."""
        try:
            self._end(entry, _empty_completion(entry.request) if entry.aborted else await self._sample(entry))
        except Exception as error:
            self._end(entry, self._lifecycle.as_engine_error(error))

    def _end(self, entry: _SGLangRequest, outcome: Completion | EngineError) -> None:
        if self._entries.pop(entry.request.request_id, None) is None:
            return
        running_s = self._deadlines.remove(entry.request.request_id)
        self._set_timer()
        if not entry.done.done():
            if isinstance(outcome, Completion):
                entry.done.set_result(replace(outcome, running_s=running_s))
            else:
                entry.done.set_exception(outcome)
                entry.done.exception()  # This marks the exception as retrieved, because nothing may await it any more.
        if not self.running:
            self._lifecycle.finish_draining()

    async def _sample(self, entry: _SGLangRequest) -> Completion:
        from sglang.srt.managers.io_struct import GenerateReqInput

        from skyrl_train.engines.sglang.sampler import has_modified_distribution, to_sglang_params

        request = entry.request
        max_tokens = min(request.sampling.max_tokens, self._max_model_len - len(request.token_ids))
        modified = has_modified_distribution(request)
        output = await self._generate_one(
            GenerateReqInput(
                rid=entry.rid,
                input_ids=request.token_ids.tolist(),
                sampling_params=to_sglang_params(request, max_tokens, self._eos),
                return_logprob=True,
                logprob_start_len=-1,
                return_sampling_mask=modified,
                return_routed_experts=self._routing_shape is not None,
                top_logprobs_num=request.top_logprobs,
                lora_path=None if request.adapter is None else self.adapters[request.adapter],
            )
        )
        return self._completion(request, modified, output["output_ids"], output["meta_info"])

    async def _generate_one(self, request: Any) -> dict[str, Any]:
        """Send a request that does not stream to SGLang, and return its only output."""
        (output,) = [output async for output in self._manager.generate_request(request)]
        return output  # type: ignore[no-any-return]

    def _completion(self, request: SampleRequest, modified: bool, ids: list[int], meta: dict[str, Any]) -> Completion:
        full = [logprob for logprob, *_ in meta.get("output_token_logprobs", ())]
        logprobs = full
        if modified:
            logprobs = meta.get("output_token_sampling_logprobs", [])
        elif request.sampling.temperature == 0:
            logprobs = [0.0] * len(full)
        check_logprobs(self._name, logprobs, full)
        if not len(ids) == len(full) == len(logprobs):
            raise EngineError(
                f"Engine {self._name!r}: SGLang returned {len(ids)} tokens, {len(full)} full log-probs and "
                f"{len(logprobs)} log-probs of the distribution sampled from; the numbers must be equal."
            )
        self.generated_tokens += len(ids)
        self.prompt_tokens += len(request.token_ids)
        self.cached_tokens += meta.get("cached_tokens", 0)
        spans = [VersionSpan(s["start"], s["end"], int(s["version"])) for s in meta.get("weight_versions", ())]
        finish_reason = meta["finish_reason"]
        matched = finish_reason.get("matched")
        return Completion(
            request_id=request.request_id,
            token_ids=to_token_array(ids),
            logprobs=to_logprob_array(logprobs),
            full_logprobs=to_logprob_array(full),
            stop_reason=finish_reason["type"],
            versions=[span for span in spans if span.stop > span.start],
            stop_text=token_text(self._tokenizer, matched) if isinstance(matched, int) else matched,
            routing=self._routing(meta, request.known_routing),
            top_logprobs=_top_logprobs(meta["output_top_logprobs"]) if request.top_logprobs and ids else None,
        )

    def _routing(self, meta: dict[str, Any], known: int) -> np.ndarray | None:
        """Return the experts of the tokens after the first `known` ones, int16 [tokens, layers, k], without the last.

        Returns None if SGLang sent none.
        """
        encoded = meta.get("routed_experts")
        if self._routing_shape is None or encoded is None:
            return None
        experts = np.frombuffer(base64.b64decode(encoded), np.int32)
        return experts.reshape(-1, *self._routing_shape)[known:].astype(np.int16)

    def _abort_once(self, entries: Iterable[_SGLangRequest]) -> None:
        """Abort requests. The caller holds `_scheduler_lock`, because paused requests are invisible during scoring."""
        for entry in entries:
            if entry in self._waiting:
                self._waiting.remove(entry)
                self._end(entry, _empty_completion(entry.request))
            elif entry.rid in self._manager.rid_to_state:
                self._manager.abort_request(rid=entry.rid)
            else:
                entry.aborted = True

    # -- scoring -----------------------------------------------------------------------------------------------------

    async def score(self, token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probs (nats, temperature 1) of all tokens but the first, for each sequence.

        This also works while the engine is paused, or asleep without its cache, which is then allocated for the score.

        Raises:
            EngineError: The engine does not serve requests, or its cache is too small for a sequence.
        """
        async with self._memory_lock, self._scheduler_lock:
            self._lifecycle.check_serving(allow_freed_cache=True)
            restore_cache = bool(self._lifecycle.freed_among(["kv_cache"])) and not self._on_cpu
            if restore_cache:
                await self._change_memory("resume", {"kv_cache"})
            try:
                return list(await asyncio.gather(*(self._score(ids) for ids in token_ids)))
            finally:
                if restore_cache:  # Until `wake_up` the learner may use this memory.
                    await self._change_memory("release", {"kv_cache"})

    async def _score(self, ids: Sequence[int]) -> list[float]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        from skyrl_train.engines.sglang.scheduler import SCORE

        output = await self._generate_one(
            GenerateReqInput(
                rid=f"{SCORE}{next(self._numbers)}.",
                input_ids=list(ids),
                sampling_params={"max_new_tokens": 0},
                return_logprob=True,
                logprob_start_len=0,
            )
        )
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            raise EngineError(
                f"Engine {self._name!r}: its KV cache is too small for the {len(ids)} tokens to score. Raise "
                "gpu_memory_utilization."
            )
        return [logprob for logprob, *_ in output["meta_info"]["input_token_logprobs"][1:]]

    # -- pausing -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        """Pause; see `InferenceEngine.pause`. Unsent requests wait for `resume`."""
        drained = self._lifecycle.pause(busy=mode == "wait" and self.running > 0)
        if mode == "abort":
            await self.abort(list(self._entries))
        elif drained.done():
            await self._pause_scheduler("retract" if mode == "retract" else "in_place")
        await await_thread_future(drained)

    async def resume(self) -> None:
        """Continue after `pause`, and send waiting requests."""
        async with self._scheduler_lock:
            self._lifecycle.resume()
            self._send_waiting()

    def _send_waiting(self) -> None:
        """Let the scheduler continue and send waiting requests, unless the engine is halted.

        Every change of the engine's state calls this.
        """
        if self._lifecycle.is_halted:
            return
        if self._scheduler_paused:
            self._continue_scheduler()
        if self._lifecycle.can_admit:
            waiting, self._waiting = self._waiting, []
            for entry in waiting:
                self._begin(self._run(entry))

    def _continue_scheduler(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        self._scheduler_paused = False
        self._manager._dispatch_to_scheduler(ContinueGenerationReqInput(torch_empty_cache=False))

    async def _pause_scheduler(self, mode: str) -> None:
        """Pause SGLang's scheduler. When this returns, running requests take no more steps."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        async with self._scheduler_lock:
            if self.running and (mode == "retract" or not self._scheduler_paused):
                self._scheduler_paused = True
                self._manager._dispatch_to_scheduler(PauseGenerationReqInput(mode=mode))
                await self._flush_scheduler(self.receiver.version)

    async def _flush_scheduler(self, version: int) -> None:
        """Set the served weight version, and wait until the scheduler has handled all earlier messages."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version_communicator(UpdateWeightVersionReqInput(new_version=str(version)))

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> int:
        """Abort all requests and free memory; see `InferenceEngine.sleep`.

        Returns:
            The number of bytes freed; 0 on a CPU.
        """
        async with self._memory_lock:
            freed = self._lifecycle.sleep(tags_freed_at_level(level), discards_weights=not self._on_cpu and level >= 2)
            await self.abort(list(self._entries))
            async with self._scheduler_lock:
                if self._scheduler_paused:
                    self._continue_scheduler()
                if self._on_cpu or not freed:
                    return 0
                before = torch.cuda.mem_get_info()[0]
                await self._change_memory("release", freed)
                return torch.cuda.mem_get_info()[0] - before

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Allocate freed memory, and send the waiting requests if the engine can then serve them.

        Args:
            tags: Memory to allocate: "weights" or "kv_cache"; None for both. Memory that is not freed is ignored.
        """
        async with self._memory_lock, self._scheduler_lock:
            woken = self._lifecycle.freed_among(tags)
            if woken and not self._on_cpu:
                await self._change_memory("resume", woken)
            self._lifecycle.wake_up(woken)
            self._send_waiting()

    async def _change_memory(self, action: Literal["release", "resume"], tags: Iterable[str]) -> None:
        """Free or allocate the memory of `tags` in SGLang's processes."""
        from sglang.srt.managers import io_struct

        for _ in range(2):  # SGLang cleans up a request in the step after its last one.
            await self._flush_scheduler(self.receiver.version)
        request = getattr(io_struct, f"{action.title()}MemoryOccupationReqInput")(tags=sorted(tags))
        await getattr(self._manager, f"{action}_memory_occupation_communicator")(request)

    # -- weights and adapters ----------------------------------------------------------------------------------------

    async def pause_for_weights(self) -> None:
        """Mark the weights as partially loaded and pause, before the first tensor of a weight sync is loaded.

        Running requests keep their tokens, keys and values.
        """
        self._lifecycle.invalidate_weights()
        await self._pause_scheduler("in_place")

    async def activate_weights(self, version: int) -> None:
        """Serve the loaded weights as `version`. Running requests continue, and cached prompts are dropped."""
        async with self._scheduler_lock:
            await self._flush_scheduler(version)
            await self._manager.flush_cache()
            self._lifecycle.mark_weights_loaded()
            self._send_waiting()

    async def reset_prefix_cache(self) -> None:
        """Drop cached prompts. Running requests keep their keys and values."""
        async with self._scheduler_lock:
            await self._manager.flush_cache()

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter in the folder `path`. An earlier adapter of the same name is unloaded once unused.

        Raises:
            EngineError: SGLang rejects the adapter.
        """
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        sglang_name = f"{name}#{next(self._numbers)}"
        result = await self._manager.load_lora_adapter(LoadLoRAAdapterReqInput(lora_name=sglang_name, lora_path=path))
        if not result.success:
            raise EngineError(
                f"Engine {self._name!r}: SGLang rejects adapter {name!r} at {path}: {result.error_message}"
            )
        replaced = self.adapters.get(name)
        self.adapters[name] = sglang_name
        if replaced is not None:
            self._begin(self._unload(replaced))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, after waiting for running requests that use it. Unknown names are ignored."""
        sglang_name = self.adapters.pop(name, None)
        if sglang_name is not None:
            await self._unload(sglang_name)

    async def _unload(self, sglang_name: str) -> None:
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=sglang_name))


def _empty_completion(request: SampleRequest) -> Completion:
    return Completion(request.request_id, to_token_array([]), to_logprob_array([]), to_logprob_array([]), "abort", [])


def _top_logprobs(positions: Sequence[Sequence[tuple[float, int, Any]]]) -> TopLogProbs:
    ids = [[token for _, token, _ in position] for position in positions]
    return TopLogProbs(to_token_array(ids), to_logprob_array([[value for value, *_ in row] for row in positions]))
