"""vLLM as an engine: its scheduler and (with one rank) its model run in this process, on a thread that takes its steps.

With async scheduling (the default on accelerators) vLLM begins a step before it has the tokens of the one before.
What changes weights or caches, pauses or scores first takes in the steps under way: pausing means to take no steps, and
weights change at a known token of every request.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

import torch

from skyrl_train.data.token_arrays import Tokens, to_int_tuple
from skyrl_train.data.token_texts import token_text
from skyrl_train.engines.base import Completion, EngineHealth, SampleRequest
from skyrl_train.engines.lifecycle import MEMORY_TAGS, await_thread_future, tags_freed_at_level
from skyrl_train.engines.sampling_params import RequestValidator, check_unique_request_ids
from skyrl_train.engines.step_loop import DeviceMonitor, StepLoopEngine
from skyrl_train.errors import ConfigError, EngineError, UnsupportedParameter, WeightSyncError
from skyrl_train.models.stop_tokens import get_stop_tokens, load_stop_configs
from skyrl_train.report.profiling import peak_memory
from skyrl_train.weight_sync.protocol import Manifest
from skyrl_train.weight_sync.receiver import WeightReceiver

# vLLM reads these on import: run the scheduler in this process, no compilation on the first step, no usage reports.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# The model runner whose sampler can return both log-probs of a token: see sampler.BehaviourSampler.
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

try:
    import vllm
except ImportError as error:
    raise ConfigError(
        "generator.backend='vllm' needs vLLM: `uv run --extra vllm ...` on GPUs, `scripts/cpu_engines` on CPUs."
    ) from error
from vllm import EngineArgs, SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.inputs import tokens_input
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.request_queue import RequestQueue, create_request_queue
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.request import Request

from skyrl_train.engines.vllm.adapters import VLLMAdapters
from skyrl_train.engines.vllm.arguments import (
    configure_threads,
    create_engine,
    engine_arguments,
    sampling_params,
    vllm_capabilities,
)
from skyrl_train.engines.vllm.requests import SampledLogProbs, ScoreSink, VLLMCall, VLLMRequest

_RESPONSE_TIMEOUT_S = 30.0
"""Within this time its ranks say whether their devices compute, after a failure."""


class VLLMEngine(StepLoopEngine):
    """An InferenceEngine over vLLM. It owns a thread, and with several ranks processes, so it must be closed.

    Keys of the prompt cache are salted with the version of the weights: requests kept during a sync continue with their
    keys and values, but no other request can find keys and values of old weights.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        name: str = "vllm",
        threads: int | None = None,
        slot: int = 0,
        max_lora_rank: int = 0,
        **engine_args: Any,
    ):
        """`engine_args`: see arguments.engine_arguments. Adapters need `max_lora_rank` above 0.

        Raises ConfigError for arguments that vLLM refuses, and for a model that cannot be loaded.
        """
        super().__init__(name, max_num_seqs)
        self._on_cpu = device == "cpu"
        given = {"dtype": dtype, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len, **engine_args}
        arguments = engine_arguments(model, self._on_cpu, max_lora_rank, given)
        ranks = arguments["tensor_parallel_size"]
        self.capabilities = vllm_capabilities(name, ranks, max_lora_rank, arguments["nnodes"])
        if (stages := arguments.pop("pipeline_parallel_size", 1)) > 1:
            refusal = self.capabilities.refusals["pipeline_parallel_size"]
            raise ConfigError(f"generator.inference_engine_pipeline_parallel_size={stages}: {refusal}")
        configure_threads(threads, ranks // arguments["nnodes"], self._on_cpu)
        self.llm_engine = create_engine(arguments, name, self._on_cpu)
        self._core = self.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._adapters = VLLMAdapters(self.llm_engine, name)
        self.llm_engine.collective_rpc("prepare", args=(name, slot, self._adapters.synced_folder))
        compute = partial(self.llm_engine.collective_rpc, "check_device", timeout=_RESPONSE_TIMEOUT_S)
        self.device_monitor = DeviceMonitor(self.lifecycle, compute)
        self._core.set_weight_version("0")
        longest = self.llm_engine.model_config.max_model_len
        self.capabilities = replace(self.capabilities, max_model_len=longest)
        vocab_size = self.llm_engine.model_config.get_vocab_size()
        self._checks = RequestValidator(
            self.capabilities, vocab_size, longest, longest - 1
        )  # scoring samples one token more
        ends = get_stop_tokens(self.llm_engine.renderer.tokenizer, *load_stop_configs(model))
        self._stop_token_ids = [end for end in sorted(ends) if end < vocab_size]
        self._requests: dict[str, VLLMRequest] = {}
        self._waiting: list[VLLMRequest] = []
        """Requests not passed to vLLM yet, as they came while new requests had to wait."""
        self._version = 0
        self._cache_generation = 0
        """Incremented with every reset of the prompt cache."""
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        self._thread.start()
        # vLLM's kernels fail if OpenMP and torch have different numbers of threads: this call makes them agree.
        self._enqueue_command(torch.get_num_threads)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See InferenceEngine. Cancelling the call aborts its requests."""
        for request in requests:
            self._checks.check_request(request, self._adapters.loaded)
        if not requests:
            return []
        call = VLLMCall(requests, self._build)  # not between steps; what changes until it is admitted is seen there
        try:
            await self._run(lambda: self._submit(call.entries), during_steps=True)
            await await_thread_future(call.future)
        except asyncio.CancelledError:
            self._enqueue_command(
                lambda: self._abort([entry.id for entry in self._all_entries() if entry.call is call])
            )
            raise
        return [entry.completion(self.name, self._decode) for entry in call.entries]

    async def load_adapter(self, name: str, path: str) -> None:
        """See InferenceEngine. The adapter stays loaded when the base model's weights change."""
        self._checks.check_adapter(name)
        copied = await asyncio.to_thread(self._adapters.copy, name, path)
        await self._run(lambda: self._adapters.add(name, copied))

    async def unload_adapter(self, name: str) -> None:
        """Running requests finish with the adapter; a name that is not loaded is ignored."""

        def unload() -> None:
            self._adapters.remove(name)
            self._complete_calls()

        await self._run(unload)

    # -- state -------------------------------------------------------------------------------------------------------

    async def begin_weights(self, manifest: Manifest) -> None:
        """See InferenceEngine."""
        await super().begin_weights(manifest)
        self._adapters.sync_has_adapter = manifest.adapter is not None

    async def health(self) -> EngineHealth:
        """See InferenceEngine. It does not wait for a step or transfer. Raises EngineError once closed or dead."""
        running = len(self._core.scheduler.running)
        return self.lifecycle.health(
            self._version,
            running=running,
            queued=max(0, len(self._requests) - running) + len(self._waiting),
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prompt_tokens - self._cached_tokens,
            cached_tokens=self._cached_tokens,
            extra=peak_memory("cpu"),  # on an accelerator it always holds its whole share
        )

    # -- see SteppedEngine -------------------------------------------------------------------------------------------

    def _is_busy(self) -> bool:
        return bool(self._requests or self._core.batch_queue)

    def _has_work(self) -> bool:
        return bool(self._core.scheduler.has_unfinished_requests() or self._core.batch_queue)

    def _step(self) -> None:
        """Begin a step, unless the scheduler is paused, and take in the tokens of the oldest one under way."""
        self.llm_engine.step()
        self._complete_calls()

    def _finish_pending_steps(self) -> None:
        """Wait for the steps under way and take their tokens; no other begins."""
        if not self._core.batch_queue:
            return
        scheduler = self._core.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            self._run_guarded(self._step)
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def _retract(self) -> None:
        self._core.reset_prefix_cache(reset_running_requests=True)

    def _free_memory(self, level: int) -> int:
        if self._on_cpu:
            self.lifecycle.sleep(tags_freed_at_level(level))
            return 0
        before = self.llm_engine.collective_rpc("free_memory_bytes")  # to ask from here would take memory there
        # vLLM frees weights and cache at every level; at level 2 it keeps no copy of the weights.
        self.lifecycle.sleep(MEMORY_TAGS, discards_weights=level >= 2)
        self.llm_engine.sleep(level=level)
        return sum(self.llm_engine.collective_rpc("free_memory_bytes")) - sum(before)

    def _restore_memory(self, tags: Set[str]) -> list[str]:
        """Wake only sleeping tags, which it returns: vLLM wakes none at all if one of the tags is awake already."""
        asleep = sorted(tags & self._core.model_executor.sleeping_tags)
        if asleep:
            self.llm_engine.wake_up(asleep)
        return asleep

    def _activate_weights(self, version: int) -> None:
        self._serve_synced_adapter()
        self._version = version
        self._core.set_weight_version(str(version))
        self._reset_prefix_cache()

    def _shutdown(self) -> None:
        """End vLLM's processes; requests are aborted."""
        try:
            self._abort(None)
            self.llm_engine.collective_rpc("call_weight_receiver", args=(partial(WeightReceiver.close),))
        finally:
            self.llm_engine.engine_core.shutdown()
            self._adapters.close()

    # -- requests on the thread --------------------------------------------------------------------------------------

    def _all_entries(self) -> list[VLLMRequest]:
        return [*self._requests.values(), *self._waiting]

    def _submit(self, entries: Sequence[VLLMRequest]) -> None:
        self.lifecycle.check_serving()
        under_way = (entry.id for entry in self._all_entries())
        check_unique_request_ids(self.name, (entry.request for entry in entries), under_way)
        self._waiting.extend(entries)
        self._deadlines.add((entry.id, entry.request.deadline_s) for entry in entries)
        self._admit_waiting()

    def _admit_waiting(self) -> None:
        """Pass waiting requests to vLLM. Their weights and cache salt are those of now, not of their submission."""
        if not self.lifecycle.can_admit:
            return
        entries, self._waiting = self._waiting, []
        for entry in entries:
            if entry.call.future.done():  # with the error of another entry of its call
                self._deadlines.remove(entry.id)
                continue
            try:
                if entry.core_request.cache_salt != self._salt(self._lora(entry.request)):
                    entry.core_request = self._build(entry.request)
                self._add(entry.core_request, entry)
                self._requests[entry.id] = entry
            except Exception as error:
                self._reject_call(entry.call, error)

    def _build(self, request: SampleRequest) -> EngineCoreRequest:
        """The request as vLLM takes it, for the current weights and adapter. Raises UnsupportedParameter."""
        try:
            params, lora = sampling_params(request, self._stop_token_ids), self._lora(request)
            return self._core_request(request.request_id, request.token_ids, params, lora)
        except (ValueError, VLLMClientError) as error:
            what = f"Engine {self.name!r} cannot honour request {request.request_id!r}"
            raise UnsupportedParameter(f"{what}: {error}") from error

    def _lora(self, request: SampleRequest) -> LoRARequest | None:
        """Raises UnsupportedParameter if its adapter was unloaded while the request waited."""
        if request.adapter is None:
            return self._adapters.synced
        loaded = dict(self._adapters.loaded)  # the engine's thread may change it meanwhile
        self._checks.check_request(request, loaded)
        return loaded[request.adapter]

    def _core_request(
        self, request_id: str, ids: Sequence[int] | Tokens, params: SamplingParams, lora: LoRARequest | None = None
    ) -> EngineCoreRequest:
        return self.llm_engine.input_processor.process_inputs(
            request_id,
            tokens_input(list(to_int_tuple(ids)), cache_salt=self._salt(lora)),
            params,
            supported_tasks=self.llm_engine.get_supported_tasks(),
            lora_request=lora,
        )

    def _reject_call(self, call: VLLMCall, error: Exception) -> None:
        """Fail a call whose requests vLLM refused when they were to begin."""
        call.future.set_exception(self.lifecycle.as_engine_error(error))
        for entry in call.entries:
            self._deadlines.remove(entry.id)
        self.llm_engine.abort_request([entry.id for entry in call.entries])
        self._requests = {one: entry for one, entry in self._requests.items() if entry.call is not call}

    def _add(self, request: EngineCoreRequest, sink: VLLMRequest | ScoreSink) -> None:
        self.llm_engine.input_processor.assign_request_id(request)
        self.llm_engine.output_processor.add_request(request, None, queue=sink)  # type: ignore[arg-type]
        params, state = request.sampling_params, self.llm_engine.output_processor.request_states[request.request_id]
        if params is not None and params.prompt_logprobs is None:
            state.logprobs_processor = SampledLogProbs()
        if params is not None and params.stop and params.min_tokens:
            # vLLM searches for stop strings from token min_tokens + 1 on, the other engines from token min_tokens on.
            state.detokenizer.min_tokens -= 1
        self.llm_engine.engine_core.add_request(request)

    def _abort(self, request_ids: Sequence[str] | None) -> None:
        ids = {entry.id for entry in self._all_entries()} if request_ids is None else set(request_ids)
        unread = [entry for entry in self._waiting if entry.id in ids]
        self._waiting = [entry for entry in self._waiting if entry.id not in ids]
        self.llm_engine.abort_request([one for one in self._requests if one in ids])
        for entry in unread:
            entry.running_s = self._deadlines.remove(entry.id)
            entry.put_empty()
            entry.call.entry_done()
        self._complete_calls()

    def _complete_calls(self) -> None:
        """Complete the calls whose entries all have their output."""
        done = [entry for entry in self._requests.values() if entry.output is not None]
        for entry in done:
            del self._requests[entry.id]
            entry.running_s = self._deadlines.remove(entry.id)
            self._count(entry)
        self._adapters.forget_unused(entry.core_request.lora_request for entry in self._requests.values())
        for entry in done:  # last, so that callers see the current state of the engine
            entry.call.entry_done()

    def _fail(self, error: EngineError) -> None:
        """Drop all requests: their callers get `error`."""
        for entry in self._all_entries():
            self._deadlines.remove(entry.id)
            if not entry.call.future.done():
                entry.call.future.set_exception(error)
        self._waiting = []
        if self._core.batch_queue:
            self._core.batch_queue.clear()
        self._abort(None)

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        borrowed = self._restore_memory({"kv_cache"})
        scheduler = self._core.scheduler
        running, waiting = scheduler.running, scheduler.waiting
        scheduler.running, scheduler.waiting = [], create_request_queue(scheduler.policy)
        names = [f"score-{uuid4()}" for _ in token_ids]  # no request's id
        answers: dict[str, list[float]] = {}
        try:
            for name, ids in zip(names, token_ids, strict=True):
                params = SamplingParams(
                    max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )  # fmt: skip
                self._add(self._core_request(name, ids, params, self._adapters.synced), ScoreSink(answers))
            while len(answers) < len(token_ids):
                before = len(answers)
                self.llm_engine.step()
                if len(answers) == before and not scheduler.running:
                    self._preempt_for_score(running, waiting)
        finally:
            self.llm_engine.abort_request(names)
            self._finish_pending_steps()
            scheduler.running, scheduler.waiting = [*running, *scheduler.running], waiting
            if borrowed:  # until wake_up its room may be the learner's
                self._reset_prefix_cache()
                self._core.model_executor.discard(tuple(borrowed))
        return [answers[name] for name in names]

    def _preempt_for_score(self, running: list[Request], waiting: RequestQueue) -> None:
        """Put the last of the requests that a score set aside into the queue; its tokens are prefilled again later.

        Raises EngineError if there is none.
        """
        if not running:
            raise EngineError(f"Engine {self.name!r}: its cache is too small to score; raise gpu_memory_utilization.")
        request, scheduler = running.pop(), self._core.scheduler
        scores, scheduler.waiting = scheduler.waiting, waiting
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.waiting = scores
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self._update_cache_salt(request)

    def _call_receiver(self, step: partial[None]) -> None:
        try:
            answers = self.llm_engine.collective_rpc("call_weight_receiver", args=(step,))
        except Exception as error:  # of a rank's process
            self.lifecycle.invalidate_weights()
            self.device_monitor.check()
            what = f"{step.func.__name__} failed: {type(error).__name__}"
            raise EngineError(f"Engine {self.name!r}: {what}: {error}") from error
        if any(torn for _, torn in answers):
            self.lifecycle.invalidate_weights()
        for problem, _ in answers:
            if problem is not None:
                raise WeightSyncError(problem)

    def _serve_synced_adapter(self) -> None:
        """Running requests can continue with a replaced adapter, but cannot begin to use one or cease to."""
        if (self._adapters.synced is not None) != self._adapters.sync_has_adapter:
            self._abort([entry.id for entry in self._requests.values() if entry.request.adapter is None])
        try:
            self._adapters.serve_synced()
        except EngineError as error:
            self.lifecycle.invalidate_weights()
            raise WeightSyncError(str(error)) from error

    def _reset_prefix_cache(self) -> None:
        self._cache_generation += 1
        self._core.reset_prefix_cache()  # frees the blocks if nothing runs; in any case the salt hides old entries
        for request in self._core.scheduler.waiting:  # passed to vLLM, but not prefilled yet, or to be prefilled again
            self._update_cache_salt(request)

    def _update_cache_salt(self, request: Request) -> None:
        request.cache_salt = self._salt(request.lora_request)
        request.block_hashes.clear()
        request.update_block_hashes()

    def _salt(self, lora: LoRARequest | None) -> str:
        """The cache salt: a part of the keys of the prompt cache."""
        return f"{self._version}.{self._cache_generation}.{lora.lora_int_id if lora else 0}"

    def _decode(self, token: int) -> str | None:
        tokenizer = self.llm_engine.renderer.tokenizer
        return None if tokenizer is None else token_text(tokenizer, token)

    def _count(self, entry: VLLMRequest) -> None:
        assert entry.output is not None
        self._generated_tokens += len(entry.output.outputs[0].token_ids)
        self._prompt_tokens += len(entry.request.token_ids)
        self._cached_tokens += entry.output.num_cached_tokens or 0


class VLLMWorkerNode:
    """The ranks of a VLLMEngine on a further node, like `vllm serve --headless`: its first node's scheduler leads them.

    They wait for it for as long as it may think, so whoever starts this ends it together with the engine.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "cpu",
        name: str = "vllm",
        threads: int | None = None,
        slot: int = 0,
        max_lora_rank: int = 0,
        max_model_len: int | None = None,
        **engine_args: Any,
    ):
        """Takes what VLLMEngine takes, which must be the same on all nodes but for `node_rank` (1 to nnodes - 1).

        Blocks until the ranks of all nodes have loaded the model. Raises ConfigError for what vLLM refuses.
        """
        on_cpu = device == "cpu"
        arguments = engine_arguments(model, on_cpu, max_lora_rank, {"max_model_len": max_model_len, **engine_args})
        ranks = arguments["tensor_parallel_size"]
        self.capabilities = vllm_capabilities(name, ranks, max_lora_rank)
        configure_threads(threads, ranks // arguments["nnodes"], on_cpu)
        try:
            config = EngineArgs(**arguments).create_engine_config(headless=True)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"Engine {name!r}: vLLM {vllm.__version__} refuses to start: {error}") from error
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    async def wait_until_exit(self) -> None:
        """Returns once one of the ranks has ended, and has ended the others."""
        await asyncio.to_thread(self._executor.start_worker_monitor, inline=True)
