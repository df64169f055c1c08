"""The vLLM engine. vLLM's scheduler, and its model if there is one rank, run in this process on the engine's thread.

With async scheduling (the default on accelerators) vLLM starts a step before it has the tokens of the previous step.
Commands that change weights or caches, pause or score first finish all pending steps. A paused engine takes no steps,
and weights change at a known token of every request.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import ChainMap
from collections.abc import Iterable, Sequence, Set
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn
from uuid import uuid4

import numpy as np
import torch

from skyrl_train.cluster.child_process import StartAgainError, is_child_process
from skyrl_train.data.token_arrays import Tokens, to_int_tuple, to_token_array
from skyrl_train.data.token_texts import token_text
from skyrl_train.engines.base import Completion, EngineHealth, SampleRequest, SamplingParams as RequestSamplingParams
from skyrl_train.engines.lifecycle import MEMORY_TAGS, MemoryTag, tags_freed_at_level
from skyrl_train.engines.sampling_params import RequestValidator, check_unique_request_ids
from skyrl_train.engines.startup import StartupTimer
from skyrl_train.engines.step_loop import DeviceMonitor, StepLoopEngine
from skyrl_train.errors import ConfigError, EngineError, SkyRLError, UnsupportedParameter, WeightSyncError
from skyrl_train.models.stop_tokens import get_stop_tokens, load_stop_configs
from skyrl_train.report.profiling import peak_memory
from skyrl_train.weight_sync.protocol import Manifest
from skyrl_train.weight_sync.receiver import WeightReceiver

# vLLM reads these variables on import. Run the scheduler in this process:
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
# Fork no ranks: they would keep this process's connections open, and OpenMP hangs in a fork of a process that used it.
os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

try:
    import vllm
except ImportError as error:
    raise ConfigError(
        "generator.backend='vllm' requires vLLM, which cannot be imported. Install it with `uv run --extra vllm ...` "
        "on GPUs or `scripts/cpu_engines` on CPUs."
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
    GRAMMAR_BACKEND,
    configure_threads,
    create_engine,
    engine_arguments,
    sampling_params,
    vllm_capabilities,
)
from skyrl_train.engines.vllm.model_runner import VARIABLE as MODEL_RUNNER_VARIABLE, select_model_runner
from skyrl_train.engines.vllm.requests import SampledLogProbs, ScoreSink, VLLMCall, VLLMRequest, resolve_calls

log = logging.getLogger(__name__)

_CHECKED_TOKENS = 8
"""Number of tokens that the check of the V2 model runner samples at the start."""
_CHECK_TOLERANCES = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.2}
"""Largest mean difference of log-probs (nats) from scored ones in that check, by data type of the weights."""
_MAX_FORBIDDEN_TOKENS = 128
"""Number of stop tokens that vLLM's V2 model runner can forbid until a response has `min_tokens`."""
_RESPONSE_TIMEOUT_S = 30.0
"""Limit for the ranks' answer to the device check that follows a failure."""


