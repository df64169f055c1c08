"""The transformers engine: continuous batching for Hugging Face causal language models, in the caller's process.

- engine.py            asynchronous interface; validates requests, never blocks the event loop
- ../lifecycle.py      the engine's state: paused, asleep, partially loaded, ...
- ../step_loop.py      the single thread on which everything below runs
- scheduler.py         requests and their sampled tokens; admission, decode steps, completions
- model_runner.py      forward passes and the destination of weight syncs; rejects models that it cannot run exactly
- attention.py         the attention function and the plan for prompts
- cache.py             keys and values; samples of one prompt share the prompt's
- adapters.py          LoRA adapters, applied to some rows of a batch
- ../token_sampler.py  tokens and log-probs from logits
- ../json_constraint.py  tokens that a JSON schema allows
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from skyrl_train.data.token_arrays import Tokens
from skyrl_train.engines import json_constraint
from skyrl_train.engines.base import (
    MAX_TOP_LOGPROBS,
    PAUSE_MODES,
    SAMPLING_PARAM_NAMES,
    Capabilities,
    Completion,
    EngineHealth,
    SampleRequest,
)
from skyrl_train.engines.json_constraint import JsonGrammars
from skyrl_train.engines.lifecycle import await_thread_future, tags_freed_at_level
from skyrl_train.engines.sampling_params import RequestValidator
from skyrl_train.engines.startup import StartupTimer
from skyrl_train.engines.step_loop import DeviceMonitor, StepLoopEngine, check_device, poll_device_error
from skyrl_train.engines.transformers.model_runner import ModelRunner, TransformersWeightStore
from skyrl_train.engines.transformers.scheduler import GenerateCall, Scheduler
from skyrl_train.errors import EngineError
from skyrl_train.models.composite import get_checkpoint_config
from skyrl_train.models.loading import load_causal_lm, load_tokenizer
from skyrl_train.models.stop_tokens import get_stop_tokens
from skyrl_train.report.profiling import Profiler, peak_memory
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES, dtype_of
from skyrl_train.weight_sync.receiver import WeightReceiver


class TransformersEngine(StepLoopEngine):
    """An InferenceEngine that runs in this process. It owns a thread, so callers must close it.

    An idle engine returns bit-identical completions for the same list of requests in every process, on the same machine
    with the same number of threads. Otherwise other requests affect a completion only through rounding.

    If weights change while requests run (pause "keep"), the next tokens are sampled with the new weights. Keys and
    values of earlier tokens, and the states of recurrent layers after them, stay those of the old weights.
    `Completion.versions` records where the version changed.
    """

    def __init__(
        self,
        model: str | nn.Module,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        dtype: str | torch.dtype = "float32",
        device: str | torch.device = "cpu",
        max_num_seqs: int = 256,
        max_model_len: int | None = None,
        name: str = "transformers",
        threads: int | None = None,
        slot: int = 0,
        rope_scaling: dict[str, Any] | None = None,
        rope_theta: float | None = None,
        keeps_routing: bool = False,
    ):
        """Load the model, check that the engine serves it exactly, and start the engine's thread.

        Args:
            model: A folder or a hub name, which is loaded in `dtype`, or a module, which the engine then owns.
            tokenizer: The model's tokenizer. If it is None, it is loaded from the folder or hub name. An engine of a
                module without a tokenizer does not support stop strings.
            dtype: Data type of a model that the engine loads.
            device: Device of the model.
            max_num_seqs: Maximum number of requests that run at a time. Others wait in a queue.
            max_model_len: Maximum length of a prompt with its response, in tokens; None for the model's own limit.
            name: The engine's name in errors and metrics.
            threads: CPU threads of this process, set for all of torch; None leaves the setting alone.
            slot: The placement slot that the engine occupies, for weight syncs in colocated runs.
            rope_scaling: RoPE scaling that overrides the model's, if the engine loads it.
            rope_theta: RoPE base that overrides the model's, if the engine loads it.
            keeps_routing: True to record the experts of each token in `Completion.routing`.

        Raises:
            ConfigError: The model cannot be loaded.
            EngineError: The engine cannot serve the model exactly, or `keeps_routing` is set for a model without
                routers.
        """
        super().__init__(name, max_num_seqs)
        startup = StartupTimer()
        device = torch.device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        if isinstance(model, str):
            dtype = dtype_of(dtype) if isinstance(dtype, str) else dtype
            tokenizer = tokenizer or load_tokenizer(model)
            with startup.phase("weights"):
                model = load_causal_lm(
                    model, dtype=dtype, device=device, rope_scaling=rope_scaling, rope_theta=rope_theta
                )
        self.served = ModelRunner(model, device, name, keeps_routing)  # type: ignore[arg-type]
        """The model and its adapters. Only the engine's thread computes with them."""
        max_positions, served = self.served.max_positions, self.served.model
        max_model_len = min(max_model_len or max_positions, max_positions)
        stop_tokens = get_stop_tokens(tokenizer, served.generation_config, served.config, get_checkpoint_config(served))
        self._grammars: JsonGrammars | None = None
        if tokenizer is not None and json_constraint.is_available():
            self._grammars = JsonGrammars(name, tokenizer, self.served.vocab_size, stop_tokens)
        self._scheduler = Scheduler(
            self.served,
            tokenizer,
            stop_tokens,
            self._deadlines,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            name=name,
            grammars=self._grammars,
        )
        self.device_monitor = DeviceMonitor(
            self.lifecycle, partial(check_device, device), partial(poll_device_error, device)
        )
        self._receiver = WeightReceiver(TransformersWeightStore(self.served), name, device, slot)
        self.capabilities = _capabilities(name, max_model_len, has_tokenizer=tokenizer is not None)
        self._checks = RequestValidator(
            self.capabilities, self.served.vocab_size, max_model_len, max_score_len=max_positions
        )
        self._profiler = Profiler(device.type)
        self.startup_phases = startup.finish()
        self._thread.start()

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
            self._checks.check_request(request, self.served.adapters.names)
            if request.json_schema is not None and self._grammars is not None:
                await asyncio.to_thread(self._grammars.check, request.json_schema)
        if not requests:
            return []
        call = GenerateCall(requests)

        def submit() -> None:
            self.lifecycle.check_serving()
            self._scheduler.submit(call)

        try:
            await self._run(submit)
            return await await_thread_future(call.future)
        except asyncio.CancelledError:
            self._enqueue_command(lambda: self._abort([request.request_id for request in requests]))
            raise

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, replacing an adapter of the same name.

        Running requests finish with the adapter that they started with.

        Args:
            name: Name of the adapter, which requests use.
            path: Folder that peft's `save_pretrained` wrote.

        Raises:
            EngineError: The adapter does not fit the model, or the engine is broken or closed.
        """
        adapter = await asyncio.to_thread(self.served.adapters.read, name, path)
        await self._run(lambda: self.served.adapters.add(adapter))

    async def unload_adapter(self, name: str) -> None:
        """Unload a LoRA adapter. Running requests finish with it. A name that is not loaded is ignored."""
        await self._run(lambda: self.served.adapters.remove(name))

    # -- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """Return the engine's state and counters, without waiting for a running step or weight transfer.

        Raises:
            EngineError: The engine is closed or its device is lost.
        """
        self.lifecycle.check_alive()  # Reading the memory statistics of a lost device would fail.
        return self.lifecycle.health(
            self._receiver.version,
            running=self._scheduler.running,
            queued=self._scheduler.queued,
            generated_tokens=self._scheduler.generated_tokens,
            prefilled_tokens=self._scheduler.prefilled_tokens,
            cached_tokens=self._scheduler.cached_tokens,
            extra=peak_memory(self.served.device.type),
        )

    async def start_profile(self) -> None:
        """Start the profiler on the engine's thread, once its running step has ended."""
        await self._run(self._profiler.start)

    async def stop_profile(self, file: str) -> str:
        """Stop the profiler and write its trace to `file`; see `Profiler.write`. Steps continue during the write."""
        await self._run(self._profiler.stop)
        return await asyncio.to_thread(self._profiler.write, file)

    # -- implementation of StepLoopEngine ----------------------------------------------------------------------------

    def _is_busy(self) -> bool:
        return self._scheduler.running > 0

    def _has_work(self) -> bool:
        return self._is_busy() or (self._scheduler.queued > 0 and self.lifecycle.can_admit)

    @torch.inference_mode()
    def _step(self) -> None:
        self._scheduler.step(can_admit=self.lifecycle.can_admit)

    @torch.inference_mode()
    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        return self.served.score(token_ids, temperature)

    @torch.inference_mode()
    def _abort(self, request_ids: Sequence[str] | None) -> None:
        self._scheduler.abort(request_ids)

    def _partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        return self._scheduler.partial_tokens(request_ids)

    def _retract(self) -> None:
        self._scheduler.retract()

    def _fail(self, error: EngineError) -> None:
        self._scheduler.fail(error)

    def _free_memory(self, level: int, keep_weights: bool) -> int:
        level = 1 if keep_weights else level
        self.lifecycle.sleep(tags_freed_at_level(level))
        return self.served.free_memory(weights=level >= 2)

    def _restore_memory(self, tags: frozenset[str]) -> None:
        if "weights" in tags:
            self.served.onload_weights()

    def _call_receiver(self, step: partial[None]) -> None:
        try:
            step(self._receiver)
        finally:
            if self._receiver.partially_loaded:
                self.lifecycle.invalidate_weights()

    def _activate_weights(self, version: int) -> None:
        self._scheduler.on_weights_changed(version)

    def _reset_prefix_cache(self) -> None:
        self._scheduler.reset_prefix_cache()

    def _shutdown(self) -> None:
        self._scheduler.fail(EngineError(f"Engine {self.name!r} was closed."))
        self._receiver.close()


def _capabilities(name: str, max_model_len: int, *, has_tokenizer: bool) -> Capabilities:
    refusals = {} if json_constraint.is_available() else {"json_schema": json_constraint.MISSING}
    if not has_tokenizer:
        refusals["stop"] = f"engine {name!r} has no tokenizer, which stop strings require."
        refusals["json_schema"] = f"engine {name!r} has no tokenizer, which schemas require."
    return Capabilities(
        name=name,
        sampling=SAMPLING_PARAM_NAMES if has_tokenizer else SAMPLING_PARAM_NAMES - {"stop"},
        weight_routes=WEIGHT_ROUTES,
        max_model_len=max_model_len,
        lora=True,
        synced_adapter_rank=1 << 16,
        pause_modes=PAUSE_MODES,
        keeps_fingerprints=True,
        partial_tokens=True,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        json_schema=has_tokenizer and json_constraint.is_available(),
        refusals=refusals,
    )
