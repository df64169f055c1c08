"""What engines that compute in this process share: a thread that takes steps, the protocol around it, device checks."""

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

from skyrl_train.engines.base import Capabilities
from skyrl_train.engines.lifecycle import EngineState, Lifecycle, RunClock, result_of
from skyrl_train.engines.sampling import Checks
from skyrl_train.errors import EngineError, SkyRLError, WeightSyncError
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.wire import Bucket, Manifest

T = TypeVar("T")


class SteppedEngine(ABC):
    """An engine with a thread that takes its steps and, between two steps, runs the commands of callers.

    Commands run one at a time in order of arrival, so the data of steps and commands needs no lock. A subclass
    implements what is its own, in methods that run on the thread, and starts the thread when it is ready for it.
    """

    capabilities: Capabilities
    accelerator: Accelerator
    _checks: Checks

    def __init__(self, name: str, slots: int):
        """`slots`: how many requests the engine runs at a time."""
        self.name = name
        self.lifecycle = Lifecycle(name)
        self._clock = RunClock(slots)
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._take_steps, name=f"engine-{name}", daemon=True)

    # -- the thread --------------------------------------------------------------------------------------------------

    def _ask(self, command: Callable[[], T]) -> Future[T]:
        """Run `command` on the thread; the future gets its result or exception. Once closed, it is cancelled."""
        future: Future[T] = Future()
        with self._wake:
            if self._closing:
                future.cancel()
            else:
                self._commands.append((future, command))
                self._wake.notify()
        return future

    async def _run(self, command: Callable[[], T], *, under_way: bool = False) -> T:
        """Run `command` on the thread, by default after the steps under way. Raises EngineError once closed."""

        def run() -> T:
            if not under_way:
                self._end_steps()
            return command()

        with self.lifecycle.reason_for_cancellation():
            return await asyncio.wrap_future(self._ask(lambda: self.accelerator.run(run)))

    def _take_steps(self) -> None:
        while not self._closing:
            with self._wake:
                while not (self._commands or self._closing or self._can_step()):
                    remaining = self._clock.next_deadline() - time.monotonic()
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
                self._tick()

    def _can_step(self) -> bool:
        return not self.lifecycle.halted and self._has_work()

    def _tick(self) -> None:
        if late := self._clock.late():
            self._try(lambda: self._abort(late))
        if self._can_step():
            self._try(self._step)
        if self.lifecycle.state is EngineState.BROKEN:
            self._fail(self.lifecycle.end_error)
        if not self._is_busy():
            self.lifecycle.finish_draining()

    def _try(self, work: Callable[[], None]) -> None:
        """Do some work. A failure ends all requests, and the engine if its device is lost."""
        try:
            work()
        except Exception as error:
            if not isinstance(error, EngineError):
                self.accelerator.examine()
            self._fail(self.lifecycle.as_engine_error(error))

    # -- the protocol ------------------------------------------------------------------------------------------------

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """See InferenceEngine. Running requests, paused or not, make no progress meanwhile."""
        plain = self._checks.score(token_ids, temperature)

        def score() -> list[list[float]]:
            self.lifecycle.check_serving(only_weights=True)
            return self._score(plain, temperature)

        return await self._run(score)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See InferenceEngine."""
        await self._run(lambda: self._abort(request_ids), under_way=True)

    async def pause(self, mode: str = "keep") -> None:
        """See InferenceEngine. Requests that come while paused wait for `resume`; with "wait" so do queued ones."""
        self._checks.pause(mode)

        def pause() -> Future[None]:
            if mode == "abort":
                self._abort(None)
            if mode == "retract":
                self._retract()
            return self.lifecycle.pause(busy=mode == "wait" and self._is_busy())

        await result_of(await self._run(pause))

    async def resume(self) -> None:
        def resume() -> None:
            self.lifecycle.resume()
            self._admit_waiting()

        await self._run(resume)

    async def sleep(self, level: int = 1) -> int:
        """See InferenceEngine. Running requests are aborted, as their cache is freed."""

        def sleep() -> int:
            self._abort(None)
            return self._free(level)

        return await self._run(sleep)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """See InferenceEngine."""
        self._checks.wake_up(tags)

        def wake_up() -> None:
            woken = self.lifecycle.asleep_among(tags)
            self._allocate(woken)
            self.lifecycle.wake_up(woken)
            self._admit_waiting()

        await self._run(wake_up)

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        step = partial(
            WeightReceiver.connect, route=route, address=address, rank=rank, world_size=world_size, timeout_s=timeout_s
        )
        await self._run(lambda: self._transfer(step))

    async def begin_weights(self, manifest: Manifest) -> None:
        def begin() -> None:
            self.lifecycle.check_can_load(manifest)
            self._transfer(partial(WeightReceiver.begin, manifest=manifest))

        await self._run(begin)

    async def receive_weights(self, bucket: Bucket) -> None:
        await self._run(lambda: self._transfer(partial(WeightReceiver.receive, bucket=bucket)))

    async def commit_weights(self, version: int) -> None:
        def commit() -> None:
            self._transfer(partial(WeightReceiver.commit, version=version))
            self._serve(version)
            self.lifecycle.weights_loaded()
            self._admit_waiting()

        await self._run(commit)

    async def reset_prefix_cache(self) -> None:
        await self._run(self._forget_prompts)

    async def close(self) -> None:
        """End the thread, then the engine. Closing twice is harmless."""
        if not self.lifecycle.close():
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join)
        for future, _ in self._commands:
            future.cancel()
        try:
            self._end()
        finally:
            self.lifecycle.finish_draining()

    # -- what engines implement --------------------------------------------------------------------------------------

    @abstractmethod
    def _is_busy(self) -> bool:
        """True if a request has begun and not ended."""

    @abstractmethod
    def _has_work(self) -> bool:
        """True if `_step` has something to do; asked only when the engine is not halted."""

    @abstractmethod
    def _step(self) -> None:
        """Take one step, in which waiting requests begin if `lifecycle.admits`."""

    def _end_steps(self) -> None:  # noqa: B027 - few engines begin a step before the end of another
        """Wait for steps that were begun and not finished."""

    def _admit_waiting(self) -> None:  # noqa: B027 - most do it in `_step`
        """Let requests begin that wait outside of steps, if `lifecycle.admits`."""

    @abstractmethod
    def _score(self, token_ids: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """See InferenceEngine.score."""

    @abstractmethod
    def _abort(self, request_ids: Sequence[str] | None) -> None:
        """End these requests (None: all) with their tokens so far; unknown ids are ignored."""

    @abstractmethod
    def _retract(self) -> None:
        """Put running requests back into the queue, with their tokens so far."""

    @abstractmethod
    def _fail(self, error: EngineError) -> None:
        """Drop all requests: their callers get `error`."""

    @abstractmethod
    def _free(self, level: int) -> int:
        """Free the memory of a sleep, and note it in the life cycle; returns the bytes freed."""

    @abstractmethod
    def _allocate(self, tags: frozenset[str]) -> object:
        """Allocate the memory that is freed under these tags."""

    @abstractmethod
    def _transfer(self, step: partial[None]) -> None:
        """Run one step of a weight sync on every rank, and invalidate the weights if a rank is partially loaded."""

    @abstractmethod
    def _serve(self, version: int) -> None:
        """Use the loaded weights."""

    @abstractmethod
    def _forget_prompts(self) -> None:
        """Forget cached prompts."""

    @abstractmethod
    def _end(self) -> None:
        """End everything but the thread, which has ended, and all requests."""


def compute(device: torch.device) -> None:
    """Wait for the device, then let it compute a number. Raises its error if it cannot; does nothing on a CPU."""
    if device.type == "cpu":
        return
    torch.cuda.synchronize(device)
    with suppress(torch.OutOfMemoryError):  # a full memory is no broken device
        torch.ones((), device=device).item()


def query(device: torch.device) -> None:
    """Raises the device's error if it is known by now; waits for nothing that the device still has to do."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).query()


