"""What engines that compute in this process share: the thread that takes steps, and a check of the device."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.errors import SkyRLError, WeightSyncError

T = TypeVar("T")


class Stepper(Protocol):
    """The object whose steps the thread takes; its methods are called on the thread only."""

    def has_work(self) -> bool:
        """Whether `tick` has something to do now."""

    def wakes_at(self) -> float:
        """time.monotonic() at which `tick` must be called even without work or commands; infinity for never."""

    def tick(self) -> None:
        """Take one step; it must not raise."""


class StepThread:
    """A thread that takes an engine's steps and, between two steps, runs commands of other threads.

    Commands run one at a time in order of arrival, so their data needs no lock.
    """

    def __init__(self, stepper: Stepper, lifecycle: Lifecycle, accelerator: Accelerator):
        self._stepper = stepper
        self._lifecycle = lifecycle
        self._accelerator = accelerator
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._take_steps, name=f"engine-{lifecycle.name}", daemon=True)
        self._thread.start()

    def ask(self, command: Callable[[], Any]) -> Future[Any]:
        """Run `command` on the thread; the future gets its result or exception. Once closed, it is cancelled."""
        future: Future[Any] = Future()
        with self._wake:
            if self._closing:
                future.cancel()
            else:
                self._commands.append((future, command))
                self._wake.notify()
        return future

    async def run(self, command: Callable[[], Any]) -> Any:
        """Run `command` on the thread and return its result. Raises EngineError once the engine is closed."""
        with self._lifecycle.naming_the_end():
            return await asyncio.wrap_future(self.ask(lambda: self._accelerator.run(command)))

    def close(self) -> None:
        """Stop after the current step and wait for the thread to end; commands that have not run are cancelled."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        for future, _ in self._commands:
            future.cancel()

    def _take_steps(self) -> None:
        while not self._closing:
            with self._wake:
                while not (self._commands or self._closing or self._stepper.has_work()):
                    remaining = self._stepper.wakes_at() - time.monotonic()
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
                self._stepper.tick()


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