class VLLMEngine(StepLoopEngine):
    """An InferenceEngine that runs vLLM. Callers must close it, because it owns a thread and the ranks' processes.

    The keys of the prefix cache are salted with the weight version. Requests that continue across a weight sync keep
    their keys and values, but no new request finds keys and values of old weights.
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
        """Start vLLM, its ranks included, and the engine's thread. This blocks until the model is loaded.

        Args:
            model: Folder or hub name of the model.
            dtype: Data type of the weights.
            device: "cpu", or an accelerator.
            max_num_seqs: Maximum number of requests that run at a time.
            max_model_len: Maximum length of a prompt with its response, in tokens; None for the model's own limit.
            name: The engine's name in errors and metrics.
            threads: CPU threads of this process, set for all of torch; None leaves the setting alone.
            slot: Placement slot of the engine's first rank, for weight syncs in colocated runs.
            max_lora_rank: Largest rank of LoRA adapters; 0 turns LoRA off.
            engine_args: Further arguments; see `arguments.engine_arguments`.

        Raises:
            ConfigError: vLLM rejects the arguments, or the model cannot be loaded or served.
        """
        super().__init__(name, max_num_seqs)
        startup = StartupTimer()
        self._on_cpu = device == "cpu"
        engine_args |= {"dtype": dtype, "max_num_seqs": max_num_seqs, "max_model_len": max_model_len}
        arguments = engine_arguments(model, self._on_cpu, max_lora_rank, engine_args)
        ranks = arguments["tensor_parallel_size"]
        self.capabilities = vllm_capabilities(name, ranks, max_lora_rank, arguments["nnodes"])
        if (stages := arguments.pop("pipeline_parallel_size", 1)) > 1:
            reason = self.capabilities.refusals["pipeline_parallel_size"]
            raise ConfigError(f"generator.inference_engine_pipeline_parallel_size={stages} is not supported: {reason}")
        configure_threads(threads, ranks // arguments["nnodes"], self._on_cpu)
        self._launch(arguments, slot)
        for phase in self.llm_engine.collective_rpc("get_startup_phases")[0]:
            startup.record(*phase)
        max_len = self.llm_engine.model_config.max_model_len
        self.capabilities = replace(self.capabilities, max_model_len=max_len)
        vocab_size = self.llm_engine.model_config.get_vocab_size()
        # Scoring samples one additional token.
        self._checks = RequestValidator(self.capabilities, vocab_size, max_len, max_len - 1)
        stop_tokens = get_stop_tokens(self.llm_engine.renderer.tokenizer, *load_stop_configs(model))
        self._stop_token_ids = [token for token in sorted(stop_tokens) if token < vocab_size]
        self._requests: dict[str, VLLMRequest] = {}
        self._waiting: dict[str, VLLMRequest] = {}
        """Requests that vLLM does not have yet, because they arrived while the engine could not admit requests."""
        self._version = 0
        self._cache_generation = 0
        """Number of resets of the prefix cache."""
        self._generated_tokens = self._prompt_tokens = self._cached_tokens = 0
        self._draft_steps = self._accepted_drafts = 0
        if self._uses_v2 and (problem := self._find_sampler_problem(dtype)):
            self._refuse_v2(arguments, problem)
        self._draft_steps = self._accepted_drafts = 0  # without those of the check
        self.startup_phases = startup.finish()
        self._thread.start()
        # vLLM's kernels fail if OpenMP and torch use different numbers of threads. This call synchronizes them.
        self._enqueue_command(torch.get_num_threads)
        self._enqueue_command(partial(self.llm_engine.collective_rpc, "use_main_stream"))

    def _launch(self, arguments: dict[str, Any], slot: int) -> None:
        """Start vLLM and its ranks."""
        self.llm_engine = create_engine(arguments, self.name, self._on_cpu)
        self._core = self.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
        self._uses_v2: bool = self.llm_engine.vllm_config.use_v2_model_runner
        self._speculative_config = self.llm_engine.vllm_config.speculative_config
        self._core.scheduler.make_spec_decoding_stats = self._count_drafts
        log.info("Engine %r uses vLLM's %s model runner", self.name, "V2" if self._uses_v2 else "V1")
        self._adapters = VLLMAdapters(self.llm_engine, self.name)
        self.llm_engine.collective_rpc("prepare", args=(self.name, slot, self._adapters.synced_folder))
        check_ranks = partial(self.llm_engine.collective_rpc, "check_device", timeout=_RESPONSE_TIMEOUT_S)
        self.device_monitor = DeviceMonitor(self.lifecycle, check_ranks)
        self._core.set_weight_version("0")

    def _find_sampler_problem(self, dtype: str) -> str | None:
        """Sample and score a few tokens. Return the error, or the difference of log-probs if it is above rounding."""
        prompt = [min(token, self._checks.vocab_size - 1) for token in (1, 2, 3)]
        count = min(_CHECKED_TOKENS, self._checks.max_model_len - len(prompt) - 1)
        if count < 1:
            return None
        sampling = RequestSamplingParams(max_tokens=count, ignore_eos=True)
        request = SampleRequest(f"check-{uuid4()}", to_token_array(prompt), sampling, seed=0)
        (entry,) = VLLMCall([request], self._build).entries
        try:
            self._add(entry.core_request, entry)
            while entry.output is None:
                self.llm_engine.step()
            self._finish_pending_steps()
            completion = entry.completion(self.name, self._decode)
            (scores,) = self._score([[*prompt, *completion.token_ids.tolist()]], 1.0)
        except EngineError as error:  # The log-probs are not finite.
            return str(error)
        except Exception as error:  # Kernels and their compiler raise many types.
            log.warning("Sampling fails with vLLM's V2 model runner", exc_info=True)
            return f"sampling fails with {type(error).__name__}: {error}"
        self._core.reset_prefix_cache()
        expected = np.array(scores[len(prompt) - 1 :])
        difference = max(
            float(np.abs(actual - expected).mean()) for actual in (completion.logprobs, completion.full_logprobs)
        )
        tolerance = _CHECK_TOLERANCES.get(dtype, _CHECK_TOLERANCES["bfloat16"])
        if difference <= tolerance:
            return None
        return f"log-probs of sampled tokens differ from scored ones by {difference:.2g} on average, above {tolerance}"

    def _refuse_v2(self, arguments: dict[str, Any], problem: str) -> NoReturn:
        """Fail the start, in a child process of an actor so that the next one uses the V1 model runner.

        Raises:
            StartAgainError: V1 serves the same, and this process can be replaced.
            ConfigError: The user has to decide.
        """
        found = f"Engine {self.name!r}: {problem} with vLLM's V2 model runner"
        needs_v2 = arguments.get("enable_return_routed_experts") or self._speculative_config is not None
        with suppress(Exception):  # A failed device must not hide the problem.
            self.llm_engine.engine_core.shutdown()
        self._adapters.close()
        if is_child_process() and not needs_v2 and arguments["nnodes"] == 1:
            log.warning("%s; starting again with V1", found)
            raise StartAgainError(found, {MODEL_RUNNER_VARIABLE: "0"})
        raise ConfigError(
            f"{found}. Set {MODEL_RUNNER_VARIABLE}=0 to use V1, which supports neither routing replay nor speculative "
            "decoding."
        )

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample a completion for each request and return them in request order.

        Cancelling the call aborts its requests.

        Raises:
            UnsupportedParameter: The engine does not support a parameter of a request, or a request is too long.
            EngineError: The engine is partially loaded, asleep, broken or closed, or the logits of a request were not
                finite.
        """
        for request in requests:
            self._checks.check_request(request, self._adapters.loaded)
        if not requests:
            return []
        if any(request.json_schema is not None for request in requests):
            await self._run(self._prepare_grammars, during_steps=True)
        # Requests are built here to save time between steps. `_admit_waiting` rebuilds those whose salt has changed.
        call = VLLMCall(requests, self._build)
        ended = call.future()
        try:
            submitted = self._enqueue_command(lambda: self._submit(call))
            submitted.add_done_callback(partial(self._check_submitted, call))
            await ended
        except asyncio.CancelledError:
            self._enqueue_command(
                lambda: self._abort([entry.id for entry in self._all_entries() if entry.call is call])
            )
            raise
        return [entry.completion(self.name, self._decode) for entry in call.entries]

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, replacing an adapter of the same name. It stays loaded when the base weights change.

        Args:
            name: Name of the adapter, which requests use.
            path: Folder that peft's `save_pretrained` wrote.

        Raises:
            UnsupportedParameter: The engine was started without LoRA.
            EngineError: The adapter does not fit the model, or the engine is broken or closed.
        """
        self._checks.check_adapter(name)
        folder = await asyncio.to_thread(self._adapters.copy, name, path)
        await self._run(lambda: self._adapters.add(name, folder))

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Running requests finish with it. A name that is not loaded is ignored."""

        def unload() -> None:
            self._adapters.remove(name)
            self._complete_calls()

        await self._run(unload)

    # -- state -------------------------------------------------------------------------------------------------------

    async def begin_weights(self, manifest: Manifest) -> None:
        """Start a weight sync on every rank, and record whether it sends an adapter.

        The engine still serves the old weights.

        Raises:
            WeightSyncError: The manifest does not fit the model, or sends only changed tensors to a model that is not
                complete.
            EngineError: The engine sleeps without its weights, or is broken or closed.
        """
        await super().begin_weights(manifest)
        self._adapters.sync_has_adapter = manifest.adapter is not None

    async def health(self) -> EngineHealth:
        """Return the engine's state and counters, without waiting for a running step or weight transfer.

        Raises:
            EngineError: The engine is closed or its device is lost.
        """
        running = len(self._core.scheduler.running)
        return self.lifecycle.health(
            self._version,
            running=running,
            queued=max(0, len(self._requests) - running) + len(self._waiting),
            generated_tokens=self._generated_tokens,
            prefilled_tokens=self._prompt_tokens - self._cached_tokens,
            cached_tokens=self._cached_tokens,
            draft_steps=self._draft_steps,
            accepted_drafts=self._accepted_drafts,
            extra=peak_memory("cpu"),  # On an accelerator vLLM always allocates its full share.
        )

    # -- implementation of StepLoopEngine ----------------------------------------------------------------------------

    def _is_busy(self) -> bool:
        return bool(self._requests or self._core.batch_queue)

    def _has_work(self) -> bool:
        return bool(self._core.scheduler.has_unfinished_requests() or self._core.batch_queue)

    def _step(self) -> None:
        """Start a step, unless the scheduler is paused, and process the tokens of the oldest pending step."""
        self.llm_engine.step()
        self._complete_calls()

    def _finish_pending_steps(self) -> None:
        """Wait for all pending steps and process their tokens, without starting another step."""
        if not self._core.batch_queue:
            return
        scheduler = self._core.scheduler
        scheduler.set_pause_state(PauseState.PAUSED_ALL)
        while self._core.batch_queue:
            self._run_guarded(self._step)
        scheduler.set_pause_state(PauseState.UNPAUSED)

    def _partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        states = self.llm_engine.output_processor.request_states
        entries = [self._requests[request_id] for request_id in request_ids if request_id in self._requests]
        found = {entry.id: states.get(entry.core_request.request_id) for entry in entries}
        tokens = {id: state.detokenizer.output_token_ids for id, state in found.items() if state and state.detokenizer}
        return {request_id: to_token_array(ids) for request_id, ids in tokens.items() if ids}

    def _retract(self) -> None:
        self._core.reset_prefix_cache(reset_running_requests=True)

    def _free_memory(self, level: int, keep_weights: bool) -> int:
        if self._on_cpu:
            self.lifecycle.sleep(tags_freed_at_level(1 if keep_weights else level))
            return 0
        # The ranks measure this: a CUDA context of this process would itself take memory.
        before = self.llm_engine.collective_rpc("free_memory_bytes")
        if keep_weights:
            self._free_cache()
            return sum(self.llm_engine.collective_rpc("free_memory_bytes")) - sum(before)
        # vLLM frees weights and cache at every level. At level 2 it keeps no copy of the weights.
        if level >= 2 and self._has_draft_weights:  # No sync sends them again, so vLLM must keep a copy.
            level = 1
        self.lifecycle.sleep(MEMORY_TAGS, discards_weights=level >= 2)
        self.llm_engine.sleep(level=level)
        return sum(self.llm_engine.collective_rpc("free_memory_bytes")) - sum(before)

    def _free_cache(self) -> None:
        """Free the KV cache, also while the weights are freed. vLLM's own method requires that both are allocated."""
        self.lifecycle.sleep({MemoryTag.KV_CACHE})
        self.llm_engine.sleep(level=0)  # pauses the scheduler; `wake_up` of the cache continues it
        self._reset_prefix_cache()
        self._core.model_executor.discard((MemoryTag.KV_CACHE.value,))

    def _restore_memory(self, tags: Set[str]) -> list[str]:
        """Wake the tags that are asleep and return them. vLLM wakes none at all if one of them is awake already."""
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
        """Abort all requests and end vLLM's processes."""
        try:
            self._abort(None)
            self.llm_engine.collective_rpc("call_weight_receiver", args=(partial(WeightReceiver.close),))
        finally:
            self.llm_engine.engine_core.shutdown()
            self._adapters.close()

    # -- requests on the thread --------------------------------------------------------------------------------------

    def _all_entries(self) -> list[VLLMRequest]:
        return [*self._requests.values(), *self._waiting.values()]

    def _prepare_grammars(self) -> None:
        manager, config = self._core.structured_output_manager, self._core.vllm_config
        if manager.backend is None and config.structured_outputs_config.backend == GRAMMAR_BACKEND:
            from skyrl_train.engines.vllm.grammars import create_grammar_backend

            tokenizer, size = self.llm_engine.renderer.tokenizer, self._checks.vocab_size
            manager.backend = create_grammar_backend(self.name, config, tokenizer, size, self._stop_token_ids)

    def _submit(self, call: VLLMCall) -> None:
        try:
            self.lifecycle.check_serving()
            active = ChainMap(self._requests, self._waiting)
            check_unique_request_ids(self.name, (entry.request for entry in call.entries), active)
        except SkyRLError as error:
            self._fail_calls([call], error)
            return
        self._waiting.update((entry.id, entry) for entry in call.entries)
        self._deadlines.add((entry.id, entry.request.deadline_s) for entry in call.entries)
        self._admit_waiting()

    def _check_submitted(self, call: VLLMCall, submitted: Future[None]) -> None:
        """Fail a call that was not submitted: the engine is closed, or something unexpected happened."""
        if submitted.cancelled():
            self._fail_calls([call], self.lifecycle.end_error)
        elif isinstance(error := submitted.exception(), Exception):
            self._fail_calls([call], self.lifecycle.as_engine_error(error))

    def _fail_calls(self, calls: Iterable[VLLMCall], error: Exception) -> None:
        resolve_calls([call for call in calls if call.fail(error)])

    def _admit_waiting(self) -> None:
        """Pass waiting requests to vLLM, with the current adapters and cache salt instead of those at submission."""
        if not self.lifecycle.can_admit:
            return
        waiting, self._waiting = self._waiting, {}
        for entry in waiting.values():
            if entry.call.is_done:  # Another entry of the call has failed.
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
        """Convert a request to vLLM's form, for the current weights and adapter.

        Raises:
            UnsupportedParameter: vLLM rejects the request, or its adapter is no longer loaded.
        """
        try:
            params = sampling_params(request, self._stop_token_ids, drafts=self._speculative_config is not None)
            lora = self._lora(request)
            built = self._core_request(request.request_id, request.token_ids, params, lora)
        except (ValueError, VLLMClientError) as error:
            raise UnsupportedParameter(
                f"Engine {self.name!r} rejects request {request.request_id!r}: {error}"
            ) from error
        assert built.sampling_params is not None
        count = len(built.sampling_params.all_stop_token_ids)
        if self._uses_v2 and request.sampling.min_tokens and count > _MAX_FORBIDDEN_TOKENS:
            raise UnsupportedParameter(
                f"Engine {self.name!r} rejects request {request.request_id!r}: with min_tokens, vLLM's V2 model runner "
                f"supports {_MAX_FORBIDDEN_TOKENS} stop tokens, got {count}. Set VLLM_USE_V2_MODEL_RUNNER=0."
            )
        return built

    def _lora(self, request: SampleRequest) -> LoRARequest | None:
        """Return the adapter of a request.

        Raises:
            UnsupportedParameter: The adapter was unloaded while the request waited.
        """
        if request.adapter is None:
            return self._adapters.synced
        loaded = dict(self._adapters.loaded)  # The engine's thread may change it concurrently.
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
        """Fail a call because vLLM rejected one of its requests, and abort the others."""
        self._fail_calls([call], self.lifecycle.as_engine_error(error))
        for entry in call.entries:
            self._deadlines.remove(entry.id)
        self.llm_engine.abort_request([entry.id for entry in call.entries])
        self._requests = {request_id: entry for request_id, entry in self._requests.items() if entry.call is not call}

    def _add(self, request: EngineCoreRequest, sink: VLLMRequest | ScoreSink) -> None:
        self.llm_engine.input_processor.assign_request_id(request)
        self.llm_engine.output_processor.add_request(request, None, queue=sink)  # type: ignore[arg-type]
        params, state = request.sampling_params, self.llm_engine.output_processor.request_states[request.request_id]
        if params is not None and params.prompt_logprobs is None:
            state.logprobs_processor = SampledLogProbs(
                sink.request.top_logprobs if isinstance(sink, VLLMRequest) else 0
            )
        if params is not None and params.stop and params.min_tokens:
            # vLLM looks for stop strings from token min_tokens + 1 on, the other engines from token min_tokens on.
            state.detokenizer.min_tokens -= 1
        self.llm_engine.engine_core.add_request(request)

    def _abort(self, request_ids: Sequence[str] | None) -> None:
        ids = {entry.id for entry in self._all_entries()} if request_ids is None else set(request_ids)
        not_admitted = [self._waiting.pop(request_id) for request_id in list(self._waiting) if request_id in ids]
        self.llm_engine.abort_request([request_id for request_id in self._requests if request_id in ids])
        for entry in not_admitted:
            entry.running_s = self._deadlines.remove(entry.id)
            entry.put_empty()
        resolve_calls([entry.call for entry in not_admitted if entry.call.entry_done()])
        self._complete_calls()

    def _complete_calls(self) -> None:
        """Remove the requests that have their output, and complete calls without remaining requests."""
        done = [entry for entry in self._requests.values() if entry.output is not None]
        for entry in done:
            del self._requests[entry.id]
            entry.running_s = self._deadlines.remove(entry.id)
            self._count(entry)
        self._adapters.forget_unused(entry.core_request.lora_request for entry in self._requests.values())
        # This comes last, so that callers see the engine's current state.
        resolve_calls([entry.call for entry in done if entry.call.entry_done()])

    def _fail(self, error: EngineError) -> None:
        for entry in self._all_entries():
            self._deadlines.remove(entry.id)
        self._fail_calls((entry.call for entry in self._all_entries()), error)
        self._waiting = {}
        if self._core.batch_queue:
            self._core.batch_queue.clear()
        self._abort(None)

    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        restored = self._restore_memory({"kv_cache"})
        scheduler = self._core.scheduler
        running, waiting, max_running = scheduler.running, scheduler.waiting, scheduler.max_num_running_reqs
        scheduler.running, scheduler.waiting = [], create_request_queue(scheduler.policy)
        if self._uses_v2:  # Its ranks keep a slot for every request that runs, in a step or not.
            if len(running) == max_running:
                self._preempt_for_score(running, waiting)
            scheduler.max_num_running_reqs = max_running - len(running)
        score_ids = [f"score-{uuid4()}" for _ in token_ids]  # They differ from the ids of all requests.
        results: dict[str, list[float]] = {}
        try:
            for score_id, ids in zip(score_ids, token_ids, strict=True):
                params = SamplingParams(
                    max_tokens=1, temperature=0, prompt_logprobs=0, flat_logprobs=True, detokenize=False,
                    output_kind=RequestOutputKind.FINAL_ONLY,
                )  # fmt: skip
                self._add(self._core_request(score_id, ids, params, self._adapters.synced), ScoreSink(results))
            while len(results) < len(token_ids):
                before = len(results)
                self.llm_engine.step()
                if len(results) == before and not scheduler.running:
                    self._preempt_for_score(running, waiting)
        finally:
            self.llm_engine.abort_request(score_ids)
            self._finish_pending_steps()
            scheduler.running, scheduler.waiting = [*running, *scheduler.running], waiting
            scheduler.max_num_running_reqs = max_running
            if restored:  # Until `wake_up` the learner may use this memory.
                self._reset_prefix_cache()
                self._core.model_executor.discard(tuple(restored))
        return [results[score_id] for score_id in score_ids]

    def _preempt_for_score(self, running: list[Request], waiting: RequestQueue) -> None:
        """Free cache blocks for scoring: move the last running request to the queue, where it is prefilled again later.

        Args:
            running: The requests that were running before the score.
            waiting: The queue before the score.

        Raises:
            EngineError: No request is running, so the cache is too small for the scored sequence.
        """
        if not running:
            raise EngineError(
                f"Engine {self.name!r}: its KV cache is too small to score this sequence. Raise gpu_memory_utilization."
            )
        request, scheduler = running.pop(), self._core.scheduler
        score_queue, scheduler.waiting = scheduler.waiting, waiting
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=True)
        scheduler.waiting = score_queue
        scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        self._update_cache_salt(request)

    def _call_receiver(self, step: partial[None]) -> None:
        try:
            results = self.llm_engine.collective_rpc("call_weight_receiver", args=(step,))
        except Exception as error:  # A rank's process has failed.
            self.lifecycle.invalidate_weights()
            self.device_monitor.check()
            problem = f"{step.func.__name__} failed: {type(error).__name__}"
            raise EngineError(f"Engine {self.name!r}: {problem}: {error}") from error
        if any(is_partially_loaded for _, is_partially_loaded in results):
            self.lifecycle.invalidate_weights()
        for problem, _ in results:
            if problem is not None:
                raise WeightSyncError(problem)

    def _serve_synced_adapter(self) -> None:
        # A running request can continue with a replaced adapter, but it cannot start or stop using one.
        if (self._adapters.synced is not None) != self._adapters.sync_has_adapter:
            self._abort([entry.id for entry in self._requests.values() if entry.request.adapter is None])
        try:
            self._adapters.serve_synced()
        except EngineError as error:
            self.lifecycle.invalidate_weights()
            raise WeightSyncError(str(error)) from error

    def _reset_prefix_cache(self) -> None:
        self._cache_generation += 1
        self._core.reset_prefix_cache()  # This frees blocks only if no request runs. The salt always hides old entries.
        for request in self._core.scheduler.waiting:  # vLLM has these requests but will still prefill them.
            self._update_cache_salt(request)

    def _update_cache_salt(self, request: Request) -> None:
        request.cache_salt = self._salt(request.lora_request)
        request.block_hashes.clear()
        request.update_block_hashes()

    def _salt(self, lora: LoRARequest | None) -> str:
        """Return the cache salt, which is part of the keys of the prefix cache."""
        return f"{self._version}.{self._cache_generation}.{lora.lora_int_id if lora else 0}"

    @property
    def _has_draft_weights(self) -> bool:
        speculative = self._speculative_config
        return speculative is not None and not speculative.use_ngram()

    def _count_drafts(self, stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **details: Any) -> Any:
        """Count the accepted drafts of a request in a step. vLLM's scheduler calls this."""
        self._draft_steps += 1
        self._accepted_drafts += num_accepted_tokens
        return stats

    def _decode(self, token: int) -> str | None:
        tokenizer = self.llm_engine.renderer.tokenizer
        return None if tokenizer is None else token_text(tokenizer, token)

    def _count(self, entry: VLLMRequest) -> None:
        assert entry.output is not None
        self._generated_tokens += len(entry.output.outputs[0].token_ids)
        self._prompt_tokens += len(entry.request.token_ids)
        self._cached_tokens += entry.output.num_cached_tokens or 0


