"""Requests to SGLang, and commands to its scheduler. All of this runs on the host's event loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import torch

from skyrl_train.aio import mark_exception_retrieved
from skyrl_train.data.token_arrays import to_logprob_array, to_token_array
from skyrl_train.data.token_texts import token_text
from skyrl_train.engines.base import Completion, SampleRequest, VersionSpan
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
    """One request, from submission to completion."""

    def __init__(self, request: SampleRequest, rid: str, loop: asyncio.AbstractEventLoop):
        self.request = request
        self.rid = rid
        """SGLang's id of the request; it is no prefix of another one."""
        self.done: asyncio.Future[Completion] = loop.create_future()
        self.aborted = False


class RequestManager:
    """Sends requests to SGLang while the life cycle allows it, and makes its scheduler follow the life cycle."""

    def __init__(
        self,
        manager: Any,
        tokenizer: Any,
        eos: frozenset[int],
        lifecycle: Lifecycle,
        *,
        max_model_len: int,
        on_cpu: bool,
        max_num_seqs: int,
    ):
        """`manager` is SGLang's TokenizerManager; `slots`: how many requests it runs at a time."""
        self.receiver: WeightReceiver
        """To be set before the first request."""
        self.adapters: dict[str, str] = {}
        """Name of an adapter -> its name in SGLang."""
        self.generated_tokens = self.prompt_tokens = self.cached_tokens = 0
        self._manager = manager
        self._tokenizer = tokenizer
        self._eos = eos
        self._lifecycle = lifecycle
        self._name = lifecycle.name
        self._max_model_len = max_model_len
        self._on_cpu = on_cpu
        self._entries: dict[str, _SGLangRequest] = {}
        self._waiting: list[_SGLangRequest] = []
        """The requests in `_entries` that were not sent yet."""
        self._deadlines = RequestDeadlines(max_num_seqs)
        self._timer: asyncio.TimerHandle | None = None
        """For the next deadline."""
        self._numbers = count()
        self._tasks: set[asyncio.Task[None]] = set()
        self._scheduler_paused = False
        self._scheduler = asyncio.Lock()
        """Held while the scheduler's state changes, or must not change."""
        self._memory_changes = asyncio.Lock()
        """Held while memory is freed or allocated, or must not be; before `_scheduler`."""

    @property
    def running(self) -> int:
        """Number of requests sent to SGLang."""
        return len(self._entries) - len(self._waiting)

    @property
    def queued(self) -> int:
        """Number of requests that wait here."""
        return len(self._waiting)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Completions in request order; cancelling the call aborts its requests.

        Raises UnsupportedParameter for an id that is in use, EngineError if the engine is torn or asleep.
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
        except EngineError:  # of one: its caller sends all of them again, under the same ids
            await self._abort(entries)
            raise

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests and wait until they have ended, so that their ids may be used again."""
        await self._abort([self._entries[one] for one in request_ids if one in self._entries])

    async def _abort(self, entries: Sequence[_SGLangRequest]) -> None:
        while flying := [entry for entry in entries if not entry.done.done()]:
            async with self._scheduler:
                self._abort_once(flying)
            await asyncio.wait([entry.done for entry in flying], timeout=ABORT_RETRY_INTERVAL_S)

    def fail_all(self) -> None:
        """End all requests and pending pauses, as the engine has ended."""
        self._waiting = []
        for entry in list(self._entries.values()):
            self._end(entry, self._lifecycle.end_error)
        self._lifecycle.finish_draining()

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        left = self._deadlines.next_deadline() - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(left, self._expire) if left < math.inf else None

    def _expire(self) -> None:
        """End the requests that are late; their ends set the next timer."""
        late = self._deadlines.expired()
        if late:
            self._begin(self.abort(late))
        else:  # woken a little early
            self._set_timer()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, entry: _SGLangRequest) -> None:
        """Send a request to SGLang and wait for its end."""
        try:
            self._end(entry, _empty_completion(entry.request) if entry.aborted else await self._sample(entry))
        except Exception as error:
            self._end(entry, self._lifecycle.as_engine_error(error))

    def _end(self, entry: _SGLangRequest, answer: Completion | EngineError) -> None:
        if self._entries.pop(entry.request.request_id, None) is None:
            return
        running_s = self._deadlines.remove(entry.request.request_id)
        self._set_timer()
        if not entry.done.done():
            if isinstance(answer, Completion):
                entry.done.set_result(replace(answer, running_s=running_s))
            else:
                entry.done.set_exception(answer)
                entry.done.exception()  # marks it as retrieved: it may have no awaiter any more
        if not self.running:
            self._lifecycle.finish_draining()

    async def _sample(self, entry: _SGLangRequest) -> Completion:
        from sglang.srt.managers.io_struct import GenerateReqInput

        from skyrl_train.engines.sglang.sampler import has_altered_distribution, to_sglang_params

        request = entry.request
        longest = min(request.sampling.max_tokens, self._max_model_len - len(request.token_ids))
        altered = has_altered_distribution(request.sampling)
        answer = await self._answer(
            GenerateReqInput(
                rid=entry.rid,
                input_ids=request.token_ids.tolist(),
                sampling_params=to_sglang_params(request, longest, self._eos),
                return_logprob=True,
                logprob_start_len=-1,
                return_sampling_mask=altered,
                lora_path=None if request.adapter is None else self.adapters[request.adapter],
            )
        )
        return self._completion(request, altered, answer["output_ids"], answer["meta_info"])

    async def _answer(self, request: Any) -> dict[str, Any]:
        """The single answer to a request that does not stream."""
        (answer,) = [answer async for answer in self._manager.generate_request(request)]
        return answer  # type: ignore[no-any-return]

    def _completion(self, request: SampleRequest, altered: bool, ids: list[int], meta: dict[str, Any]) -> Completion:
        full = [logprob for logprob, *_ in meta.get("output_token_logprobs", ())]
        logprobs = full
        if altered:
            logprobs = meta.get("output_token_sampling_logprobs", [])
        elif request.sampling.temperature == 0:
            logprobs = [0.0] * len(full)
        check_logprobs(self._name, logprobs, full)
        if not len(ids) == len(full) == len(logprobs):
            raise EngineError(
                f"Engine {self._name!r}: SGLang answered with {len(ids)} tokens, {len(full)} log-probs and "
                f"{len(logprobs)} log-probs after sampling."
            )
        self.generated_tokens += len(ids)
        self.prompt_tokens += len(request.token_ids)
        self.cached_tokens += meta.get("cached_tokens", 0)
        spans = [VersionSpan(s["start"], s["end"], int(s["version"])) for s in meta.get("weight_versions", ())]
        end = meta["finish_reason"]
        matched = end.get("matched")
        return Completion(
            request_id=request.request_id,
            token_ids=to_token_array(ids),
            logprobs=to_logprob_array(logprobs),
            full_logprobs=to_logprob_array(full),
            stop_reason=end["type"],
            versions=[span for span in spans if span.stop > span.start],
            stop_text=token_text(self._tokenizer, matched) if isinstance(matched, int) else matched,
        )

    def _abort_once(self, entries: Iterable[_SGLangRequest]) -> None:
        """Requires `_scheduler`: while it scores sequences, SGLang's scheduler cannot see paused requests."""
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
        """Log-probs (nats, temperature 1) of all tokens but the first of each sequence, even while paused."""
        async with self._memory_changes, self._scheduler:
            self._lifecycle.check_serving(allow_freed_cache=True)
            borrows = bool(self._lifecycle.freed_among(["kv_cache"])) and not self._on_cpu
            if borrows:
                await self._change_memory("resume", {"kv_cache"})
            try:
                return list(await asyncio.gather(*(self._score(ids) for ids in token_ids)))
            finally:
                if borrows:  # until wake_up its room may be the learner's
                    await self._change_memory("release", {"kv_cache"})

    async def _score(self, ids: Sequence[int]) -> list[float]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        from skyrl_train.engines.sglang.scheduler import SCORE

        answer = await self._answer(
            GenerateReqInput(
                rid=f"{SCORE}{next(self._numbers)}.",
                input_ids=list(ids),
                sampling_params={"max_new_tokens": 0},
                return_logprob=True,
                logprob_start_len=0,
            )
        )
        if answer["meta_info"]["finish_reason"]["type"] == "abort":
            raise EngineError(f"Engine {self._name!r}: its cache has no room for the {len(ids)} tokens to score.")
        return [logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]]

    # -- pausing -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str) -> None:
        drained = self._lifecycle.pause(busy=mode == "wait" and self.running > 0)
        if mode == "abort":
            await self.abort(list(self._entries))
        elif drained.done():
            await self._pause_scheduler("retract" if mode == "retract" else "in_place")
        await await_thread_future(drained)

    async def resume(self) -> None:
        async with self._scheduler:
            self._lifecycle.resume()
            self._send_waiting()

    def _send_waiting(self) -> None:
        """After any change of state: unless halted, let the scheduler continue and send waiting requests."""
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
        """Pause SGLang's scheduler: on return, running requests take no more steps."""
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        async with self._scheduler:
            if self.running and (mode == "retract" or not self._scheduler_paused):
                self._scheduler_paused = True
                self._manager._dispatch_to_scheduler(PauseGenerationReqInput(mode=mode))
                await self._flush_scheduler(self.receiver.version)

    async def _flush_scheduler(self, version: int) -> None:
        """Set the served version, and wait until the scheduler has handled everything that was sent before."""
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        await self._manager.update_weight_version_communicator(UpdateWeightVersionReqInput(new_version=str(version)))

    # -- memory ------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int) -> int:
        """See InferenceEngine; returns the bytes freed."""
        async with self._memory_changes:
            freed = self._lifecycle.sleep(tags_freed_at_level(level), discards_weights=not self._on_cpu and level >= 2)
            await self.abort(list(self._entries))
            async with self._scheduler:
                if self._scheduler_paused:
                    self._continue_scheduler()
                if self._on_cpu or not freed:
                    return 0
                before = torch.cuda.mem_get_info()[0]
                await self._change_memory("release", freed)
                return torch.cuda.mem_get_info()[0] - before

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        async with self._memory_changes, self._scheduler:
            woken = self._lifecycle.freed_among(tags)
            if woken and not self._on_cpu:
                await self._change_memory("resume", woken)
            self._lifecycle.wake_up(woken)
            self._send_waiting()

    async def _change_memory(self, what: str, tags: Iterable[str]) -> None:
        """`what` is "release" or "resume"."""
        from sglang.srt.managers import io_struct

        for _ in range(2):  # SGLang cleans up in the step after a request's last one
            await self._flush_scheduler(self.receiver.version)
        request = getattr(io_struct, f"{what.title()}MemoryOccupationReqInput")(tags=sorted(tags))
        await getattr(self._manager, f"{what}_memory_occupation_communicator")(request)

    # -- weights and adapters ----------------------------------------------------------------------------------------

    async def pause_for_weights(self) -> None:
        """Pause before the first tensor of a weight sync: running requests stay where they are."""
        self._lifecycle.invalidate_weights()
        await self._pause_scheduler("in_place")

    async def activate_weights(self, version: int) -> None:
        """Continue after a weight sync; prompts cached before it are not found any more."""
        async with self._scheduler:
            await self._flush_scheduler(version)
            await self._manager.flush_cache()
            self._lifecycle.mark_weights_loaded()
            self._send_waiting()

    async def reset_prefix_cache(self) -> None:
        async with self._scheduler:
            await self._manager.flush_cache()

    async def load_adapter(self, name: str, path: str) -> None:
        from sglang.srt.managers.io_struct import LoadLoRAAdapterReqInput

        unique = f"{name}#{next(self._numbers)}"
        loaded = await self._manager.load_lora_adapter(LoadLoRAAdapterReqInput(lora_name=unique, lora_path=path))
        if not loaded.success:
            reason = loaded.error_message
            raise EngineError(f"Engine {self._name!r}: adapter {name!r} at {path} does not fit: {reason}")
        old = self.adapters.get(name)
        self.adapters[name] = unique
        if old is not None:
            self._begin(self._unload(old))

    async def unload_adapter(self, name: str) -> None:
        old = self.adapters.pop(name, None)
        if old is not None:
            await self._unload(old)

    async def _unload(self, unique: str) -> None:
        """Unload an adapter; waits for running requests that use it."""
        from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput

        await self._manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=unique))


def _empty_completion(request: SampleRequest) -> Completion:
    """The completion of a request that was aborted before it was sent to SGLang."""
    return Completion(request.request_id, to_token_array([]), to_logprob_array([]), to_logprob_array([]), "abort", [])
