"""The base class of engines with a step loop in this process: the loop's thread, the protocol around it, device
checks."""

from __future__ import annotations

import asyncio
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from skyrl_train.data.token_arrays import Tokens
from skyrl_train.engines.base import Capabilities, PauseMode
from skyrl_train.engines.lifecycle import EngineState, Lifecycle, RequestDeadlines, await_thread_future
from skyrl_train.engines.sampling_params import RequestValidator
from skyrl_train.errors import EngineError, SkyRLError, WeightSyncError
from skyrl_train.weight_sync.protocol import Bucket, Manifest
from skyrl_train.weight_sync.receiver import WeightReceiver

T = TypeVar("T")


class StepLoopEngine(ABC):
    """An engine whose thread runs the engine's steps and, between two steps, the commands of callers.

    Commands run one at a time in order of arrival, so the data of steps and commands needs no lock. A subclass
    implements the abstract methods, which run on the thread, and starts the thread when it is ready.
    """

    capabilities: Capabilities
    device_monitor: DeviceMonitor
    startup_phases: dict[str, float]
    """Seconds of each phase of the start, in order."""
    _checks: RequestValidator

    def __init__(self, name: str, max_num_seqs: int):
        """Create the engine without starting its thread; it runs at most `max_num_seqs` requests at a time."""
        self.name = name
        self.lifecycle = Lifecycle(name)
        self._deadlines = RequestDeadlines(max_num_seqs)
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run_loop, name=f"engine-{name}", daemon=True)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _enqueue_command(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` on the thread and return a future with its result or exception.

        The future is cancelled if the engine is closed.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                future.cancel()
            else:
                self._commands.append((future, command))
                self._wake.notify()
        return future

    async def _run(self, command: Callable[[], T], *, during_steps: bool = False) -> T:
        """Run `command` on the thread and return its result.

        Args:
            command: Function to run.
            during_steps: True to run the command without waiting for steps that were started and are not finished.

        Raises:
            EngineError: The engine is closed or broken.
        """

        def run() -> T:
            if not during_steps:
                self._finish_pending_steps()
            return command()

        with self.lifecycle.translate_cancellation():
            return await asyncio.wrap_future(self._enqueue_command(lambda: self.device_monitor.run(run)))

    def _run_loop(self) -> None:
        while not self._closing:
            with self._wake:
                while not (self._commands or self._closing or self._can_step()):
                    remaining = self._deadlines.next_deadline() - time.monotonic()
                    if remaining <= 0:
                        break
                    self._wake.wait(min(remaining, threading.TIMEOUT_MAX))
                commands, self._commands = self._commands, deque()
            for future, command in commands:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(command())
                    except BaseException as error:
                        future.set_exception(error)
            if not self._closing:
                self._run_iteration()

    def _can_step(self) -> bool:
        return not self.lifecycle.is_halted and self._has_work()

    def _run_iteration(self) -> None:
        if expired_ids := self._deadlines.expired():
            self._run_guarded(lambda: self._abort(expired_ids))
        if self._can_step():
            self._run_guarded(self._step)
        if self.lifecycle.state is EngineState.BROKEN:
            self._fail(self.lifecycle.end_error)
        if not self._is_busy():
            self.lifecycle.finish_draining()

    def _run_guarded(self, work: Callable[[], None]) -> None:
        """Run `work`. A failure ends all requests with an error, and the engine if its device is lost."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, EngineError):
                self.device_monitor.check()
            self._fail(self.lifecycle.as_engine_error(error))

    # -- the protocol ------------------------------------------------------------------------------------------------

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs of the sequences' tokens; see `InferenceEngine.score`.

        Running requests make no progress during the call. The engine may sleep without its KV cache.

        Raises:
            UnsupportedParameter: The engine does not support this temperature, or a sequence is empty, too long or has
                invalid ids.
            EngineError: The engine is broken, closed or not fully loaded, or it sleeps without its weights.
        """
        sequences = self._checks.check_score(token_ids, temperature)

        def score() -> list[list[float]]:
            self.lifecycle.check_serving(allow_freed_cache=True)
            return self._score(sequences, temperature)

        return await self._run(score)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests without waiting for steps that are running; unknown ids are ignored.

        Their `generate` calls return the tokens sampled so far.

        Raises:
            EngineError: The engine is broken or closed.
        """
        await self._run(lambda: self._abort(request_ids), during_steps=True)

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return the tokens that running requests have sampled so far; see `InferenceEngine.partial_tokens`.

        This waits for the current step of the engine's thread, but not for steps that were started and are not
        finished.

        Raises:
            EngineError: The engine is broken or closed.
        """
        return await self._run(lambda: self._partial_tokens(request_ids), during_steps=True)

    async def pause(self, mode: str = "keep") -> None:
        """Stop sampling until `resume`, and return when the engine is paused. New requests wait for `resume`.

        Args:
            mode: A PauseMode. "keep" leaves running requests where they are, "retract" returns them to the queue with
                the tokens sampled so far, "abort" ends them, and "wait" lets them finish first. With "wait", queued
                requests wait, too.

        Raises:
            UnsupportedParameter: `mode` is not in capabilities.pause_modes.
            EngineError: The engine is broken or closed.
        """
        self._checks.check_pause(mode)

        def pause() -> Future[None]:
            if mode == PauseMode.ABORT:
                self._abort(None)
            if mode == PauseMode.RETRACT:
                self._retract()
            return self.lifecycle.pause(busy=mode == PauseMode.WAIT and self._is_busy())

        await await_thread_future(await self._run(pause))

    async def resume(self) -> None:
        """Continue sampling after `pause`, and start waiting requests.

        An engine that sleeps or is not fully loaded continues only once that has ended, too.

        Raises:
            EngineError: The engine is broken or closed.
        """

        def resume() -> None:
            self.lifecycle.resume()
            self._admit_waiting()

        await self._run(resume)

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

        def sleep() -> int:
            self._abort(None)
            return self._free_memory(level, keep_weights)

        return await self._run(sleep)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` freed, and start waiting requests if the engine can then serve them.

        Args:
            tags: Memory to allocate: "weights" or "kv_cache"; None for both. Memory that is not freed is ignored.

        Raises:
            UnsupportedParameter: A tag is unknown.
            EngineError: The engine is broken or closed.
        """
        self._checks.check_wake_up(tags)

        def wake_up() -> None:
            freed_tags = self.lifecycle.freed_among(tags)
            self._restore_memory(freed_tags)
            self.lifecycle.wake_up(freed_tags)
            self._admit_waiting()

        await self._run(wake_up)

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the trainer's transfer group with every rank.

        This blocks the engine's thread until the group has formed.

        The arguments are those of `InferenceEngine.connect_weights`.

        Raises:
            WeightSyncError: The engine does not support the route, or the group did not form in time.
            EngineError: The engine is broken or closed.
        """
        step = partial(
            WeightReceiver.connect, route=route, address=address, rank=rank, world_size=world_size, timeout_s=timeout_s
        )
        await self._run(lambda: self._call_receiver(step))

    async def begin_weights(self, manifest: Manifest) -> None:
        """Start a weight sync on every rank, and check its manifest against the model.

        The engine still serves the old weights.

        Raises:
            WeightSyncError: The manifest does not fit the model, or sends only changed tensors to a model that is not
                complete.
            EngineError: The engine sleeps without its weights, or is broken or closed.
        """

        def begin() -> None:
            self.lifecycle.check_can_load(manifest)
            self._call_receiver(partial(WeightReceiver.begin, manifest=manifest))

        await self._run(begin)

    async def receive_weights(self, bucket: Bucket) -> None:
        """Receive one bucket on every rank, verify the fingerprints of its tensors and load them.

        On the `broadcast` route the next call verifies and loads it, while its own bucket arrives. No request makes
        progress during the call, nor from the first loaded tensor until `commit_weights`.

        Raises:
            WeightSyncError: The transfer failed, or a tensor's fingerprint is wrong, possibly one of the previous
                bucket.
            EngineError: The engine is broken or closed.
        """
        await self._run(lambda: self._call_receiver(partial(WeightReceiver.receive, bucket=bucket)))

    async def commit_weights(self, version: int) -> None:
        """Finish a weight sync: verify that all tensors were loaded, serve `version`, and start waiting requests.

        Raises:
            WeightSyncError: A tensor of the manifest has not arrived, or verification failed.
            EngineError: The engine is broken or closed.
        """

        def commit() -> None:
            self._call_receiver(partial(WeightReceiver.commit, version=version))
            self._activate_weights(version)
            self.lifecycle.mark_weights_loaded()
            self._admit_waiting()

        await self._run(commit)

    async def reset_prefix_cache(self) -> None:
        """Drop the prefix cache between two steps.

        Raises:
            EngineError: The engine is broken or closed.
        """
        await self._run(self._reset_prefix_cache)

    async def close(self) -> None:
        """Stop the thread, then shut down the engine. A second call does nothing.

        Commands that have not started are cancelled, and their callers get EngineError.
        """
        if not self.lifecycle.close():
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        for future, _ in self._commands:
            future.cancel()
        try:
            self._shutdown()
        finally:
            self.lifecycle.finish_draining()

    # -- methods of subclasses ---------------------------------------------------------------------------------------

    @abstractmethod
    def _is_busy(self) -> bool:
        """True if a request has started and not finished."""

    @abstractmethod
    def _has_work(self) -> bool:
        """True if `_step` has work to do; called only while the engine is not halted."""

    @abstractmethod
    def _step(self) -> None:
        """Run one step and start waiting requests in it if `lifecycle.can_admit`."""

    def _finish_pending_steps(self) -> None:  # noqa: B027 - few engines start a step before the previous one ends
        """Wait for steps that were started and have not finished."""

    def _admit_waiting(self) -> None:  # noqa: B027 - most engines admit requests in `_step`
        """Start requests that wait outside of steps, if `lifecycle.can_admit`."""

    @abstractmethod
    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Return the log-probs of all tokens but the first of each sequence, as `InferenceEngine.score` does."""

    @abstractmethod
    def _abort(self, request_ids: Sequence[str] | None) -> None:
        """End these requests, or all if None, with the tokens sampled so far. Ignore unknown ids."""

    @abstractmethod
    def _partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return the tokens of those of these requests that have sampled some and have not finished."""

    @abstractmethod
    def _retract(self) -> None:
        """Return running requests to the queue, with the tokens sampled so far."""

    @abstractmethod
    def _fail(self, error: EngineError) -> None:
        """Drop all requests and raise `error` to their callers."""

    @abstractmethod
    def _free_memory(self, level: int, keep_weights: bool) -> int:
        """Free the memory that `sleep` names, record it in the life cycle, and return the bytes freed."""

    @abstractmethod
    def _restore_memory(self, tags: frozenset[str]) -> object:
        """Allocate the freed memory of these tags."""

    @abstractmethod
    def _call_receiver(self, step: partial[None]) -> None:
        """Call `step`, a method of WeightReceiver, with the receiver of every rank.

        Report to the life cycle if a rank is partially loaded afterwards.
        """

    @abstractmethod
    def _activate_weights(self, version: int) -> None:
        """Use the loaded weights of this version."""

    @abstractmethod
    def _reset_prefix_cache(self) -> None:
        """Drop the prefix cache."""

    @abstractmethod
    def _shutdown(self) -> None:
        """End all requests and free all resources. The thread has already ended."""


def check_device(device: torch.device) -> None:
    """Synchronize with the device and run a tiny kernel on it. Do nothing on a CPU.

    Raises:
        RuntimeError: The device reports an error. Running out of memory is not an error here.
    """
    if device.type == "cpu":
        return
    torch.cuda.synchronize(device)
    with suppress(torch.OutOfMemoryError):  # a device whose memory is full still works
        torch.ones((), device=device).item()


def poll_device_error(device: torch.device) -> None:
    """Raise the device's error if it is already known. Do not wait for pending work, and do nothing on a CPU.

    Raises:
        RuntimeError: The device has reported an error.
    """
    if device.type != "cpu":
        torch.cuda.current_stream(device).query()


class DeviceMonitor:
    """A monitor that marks an engine as broken once its accelerator no longer works in this process.

    After some errors (an illegal memory access, an assertion in a kernel) every later call to the device fails, and
    only a new process helps. The engine's queue still answers health checks then, so the device itself must be checked.
    """

    def __init__(
        self, lifecycle: Lifecycle, check_device: Callable[[], Any], poll_device_error: Callable[[], Any] = lambda: None
    ):
        """Create the monitor of one engine.

        Args:
            lifecycle: The engine's state, which the monitor changes to broken.
            check_device: Function that raises if the device of any rank of the engine does not work.
            poll_device_error: Function that raises such an error if it is already known, without waiting for the
                device.
        """
        self._lifecycle = lifecycle
        self.check_device = check_device
        self._poll_device_error = poll_device_error
        self._lost = False

    def check(self) -> None:
        """Check the device and mark the engine as broken if the device does not work. Raises nothing.

        Call it on the engine's thread after an exception that the device may have caused. It waits for the device.
        """
        self._run_check(self.check_device)

    def _run_check(self, raise_if_broken: Callable[[], Any]) -> None:
        if self._lost:
            return
        try:
            raise_if_broken()
        except Exception as error:
            self._lost = True
            self._lifecycle.fail(
                f"its accelerator no longer works in this process ({type(error).__name__}: {error}); restart the engine"
            )

    def run(self, command: Callable[[], T]) -> T:
        """Run a command, return its result, and check the device if the command raises.

        Errors of this package do not trigger the check, except a WeightSyncError, which may be a consequence of an
        earlier device error. The check after a WeightSyncError does not wait for the device, because a transfer that
        another rank aborted may still occupy it.

        Raises:
            EngineError: The command failed and the device does not work.
            Exception: The command's own error otherwise.
        """
        try:
            return command()
        except Exception as error:
            if isinstance(error, SkyRLError) and not isinstance(error, WeightSyncError):
                raise
            self._run_check(self._poll_device_error if isinstance(error, WeightSyncError) else self.check_device)
            if self._lost:
                self._lifecycle.check_alive()
            raise