class VLLMWorkerNode:
    """The ranks of a VLLMEngine on an additional node, like `vllm serve --headless`.

    The scheduler on the engine's first node drives them. They wait for it without a limit, so the owner must end them
    together with the engine.
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
        """Start the ranks of this node. This blocks until the ranks of all nodes have loaded the model.

        The arguments are those of VLLMEngine and must be the same on all nodes, except for `node_rank` in
        `engine_args` (1 to nnodes - 1).

        Raises:
            ConfigError: vLLM rejects the arguments.
        """
        on_cpu = device == "cpu"
        arguments = engine_arguments(model, on_cpu, max_lora_rank, {"max_model_len": max_model_len, **engine_args})
        ranks = arguments["tensor_parallel_size"]
        self.capabilities = vllm_capabilities(name, ranks, max_lora_rank)
        configure_threads(threads, ranks // arguments["nnodes"], on_cpu)
        select_model_runner(arguments, on_cpu)
        try:
            config = EngineArgs(**arguments).create_engine_config(headless=True)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise ConfigError(f"Engine {name!r}: vLLM {vllm.__version__} cannot start: {error}") from error
        self._executor = MultiprocExecutor(config, monitor_workers=False)

    async def wait_until_exit(self) -> None:
        """Wait until a rank of this node exits, then end the other ranks."""
        await asyncio.to_thread(self._executor.start_worker_monitor, inline=True)
