"""The embedded engine: continuous batching over any Hugging Face causal language model with a plain attention cache.

- engine.py            the interface: asynchronous, validates, never blocks the event loop
- ../in_process.py     the single thread on which everything below runs
- scheduler.py         requests and their sampled tokens; admission, decode steps, ends of requests
- model.py             forwards, and the destination of weight syncs; refuses models that it cannot run exactly
- attention.py         the attention function and the plan for prompts
- cache.py             keys and values; samples of one prompt share those of the prompt
- adapters.py          LoRA: some rows of a batch go through adapters
- ../token_sampler.py  tokens and log-probs from logits
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch
from torch import nn

from skyrl_train.engines.base import (
    PAUSE_MODES,
    SAMPLING,
    Capabilities,
    Completion,
    EngineHealth,
    SampleRequest,
)
from skyrl_train.engines.in_process import Accelerator, StepThread, compute, query
from skyrl_train.engines.sampling import Checks
from skyrl_train.engines.transformers.model import ServedModel, ServedWeights
from skyrl_train.engines.transformers.scheduler import GenerateCall, Scheduler
from skyrl_train.errors import EngineError
from skyrl_train.models.composite import checkpoint_config
from skyrl_train.models.loading import load_causal_lm, load_tokenizer
from skyrl_train.models.stop_tokens import stop_tokens
from skyrl_train.report.profiling import Profiler, peak_memory
from skyrl_train.tasks import unwatched
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.wire import ROUTES, Bucket, Manifest, dtype_of


class TransformersEngine:
    """An InferenceEngine in this process. It owns a thread, so it must be closed.

    Given one list of requests while it is idle, its completions are bit-identical in every process (on the same machine
    with the same number of threads). Otherwise other requests affect a completion only through rounding.

    If weights change while requests run (pause "keep"), their next tokens come from the new weights; keys and values of
    earlier tokens stay those of the old weights, and `Completion.versions` tells where the change was.
    """

    def __init__(
        self,
        model: str | nn.Module,
        tokenizer: Any = None,
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
        """`model` is a folder or hub name, loaded in `dtype`, or a module, which the engine then owns.

        Without a tokenizer (None with a module) stop strings are refused. `threads`: this process's CPU threads;
        `slot`: the placement slot that the engine occupies. `keeps_routing`: whether completions have `routing`.
        Raises ConfigError for a model that cannot be loaded,
        EngineError for one that cannot be served exactly.
        """
        device = torch.device(device)
        if threads is not None:
            torch.set_num_threads(threads)
        if isinstance(model, str):
            dtype = dtype_of(dtype) if isinstance(dtype, str) else dtype
            tokenizer = tokenizer or load_tokenizer(model)
            model = load_causal_lm(model, dtype=dtype, device=device, rope_scaling=rope_scaling, rope_theta=rope_theta)
        self.name = name
        self._served = ServedModel(model, device, name, keeps_routing)  # type: ignore[arg-type]
        longest, served = self._served.max_positions, self._served.model
        max_model_len = min(max_model_len or longest, longest)
        self._scheduler = Scheduler(
            self._served,
            tokenizer,
            stop_tokens(tokenizer, served.generation_config, served.config, checkpoint_config(served)),
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            name=name,
        )
        self._accelerator = Accelerator(name, partial(compute, device), partial(query, device))
        self._receiver = WeightReceiver(ServedWeights(self._served), name, device, slot)
        self.capabilities = _capabilities(name, max_model_len, strings=tokenizer is not None)
        self._checks = Checks(self.capabilities, self._served.vocab_size, max_model_len, max_score_len=longest)
        self._profiler = Profiler(device.type)
        self._paused = False
        self._paused_before_sleep = False
        self._asleep: set[str] = set()
        """The memory freed by `sleep` and not yet reallocated: "kv_cache", "weights"."""
        self._drained: list[Future[None]] = []
        """Calls of `pause` that wait until no row runs any more."""
        self._closed = False
        self._thread = StepThread(self, f"engine-{name}")

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See InferenceEngine. Cancelling the call aborts its requests."""
        for request in requests:
            self._checks.request(request, self._served.adapters.names)
        if not requests:
            return []
        call = GenerateCall(requests)

        def submit() -> None:
            self._check_serving()
            self._scheduler.submit(call)

        try:
            await self._ask(submit)
            return await asyncio.shield(unwatched(asyncio.wrap_future(call.future)))
        except asyncio.CancelledError:
            if not self._closed:
                self._thread.ask(lambda: self._abort([request.request_id for request in requests]))
            raise

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """See InferenceEngine. Works while paused, and with only the weights awake: it needs no cache."""
        plain = self._checks.score(token_ids, temperature)

        def score() -> list[list[float]]:
            self._check_serving(only_weights=True)
            with torch.inference_mode():
                return self._served.score(plain, temperature)

        return await self._ask(score)  # type: ignore[no-any-return]

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See InferenceEngine."""
        await self._ask(lambda: self._abort(request_ids))

    # -- traffic -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        """See InferenceEngine. Requests that come while paused wait for `resume`; with "wait" so do queued ones."""
        self._checks.pause(mode)
        drained: Future[None] = Future()

        def pause() -> None:
            if mode == "abort":
                self._scheduler.abort()
            if mode == "retract":
                self._scheduler.retract()
            if mode == "wait" and self._scheduler.running and not self._halted():
                self._scheduler.admitting = False
                self._drained.append(drained)
                return
            self._paused = True
            drained.set_result(None)

        await self._ask(pause)
        await asyncio.shield(unwatched(asyncio.wrap_future(drained)))

    async def resume(self) -> None:
        def resume() -> None:
            self._paused = False
            self._scheduler.admitting = True
            self._notify_drained()

        await self._ask(resume)

    async def sleep(self, level: int = 1) -> int:
        """See InferenceEngine. Running requests are aborted, as their cache is freed."""

        def sleep() -> int:
            if not self._asleep:
                self._paused_before_sleep = self._paused
            self._paused = True
            self._scheduler.abort()
            self._asleep |= {"kv_cache"} if level < 2 else {"kv_cache", "weights"}
            return self._served.give_memory_back(weights=level >= 2)

        return await self._ask(sleep)  # type: ignore[no-any-return]

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See InferenceEngine."""
        self._checks.wake_up(tags)

        def wake_up() -> None:
            if "weights" in self._asleep and (tags is None or "weights" in tags):
                self._served.take_weights_back()
            was_asleep = bool(self._asleep)
            self._asleep -= {"weights", "kv_cache"} if tags is None else set(tags)
            if was_asleep and not self._asleep:
                self._paused = self._paused_before_sleep

        await self._ask(wake_up)

    # -- weights -----------------------------------------------------------------------------------------------------

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        await self._ask(lambda: self._receiver.connect(route, address, rank, world_size, timeout_s))

    async def begin_weights(self, manifest: Manifest) -> None:
        def begin() -> None:
            if "weights" in self._asleep:
                raise EngineError(f'Engine {self.name!r} sleeps without its weights; wake_up(["weights"]) first.')
            self._receiver.begin(manifest)

        await self._ask(begin)

    async def receive_weights(self, bucket: Bucket) -> None:
        await self._ask(lambda: self._receiver.receive(bucket))

    async def commit_weights(self, version: int) -> None:
        def commit() -> None:
            self._receiver.commit(version)
            self._scheduler.weights_changed(version)

        await self._ask(commit)

    async def reset_prefix_cache(self) -> None:
        await self._ask(self._scheduler.forget)

    async def load_adapter(self, name: str, path: str) -> None:
        """See InferenceEngine. Running requests finish with the adapter that they began with."""
        adapter = await asyncio.to_thread(self._served.adapters.read, name, path)
        await self._ask(lambda: self._served.adapters.add(adapter))

    async def unload_adapter(self, name: str) -> None:
        """Running requests finish with the adapter; a name that is not loaded is ignored."""
        await self._ask(lambda: self._served.adapters.remove(name))

    # -- state -------------------------------------------------------------------------------------------------------

    async def health(self) -> EngineHealth:
        """See InferenceEngine. It does not wait for a step or transfer. Raises EngineError once closed or dead."""
        if self._closed:
            raise EngineError(f"Engine {self.name!r} is closed.")
        self._accelerator.check()
        scheduler = self._scheduler
        return EngineHealth(
            name=self.name,
            version=self._receiver.version,
            running=scheduler.running,
            queued=scheduler.queued,
            paused=self._paused or not scheduler.admitting,
            asleep=bool(self._asleep),
            torn=self._receiver.torn,
            generated_tokens=scheduler.generated_tokens,
            prefilled_tokens=scheduler.prefilled_tokens,
            cached_tokens=scheduler.cached_tokens,
            extra=peak_memory(self._served.device.type),
        )

    async def start_profile(self) -> None:
        """Record what the engine's thread runs."""
        await self._ask(self._profiler.start)

    async def stop_profile(self, file: str) -> str:
        """See Profiler.write; steps go on while it writes."""
        await self._ask(self._profiler.stop)
        return await asyncio.to_thread(self._profiler.write, file)

    async def close(self) -> None:
        """End the thread; running requests get EngineError. Closing twice is harmless."""
        if self._closed:
            return
        self._closed = True
        await asyncio.to_thread(self._thread.close)
        self._scheduler.fail(EngineError(f"Engine {self.name!r} was closed."))
        self._notify_drained()
        self._receiver.close()

    # -- called by the thread -----------------------------------------------------------------------------------------

    def has_work(self) -> bool:
        return not self._halted() and (self._scheduler.has_work or bool(self._drained))

    def wakes_at(self) -> float:
        return math.inf if self._closed else self._scheduler.next_deadline

    def tick(self) -> None:
        try:
            with torch.inference_mode():
                self._scheduler.expire()
                if not self._halted() and self._scheduler.has_work:
                    self._scheduler.step()
        except EngineError as error:
            self._scheduler.fail(error)
        except Exception as error:
            failure = EngineError(f"Engine {self.name!r} failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._accelerator.examine()
            self._scheduler.fail(failure)
        if self._drained and not self._scheduler.running:
            self._paused = True
            self._scheduler.admitting = True
            self._notify_drained()

    def _halted(self) -> bool:
        return self._paused or self._receiver.torn or bool(self._asleep)

    def _notify_drained(self) -> None:
        waiting, self._drained = self._drained, []
        for drained in waiting:
            drained.set_result(None)

    def _abort(self, request_ids: Sequence[str]) -> None:
        with torch.inference_mode():
            self._scheduler.abort(request_ids)

    # -- checks ------------------------------------------------------------------------------------------------------

    async def _ask(self, command: Callable[[], Any]) -> Any:
        """Run a command on the engine's thread between two steps. Raises EngineError once closed."""
        try:
            return await asyncio.wrap_future(self._thread.ask(lambda: self._accelerator.run(command)))
        except (RuntimeError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if self._closed and not (task is not None and task.cancelling()):
                raise EngineError(f"Engine {self.name!r} is closed.") from error
            raise

    def _check_serving(self, only_weights: bool = False) -> None:
        self._accelerator.check()
        if self._receiver.torn:
            raise EngineError(
                f"Engine {self.name!r} holds half of a weight transfer; it serves nothing until a complete sync."
            )
        if "weights" in self._asleep or (self._asleep and not only_weights):
            raise EngineError(f"Engine {self.name!r} is asleep; wake_up() first.")


def _capabilities(name: str, max_model_len: int, *, strings: bool) -> Capabilities:
    return Capabilities(
        name=name,
        sampling=SAMPLING if strings else SAMPLING - {"stop"},
        weight_routes=ROUTES,
        max_model_len=max_model_len,
        lora=True,
        synced_adapter_rank=1 << 16,
        pause_modes=PAUSE_MODES,
        keeps_fingerprints=True,
        refusals={} if strings else {"stop": f"engine {name!r} was given no tokenizer to read what it samples."},
    )