class Accelerator:
    """The accelerator of one engine, which is broken for good once its accelerator does not compute any more.

    After some errors (an illegal access, an assertion in a kernel) every later call of the process fails, and only a
    new process helps. But such an engine still answers questions about its queue: so its device is asked.
    """

    def __init__(self, lifecycle: Lifecycle, compute: Callable[[], Any], query: Callable[[], Any] = lambda: None):
        """`compute` and `query` raise if the device of any of the engine's ranks does not compute, as the functions."""
        self._lifecycle = lifecycle
        self.compute = compute
        self._query = query
        self._lost = False

    def examine(self) -> None:
        """Ask the device; to be called after an exception whose cause it may be, where the engine computes."""
        self._ask(self.compute)

    def _ask(self, question: Callable[[], Any]) -> None:
        if self._lost:
            return
        try:
            question()
        except Exception as error:
            self._lost = True
            self._lifecycle.fail(
                f"its accelerator does not compute any more in this process ({type(error).__name__}: {error}); "
                "it must be started again"
            )

    def run(self, command: Callable[[], T]) -> T:
        """Run a command; after an exception that is not one of ours the device is asked.

        So it is after a failed weight transfer, which tells of what went wrong before it, too; but then nobody waits:
        a transfer that another rank gave up may still be on the device. Raises EngineError instead of that exception if
        the accelerator is lost.
        """
        try:
            return command()
        except Exception as error:
            if isinstance(error, SkyRLError) and not isinstance(error, WeightSyncError):
                raise
            self._ask(self._query if isinstance(error, WeightSyncError) else self.compute)
            if self._lost:
                self._lifecycle.check_alive()
            raise
