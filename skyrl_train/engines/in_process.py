"""What engines that compute in this process share: the thread that steps, request deadlines, and a device check."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import torch

from skyrl_train import trace
from skyrl_train.errors import EngineError, SkyRLError, WeightSyncError

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

    def __init__(self, stepper: Stepper, name: str):
        self._stepper = stepper
        self._name = name
        self._commands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, command: Callable[[], Any]) -> Future[Any]:
        """Run `command` on the thread; the future gets its result or exception. Raises RuntimeError once closed."""
        future: Future[Any] = Future()
        with self._wake:
            if self._closing:
                raise RuntimeError(f"thread {self._name} is closed")
            self._commands.append((future, command))
            self._wake.notify()
        return future

    def close(self) -> None:
        """Stop after the current step and wait for the thread to end; commands that have not run are cancelled."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        for future, _ in self._commands:
            future.cancel()

    def _run(self) -> None:
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


class RunClock:
    """The clocks of an engine's requests, in order of arrival.

    A request's clock starts once fewer than `slots` of those before it are unfinished: an engine that runs so many at a
    time then has room for it. If it started on arrival, the long answers of a large batch would be cut for having
    waited, and training would learn that answers are short.
    """

    def __init__(self, slots: int):
        self._slots = slots
        self._waiting: dict[str, float | None] = {}
        """Request id -> seconds it may run; in order."""
        self._running: dict[str, tuple[float, float]] = {}
        """Request id -> time.monotonic() of its start and of its deadline."""

    def add(self, requests: Iterable[tuple[str, float | None]]) -> None:
        """(request id, seconds that it may run; None: as long as it takes) of requests that arrive, in order."""
        self._waiting |= dict(requests)
        self._start()

    def remove(self, request_id: str) -> float:
        """A request is finished; returns the seconds that it has run, a span of the run's time line."""
        self._waiting.pop(request_id, None)
        started, _ = self._running.pop(request_id, (math.inf, 0.0))
        if started < math.inf and trace.on():
            trace.add("request", trace.unix(started), row="requests", overlaps=True, id=request_id)
        self._start()
        return max(0.0, time.monotonic() - started)

    def late(self) -> list[str]:
        """The requests whose deadline has passed."""
        now = time.monotonic()
        return [request_id for request_id, (_, expires) in self._running.items() if expires <= now]

    def next_deadline(self) -> float:
        """time.monotonic() at which the next request will be late; infinity for never."""
        return min((expires for _, expires in self._running.values()), default=math.inf)

    def _start(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) < self._slots:
            request_id = next(iter(self._waiting))
            seconds = self._waiting.pop(request_id)
            self._running[request_id] = now, math.inf if seconds is None else now + seconds


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
    """The accelerator of one engine; once it does not compute any more it is lost for good.

    After some errors (an illegal access, an assertion in a kernel) every later call of the process fails, and only a
    new process helps. But such an engine still answers questions about its queue: so its device is asked.
    """

    def __init__(self, engine: str, compute: Callable[[], Any], query: Callable[[], Any] = lambda: None):
        """`compute` and `query` raise if the device of any of the engine's ranks does not compute, as the functions."""
        self._engine = engine
        self._compute = compute
        self._query = query
        self._lost: str | None = None

    def examine(self) -> None:
        """Ask the device; to be called after an exception whose cause it may be, where the engine computes."""
        self._ask(self._compute)

    def _ask(self, question: Callable[[], Any]) -> None:
        if self._lost is not None:
            return
        try:
            question()
        except Exception as error:
            self._lost = f"{type(error).__name__}: {error}"

    def check(self) -> None:
        """Raises EngineError if the accelerator is lost."""
        if self._lost is not None:
            raise self._error()

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
            self._ask(self._query if isinstance(error, WeightSyncError) else self._compute)
            if self._lost is not None:
                raise self._error() from error
            raise

    def _error(self) -> EngineError:
        return EngineError(
            f"Engine {self._engine!r} is dead: its accelerator does not compute any more in this process "
            f"({self._lost}); it must be started again."
        )
