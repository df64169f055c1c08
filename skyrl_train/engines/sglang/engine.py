"""The SGLang engine. SGLang's scheduler and model run in processes, and its front end on a thread of this process.

- engine.py        asynchronous interface; validates requests, never blocks the event loop
- processes.py     starts and ends the thread and the processes
- arguments.py     start arguments, and models that SGLang cannot serve
- requests.py      on that thread: requests, pausing, sleeping
- weight_store.py  loads full tensors into SGLang's model
- scheduler.py     in SGLang's process: aborts and scores while paused, prefix cache
- sampler.py       in SGLang's process: sampling and stopping, the same as in the transformers engine
- stubs/           packages that SGLang imports on a CPU and does not need there
"""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from skyrl_train.aio import mark_exception_retrieved
from skyrl_train.data.token_arrays import Tokens
from skyrl_train.engines.base import (
    MAX_TOP_LOGPROBS,
    PAUSE_MODES,
    SAMPLING_PARAM_NAMES,
    Capabilities,
    Completion,
    EngineHealth,
    SampleRequest,
)
from skyrl_train.engines.json_constraint import MISSING, JsonGrammars, is_available
from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.engines.sampling_params import RequestValidator
from skyrl_train.engines.sglang.arguments import engine_arguments
from skyrl_train.engines.sglang.processes import SGLangProcesses
from skyrl_train.engines.sglang.requests import RequestManager
from skyrl_train.engines.sglang.weight_store import SGLangWeightStore, check_names
from skyrl_train.engines.startup import StartupTimer
from skyrl_train.engines.step_loop import DeviceMonitor, check_device, poll_device_error
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.models.loading import load_config, load_meta_model_as_served, load_tokenizer
from skyrl_train.models.stop_tokens import get_stop_tokens, load_stop_configs
from skyrl_train.storage.download_cache import local_copy
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES, Bucket, Manifest, dtype_of
from skyrl_train.weight_sync.receiver import WeightReceiver

_LOAD_TIMEOUT_S = 600.0
"""Limit for SGLang to load one bucket of weights."""

T = TypeVar("T")


