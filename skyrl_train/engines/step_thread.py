"""A thread that takes an engine's steps and, between two steps, runs commands of other threads."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol


class Stepper(Protocol):
    """The object whose steps the thread takes; its methods are called on the thread only."""

    def has_work(self) -> bool:
        """Whether `tick` has something to do now."""

    def wakes_at(self) -> float:
        """time.monotonic() at which `tick` must be called even without work or commands; infinity for never."""

    def tick(self) -> None:
        """Take one step; it must not raise."""


class StepThread:
    """Runs commands one at a time in order of arrival, each between two steps: their data needs no lock."""

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
