"""SGLang as an engine: its scheduler and model in separate processes, its front end on a thread of this process.

- engine.py        the interface: asynchronous, validates, never blocks the event loop
- host.py          the thread and the processes
- arguments.py     start arguments, and which models it cannot serve
- traffic.py       on that thread: requests, pausing, sleeping
- weight_store.py  loads full tensors into SGLang's model
- scheduler.py     in SGLang's process: aborts and scores while paused, prompt cache
- sampler.py       in SGLang's process: sampling and stopping, the same as in the transformers engine
- stand_ins/       packages that SGLang imports on a CPU and does not need there
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

from skyrl_train.aio import mark_exception_retrieved
from skyrl_train.engines.base import (
    PAUSE_MODES,
    SAMPLING_PARAM_NAMES,
    Capabilities,
    Completion,
    EngineHealth,
    SampleRequest,
)
from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.engines.sampling_params import RequestValidator
from skyrl_train.engines.sglang.arguments import engine_arguments
from skyrl_train.engines.sglang.processes import SGLangProcesses
from skyrl_train.engines.sglang.requests import RequestManager
from skyrl_train.engines.sglang.weight_store import SGLangWeightStore, check_names
from skyrl_train.engines.step_loop import DeviceMonitor, check_device, poll_device_error
from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.models.loading import load_config, load_meta_model_as_served, load_tokenizer
from skyrl_train.models.stop_tokens import get_stop_tokens, load_stop_configs
from skyrl_train.storage.download_cache import local_copy
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES, Bucket, Manifest, dtype_of
from skyrl_train.weight_sync.receiver import WeightReceiver

_LOADING_S = 600.0
"""The longest that SGLang may take to load one bucket of weights."""

T = TypeVar("T")


class SGLangEngine:
    """An InferenceEngine over SGLang. It owns two threads and SGLang's processes, so it must be closed.

    Requests kept while weights change continue with keys and values of the old weights; no other request can find those
    in the prompt cache. If a process of SGLang ends, all calls get EngineError, but this process lives on.
    """

    def __init__(
        self,
        model: str,
        tokenizer: Any = None,
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
        """`options`: further keys of `generator` under their own names, and SGLang's ServerArgs.

        Blocks until the model is loaded. Adapters need `max_lora_rank` above 0. Raises ConfigError for arguments that
        SGLang refuses, and for a model that cannot be loaded.
        """
        self.name, model = name, local_copy(model)
        self.lifecycle = Lifecycle(name)
        config = load_config(model).get_text_config()
        longest: int = max_model_len or config.max_position_embeddings
        capabilities = _capabilities(name, on_cpu=device == "cpu", lora=max_lora_rank > 0)
        self.capabilities = replace(capabilities, max_model_len=longest)
        self._check_options(options, max_lora_rank)
        tokenizer, skeleton = tokenizer or load_tokenizer(model), load_meta_model_as_served(model, dtype_of(dtype))
        check_names(model, skeleton)
        self._checks = RequestValidator(self.capabilities, config.vocab_size, longest, max_score_len=longest)
        arguments = engine_arguments(
            model,
            name=name,
            device=device,
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            max_model_len=longest,
            max_lora_rank=max_lora_rank,
            rope_scaling=rope_scaling,
            rope_theta=rope_theta,
            options={**options, "tensor_parallel_size": tensor_parallel_size},
        )
        self._asked: set[asyncio.Task[Any]] = set()
        self._worker = ThreadPoolExecutor(1, f"weights-{name}")
        self._processes = self._start(arguments, tokenizer, threads)
        self._requests = RequestManager(
            self._processes.manager,
            tokenizer,
            get_stop_tokens(tokenizer, *load_stop_configs(model)),
            self.lifecycle,
            max_model_len=longest,
            on_cpu=device == "cpu",
            max_num_seqs=max_num_seqs,
        )
        store = SGLangWeightStore(
            skeleton, self._processes.manager, self._wait, self._requests.pause_for_weights, ranks=tensor_parallel_size
        )
        self._receiver = self._requests.receiver = WeightReceiver(store, name, torch.device(device), slot)
        questions = (partial(ask, torch.device(device)) for ask in (check_device, poll_device_error))
        self.device_monitor = DeviceMonitor(self.lifecycle, *questions)
        self._processes.watch(self._died)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See InferenceEngine. Cancelling the call aborts its requests."""
        for request in requests:
            self._checks.check_request(request, self._requests.adapters)
        return await self._run_on_loop(self._requests.generate(requests)) if requests else []

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """See InferenceEngine. Running requests, paused or not, make no progress meanwhile.

        If the cache has no room besides paused requests, these are prefilled again later, as after a retraction.
        """
        plain = self._checks.check_score(token_ids, temperature)
        return await self._run_on_loop(self._requests.score(plain), shielded=True)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See InferenceEngine."""
        await self._run_on_loop(self._requests.abort(request_ids))

    # -- traffic -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """See InferenceEngine. Requests that come while paused wait for `resume`; with "wait" so do unsent ones."""
        self._checks.check_pause(mode)
        await self._run_on_loop(self._requests.pause(mode))

    async def resume(self) -> None:
        await self._run_on_loop(self._requests.resume())

    async def sleep(self, level: int = 1) -> int:
        """See InferenceEngine. Running requests are aborted, as their cache is freed."""
        return await self._run_on_loop(self._requests.sleep(level), shielded=True)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See InferenceEngine."""
        self._checks.check_wake_up(tags)
        await self._run_on_loop(self._requests.wake_up(tags), shielded=True)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        await self._call_receiver(self._receiver.connect, route, address, rank, world_size, timeout_s)

    async def begin_weights(self, manifest: Manifest) -> None:
        self.lifecycle.check_can_load(manifest)
        await self._call_receiver(self._receiver.begin, manifest)

    async def receive_weights(self, bucket: Bucket) -> None:
        await self._call_receiver(self._receiver.receive, bucket)

    async def commit_weights(self, version: int) -> None:
        """See InferenceEngine. It completes even if its caller is cancelled: a committed version must be served."""
        await self._call_receiver(self._commit, version)

    def _commit(self, version: int) -> None:
        """Runs on the thread that receives weights."""
        self._receiver.commit(version)
        self._wait(self._requests.activate_weights(version))

    async def reset_prefix_cache(self) -> None:
        await self._run_on_loop(self._requests.reset_prefix_cache())

    async def load_adapter(self, name: str, path: str) -> None:
        """See InferenceEngine. The adapter stays loaded when the base model's weights change."""
        self._checks.check_adapter(name)
        await self._run_on_loop(self._requests.load_adapter(name, path))

    async def unload_adapter(self, name: str) -> None:
        """Waits for running requests with the adapter; a name that is not loaded is ignored."""
        await self._run_on_loop(self._requests.unload_adapter(name))

    # -- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """See InferenceEngine. It does not wait for the current transfer. Raises EngineError once closed or dead."""
        traffic = self._requests
        return self.lifecycle.health(
            self._receiver.version,
            running=traffic.running,
            queued=traffic.queued,
            generated_tokens=traffic.generated_tokens,
            prefilled_tokens=traffic.prompt_tokens - traffic.cached_tokens,
            cached_tokens=traffic.cached_tokens,
        )

    async def close(self) -> None:
        """End the processes and threads; running requests get EngineError. Closing twice is harmless."""
        self.lifecycle.close()
        with suppress(RuntimeError):  # closed before
            self._processes.loop.call_soon_threadsafe(self._give_up)
        await asyncio.to_thread(self._processes.close)
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._receiver.close()

    # -- between threads ---------------------------------------------------------------------------------------------

    async def _run_on_loop(self, work: Coroutine[Any, Any, T], *, shielded: bool = False) -> T:
        """Run on the host's loop; `shielded` work completes even if its caller is cancelled.

        Raises EngineError if SGLang is gone.
        """
        future = asyncio.wrap_future(self._submit(work))
        with self.lifecycle.translate_cancellation():
            return await (asyncio.shield(mark_exception_retrieved(future)) if shielded else future)

    async def _cancelled_when_gone(self, work: Awaitable[T]) -> T:
        """Await `work`, which is cancelled if SGLang ends: it would never get an answer."""
        task = asyncio.current_task()
        assert task is not None
        self._asked.add(task)
        try:
            return await work
        finally:
            self._asked.discard(task)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            self.lifecycle.check_alive()
        except EngineError:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(self._cancelled_when_gone(work), self._processes.loop)

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the host's loop and wait; for the thread that receives weights."""
        try:
            return self._submit(work).result(_LOADING_S)
        except CancelledError:
            raise self.lifecycle.end_error from None

    async def _call_receiver(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step of a weight sync; steps run one at a time on their own thread, as they wait for the trainer."""
        self.lifecycle.check_alive()
        with self.lifecycle.translate_cancellation():
            await asyncio.get_running_loop().run_in_executor(
                self._worker, self.device_monitor.run, partial(step, *args)
            )

    def _died(self, how: str) -> None:
        """Runs on the host's loop."""
        self.lifecycle.fail(how)
        self._give_up()
        self._processes.loop.run_in_executor(None, self._processes.kill)

    def _give_up(self) -> None:
        """Runs on the host's loop."""
        self._requests.fail_all()
        for task in list(self._asked):
            task.cancel()

    # -- checks ------------------------------------------------------------------------------------------------------

    def _start(self, arguments: dict[str, Any], tokenizer: Any, threads: int | None) -> SGLangProcesses:
        try:
            host = SGLangProcesses(arguments, tokenizer, threads, name=self.name)
        except (TypeError, ValueError, AssertionError, RuntimeError, OSError) as error:
            where = "its process says more in the log above"
            raise ConfigError(f"Engine {self.name!r}: {_installed()} did not start ({where}): {error}") from error
        room = host.manager.max_req_input_len
        if room < self._checks.max_model_len:
            host.close()
            raise ConfigError(
                f"Engine {self.name!r}: its cache has room for {room} tokens, less than max_model_len="
                f"{self._checks.max_model_len}: lower that, or raise generator.gpu_memory_utilization."
            )
        return host

    def _check_options(self, options: dict[str, Any], max_lora_rank: int) -> None:
        """Raises ConfigError for unsupported options, before anything is started."""
        for key in ("pipeline_parallel_size", "data_parallel_size"):
            if (value := options.pop(key, 1)) != 1:
                raise ConfigError(f"generator.inference_engine_{key}={value}: {self.capabilities.refusals[key]}")
        if max_lora_rank and not self.capabilities.lora:
            raise ConfigError(f"max_lora_rank={max_lora_rank}: {self.capabilities.refusals['adapter']}")


def _installed() -> str:
    """SGLang's name and version. Raises ConfigError naming the extra to install."""
    try:
        return f"SGLang {importlib.metadata.version('sglang')}"
    except importlib.metadata.PackageNotFoundError as error:
        where = "`uv run --extra sglang ...` on GPUs, `scripts/cpu_engines` on CPUs"
        raise ConfigError(f"generator.backend='sglang' needs SGLang: {where}.") from error


def _capabilities(name: str, *, on_cpu: bool, lora: bool) -> Capabilities:
    sglang = _installed()
    refusals = {
        "score.temperature": f"{sglang} gives log-probs of prompts at temperature 1 only.",
        "pipeline_parallel_size": f"{sglang} cannot pause when pipeline-parallel; use tensor parallelism.",
        "data_parallel_size": f"{sglang} takes weights without data parallelism only; raise num_inference_engines.",
    }
    if on_cpu:
        refusals["adapter"] = f"{sglang} cannot serve LoRA on a CPU: it wants memory pinned for an accelerator."
    elif not lora:
        refusals["adapter"] = "none; start it with max_lora_rank above 0 (generator.engine_init_kwargs)."
    return Capabilities(
        name=name,
        sampling=SAMPLING_PARAM_NAMES,
        weight_routes=WEIGHT_ROUTES,
        lora=lora and not on_cpu,
        pause_modes=PAUSE_MODES,
        score_temperature=False,
        refusals=refusals,
    )