class SGLangEngine:
    """An InferenceEngine that runs SGLang. It owns two threads and SGLang's processes, so callers must close it.

    Requests that continue across a weight sync keep keys and values of the old weights, which no new request finds in
    the prefix cache. If one of SGLang's processes ends, all calls raise EngineError, but this process continues.
    """

    def __init__(
        self,
        model: str,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        name: str = "sglang",
        threads: int | None = None,
        slot: int = 0,
        rope_scaling: dict[str, Any] | None = None,
        rope_theta: float | None = None,
        tensor_parallel_size: int = 1,
        max_lora_rank: int = 0,
        **options: Any,
    ):
        """Start SGLang's processes and wait until they have loaded the model.

        Args:
            model: Folder, URI or hub name of the model.
            tokenizer: The model's tokenizer; None to load it from `model`.
            dtype: Data type of the weights.
            device: "cpu", or an accelerator.
            max_num_seqs: Maximum number of requests that run at a time.
            max_model_len: Maximum length of a prompt with its response, in tokens; None for the model's own limit.
            name: The engine's name in errors and metrics.
            threads: CPU threads of each process of SGLang; None for torch's default.
            slot: Placement slot of the engine, for weight syncs in colocated runs.
            rope_scaling: RoPE scaling that overrides the model's.
            rope_theta: RoPE base that overrides the model's.
            tensor_parallel_size: Number of SGLang's model processes.
            max_lora_rank: Largest rank of LoRA adapters; 0 turns LoRA off.
            options: Further keys of `generator` under their own names, and SGLang's ServerArgs.

        Raises:
            ConfigError: SGLang is not installed, rejects the arguments or does not start, the model cannot be loaded or
                served exactly, or the KV cache is too small for `max_model_len`.
        """
        startup = StartupTimer()
        self.name, model = name, local_copy(model)
        self.lifecycle = Lifecycle(name)
        config = load_config(model).get_text_config()
        max_len: int = max_model_len or config.max_position_embeddings
        capabilities = _capabilities(name, on_cpu=device == "cpu", lora=max_lora_rank > 0)
        self.capabilities = replace(capabilities, max_model_len=max_len)
        self._check_options(options, max_lora_rank)
        tokenizer, meta_model = tokenizer or load_tokenizer(model), load_meta_model_as_served(model, dtype_of(dtype))
        check_names(model, meta_model)
        self._checks = RequestValidator(self.capabilities, config.vocab_size, max_len, max_score_len=max_len)
        arguments = engine_arguments(
            model,
            name=name,
            device=device,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=max_len,
            max_lora_rank=max_lora_rank,
            rope_scaling=rope_scaling,
            rope_theta=rope_theta,
            options={**options, "tensor_parallel_size": tensor_parallel_size},
        )
        self._pending_tasks: set[asyncio.Task[Any]] = set()
        self._weights_executor = ThreadPoolExecutor(1, f"weights-{name}")
        stop_tokens = get_stop_tokens(tokenizer, *load_stop_configs(model))
        self._grammars = JsonGrammars(name, tokenizer, config.vocab_size, stop_tokens)
        with startup.phase("processes"):
            self._processes = self._start(arguments, tokenizer, stop_tokens, threads)
        self._requests = RequestManager(
            self._processes.manager,
            tokenizer,
            stop_tokens,
            self.lifecycle,
            max_model_len=max_len,
            on_cpu=device == "cpu",
            max_num_seqs=max_num_seqs,
            routing_shape=(config.num_hidden_layers, config.num_experts_per_tok)
            if arguments.get("enable_return_routed_experts")
            else None,
        )
        store = SGLangWeightStore(
            meta_model,
            self._processes.manager,
            self._wait,
            self._requests.pause_for_weights,
            ranks=tensor_parallel_size,
        )
        self._receiver = self._requests.receiver = WeightReceiver(store, name, torch.device(device), slot)
        device_checks = (partial(check, torch.device(device)) for check in (check_device, poll_device_error))
        self.device_monitor = DeviceMonitor(self.lifecycle, *device_checks)
        startup.split("processes", self._processes.startup_phases)
        self.startup_phases = startup.finish()
        """Seconds of each phase of the start, in order."""
        self._processes.watch(self._on_process_exit)

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
            self._checks.check_request(request, self._requests.adapters)
            if request.json_schema is not None:
                await asyncio.to_thread(self._grammars.check, request.json_schema)
        return await self._run_on_loop(self._requests.generate(requests)) if requests else []

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs of the sequences' tokens; see `InferenceEngine.score`.

        Other requests make no progress during the call. If the KV cache is too small beside paused requests, these are
        retracted and prefilled again later.

        Raises:
            UnsupportedParameter: The engine does not support this temperature, or a sequence is empty, too long or has
                invalid ids.
            EngineError: The engine is broken, closed or not fully loaded, or it sleeps without its weights.
        """
        plain = self._checks.check_score(token_ids, temperature)
        return await self._run_on_loop(self._requests.score(plain), shielded=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests and wait until they have ended; unknown ids are ignored.

        Their `generate` calls return the tokens sampled so far.

        Raises:
            EngineError: The engine is broken or closed.
        """
        await self._run_on_loop(self._requests.abort(request_ids))

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return the tokens that running requests have sampled so far; see `InferenceEngine.partial_tokens`.

        SGLang's process sends a request's tokens in pieces of fifty until the first call that names the request, and
        from then on after every step.

        Raises:
            EngineError: The engine is broken or closed.
        """
        return await self._run_on_loop(self._requests.partial_tokens(request_ids))

    # -- pausing and memory ------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """Stop sampling until `resume`, and return when the engine is paused.

        Requests that arrive while the engine is paused wait for `resume`. With "wait", unsent requests wait, too.

        Args:
            mode: A PauseMode that decides what happens to running requests; see `InferenceEngine.pause`.

        Raises:
            UnsupportedParameter: `mode` is not in capabilities.pause_modes.
            EngineError: The engine is broken or closed.
        """
        self._checks.check_pause(mode)
        await self._run_on_loop(self._requests.pause(mode))

    async def resume(self) -> None:
        """Continue sampling after `pause`, and send the requests that wait.

        Raises:
            EngineError: The engine is broken or closed.
        """
        await self._run_on_loop(self._requests.resume())

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> int:
        """Abort all requests, because their cache is freed, and free memory until `wake_up`.

        Args:
            level: 1 frees the KV cache; 2 also frees the weights.
            keep_weights: True to free only the KV cache, also in vLLM, which otherwise moves weights at level 1.

        Returns:
            Number of bytes freed on the device; 0 on a CPU.

        Raises:
            EngineError: The engine is broken or closed.
        """
        return await self._run_on_loop(self._requests.sleep(1 if keep_weights else level), shielded=True)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` freed, and continue requests that wait for it.

        It continues even if the caller is cancelled.

        Args:
            tags: Memory to allocate: "weights" or "kv_cache"; None for both. Memory that is not freed is ignored.

        Raises:
            UnsupportedParameter: A tag is unknown.
            EngineError: The engine is broken or closed.
        """
        self._checks.check_wake_up(tags)
        await self._run_on_loop(self._requests.wake_up(tags), shielded=True)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the trainer's transfer group. This blocks the engine's thread for weights until the group has formed.

        The arguments are those of `InferenceEngine.connect_weights`.

        Raises:
            WeightSyncError: The engine does not support the route, or the group did not form in time.
            EngineError: The engine is broken or closed.
        """
        await self._call_receiver(self._receiver.connect, route, address, rank, world_size, timeout_s)

    async def begin_weights(self, manifest: Manifest) -> None:
        """Start a weight sync, and check its manifest. The engine still serves the old weights.

        Raises:
            WeightSyncError: The manifest does not fit the model, or sends only changed tensors to a model that is not
                complete.
            EngineError: The engine sleeps without its weights, or is broken or closed.
        """
        self.lifecycle.check_can_load(manifest)
        await self._call_receiver(self._receiver.begin, manifest)

    async def receive_weights(self, bucket: Bucket) -> None:
        """Receive one bucket on the thread for weights, verify its tensors and load them into SGLang's processes.

        Raises:
            WeightSyncError: The transfer failed, a tensor's fingerprint is wrong, or SGLang rejects the tensors.
            EngineError: The engine is broken or closed.
        """
        await self._call_receiver(self._receiver.receive, bucket)

    async def commit_weights(self, version: int) -> None:
        """Verify that all tensors were loaded, and serve the weights as `version`.

        The commit completes even if its caller is cancelled, because a committed version must be served.

        Raises:
            WeightSyncError: A tensor of the manifest has not arrived, or verification failed.
            EngineError: The engine is broken or closed.
        """
        await self._call_receiver(self._commit, version)

    def _commit(self, version: int) -> None:  # on the thread that receives weights
        self._receiver.commit(version)
        self._wait(self._requests.activate_weights(version))

    async def reset_prefix_cache(self) -> None:
        """Drop SGLang's prefix cache, which keeps the keys and values of prompts.

        Raises:
            EngineError: The engine is broken or closed.
        """
        await self._run_on_loop(self._requests.reset_prefix_cache())

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
        await self._run_on_loop(self._requests.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter, after waiting for its running requests. A name that is not loaded is ignored."""
        await self._run_on_loop(self._requests.unload_adapter(name))

    # -- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Return the engine's state and counters, without waiting for a running weight transfer.

        Raises:
            EngineError: The engine is closed, or one of its processes or its device has failed.
        """
        requests = self._requests
        return self.lifecycle.health(
            self._receiver.version,
            running=requests.running,
            queued=requests.queued,
            generated_tokens=requests.generated_tokens,
            prefilled_tokens=requests.prompt_tokens - requests.cached_tokens,
            cached_tokens=requests.cached_tokens,
        )

    async def close(self) -> None:
        """End the processes and threads. Running requests raise EngineError. Closing twice is harmless."""
        self.lifecycle.close()
        with suppress(RuntimeError):  # The loop has been closed before.
            self._processes.loop.call_soon_threadsafe(self._cancel_all)
        await asyncio.to_thread(self._processes.close)
        self._weights_executor.shutdown(wait=False, cancel_futures=True)
        self._receiver.close()

    # -- between threads ---------------------------------------------------------------------------------------------

    async def _run_on_loop(self, work: Coroutine[Any, Any, T], *, shielded: bool = False) -> T:
        """Run `work` on the loop of SGLang's front end.

        Args:
            work: The coroutine to run.
            shielded: True to complete `work` even if the caller is cancelled.

        Raises:
            EngineError: The engine is closed or has failed.
        """
        future = asyncio.wrap_future(self._submit(work))
        with self.lifecycle.translate_cancellation():
            return await (asyncio.shield(mark_exception_retrieved(future)) if shielded else future)

    async def _cancelled_at_end(self, work: Awaitable[T]) -> T:
        """Await `work`, which is cancelled if SGLang ends, because SGLang would never respond."""
        task = asyncio.current_task()
        assert task is not None
        self._pending_tasks.add(task)
        try:
            return await work
        finally:
            self._pending_tasks.discard(task)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            self.lifecycle.check_alive()
        except EngineError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(self._cancelled_at_end(work), self._processes.loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop of SGLang's front end and block until it ends. Not to be called on that loop."""
        try:
            return self._submit(work).result(_LOAD_TIMEOUT_S)
        except CancelledError:
            raise self.lifecycle.end_error from None

    async def _call_receiver(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step of a weight sync. Steps run one at a time on a separate thread, as they wait for the trainer."""
        self.lifecycle.check_alive()
        with self.lifecycle.translate_cancellation():
            await asyncio.get_running_loop().run_in_executor(
                self._weights_executor, self.device_monitor.run, partial(step, *args)
            )

    def _on_process_exit(self, reason: str) -> None:  # on the loop of SGLang's front end
        self.lifecycle.fail(reason)
        self._cancel_all()
        self._processes.loop.run_in_executor(None, self._processes.kill)

    def _cancel_all(self) -> None:  # on the loop of SGLang's front end
        self._requests.fail_all()
        for task in list(self._pending_tasks):
            task.cancel()

    # -- start -------------------------------------------------------------------------------------------------------

    def _start(
        self,
        arguments: dict[str, Any],
        tokenizer: PreTrainedTokenizerBase,
        stop_tokens: frozenset[int],
        threads: int | None,
    ) -> SGLangProcesses:
        """Start SGLang, and check that its KV cache is large enough for max_model_len."""
        try:
            processes = SGLangProcesses(arguments, tokenizer, stop_tokens, threads, name=self.name)
        except (TypeError, ValueError, AssertionError, RuntimeError, OSError) as error:
            raise ConfigError(
                f"Engine {self.name!r}: {_installed()} did not start (the log above has more from its process): {error}"
            ) from error
        max_tokens = processes.manager.max_req_input_len
        if max_tokens < self._checks.max_model_len:
            processes.close()
            raise ConfigError(
                f"Engine {self.name!r}: its KV cache is large enough for {max_tokens} tokens, less than max_model_len="
                f"{self._checks.max_model_len}. Lower max_model_len or raise generator.gpu_memory_utilization."
            )
        return processes

    def _check_options(self, options: dict[str, Any], max_lora_rank: int) -> None:
        """Remove keys of `options` that have only one allowed value; raise ConfigError for unsupported options."""
        for key in ("pipeline_parallel_size", "data_parallel_size"):
            if (value := options.pop(key, 1)) != 1:
                reason = self.capabilities.refusals[key]
                raise ConfigError(f"generator.inference_engine_{key}={value} is not supported: {reason}")
        if max_lora_rank and not self.capabilities.lora:
            raise ConfigError(
                f"max_lora_rank={max_lora_rank} is not supported: {self.capabilities.refusals['adapter']}"
            )


def _installed() -> str:
    """Return SGLang's name and version; raise ConfigError if it is not installed."""
    try:
        return f"SGLang {importlib.metadata.version('sglang')}"
    except importlib.metadata.PackageNotFoundError as error:
        raise ConfigError(
            "generator.backend='sglang' requires SGLang, which is not installed. Install it with "
            "`uv run --extra sglang ...` on GPUs or `scripts/cpu_engines` on CPUs."
        ) from error


def _capabilities(name: str, *, on_cpu: bool, lora: bool) -> Capabilities:
    sglang = _installed()
    refusals = {
        **({} if is_available() else {"json_schema": MISSING}),
        "score.temperature": f"{sglang} returns log-probs of prompts at temperature 1 only.",
        "pipeline_parallel_size": f"{sglang} cannot pause with pipeline parallelism; use tensor parallelism.",
        "data_parallel_size": f"{sglang} accepts weights only without data parallelism; raise num_inference_engines.",
    }
    if on_cpu:
        refusals["adapter"] = f"{sglang} cannot serve LoRA on a CPU, because it requires pinned memory."
    elif not lora:
        refusals["adapter"] = "none; start the engine with max_lora_rank above 0 (generator.engine_init_kwargs)."
    return Capabilities(
        name=name,
        sampling=SAMPLING_PARAM_NAMES,
        weight_routes=WEIGHT_ROUTES,
        lora=lora and not on_cpu,
        pause_modes=PAUSE_MODES,
        score_temperature=False,
        partial_tokens=True,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        json_schema=is_available(),
        refusals=refusals,
    )
