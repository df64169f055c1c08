"""Batching of calls from many threads: calls with equal parameters share batches, which the callers run themselves."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import CancelledError
from typing import Any

from skyrl_train.errors import ConfigError, DeadlineExceeded

Run = Callable[[list[Any], Any], Sequence[Any]]


class _Submission:
    """The items of one caller and their results. Guarded by the dispatcher's lock."""

    def __init__(self, items: Sequence[Any], due: float, lock: threading.Lock):
        self.items = items
        self.results: list[Any] = [None] * len(items)
        self.missing = len(items)
        self.error: BaseException | None = None
        self.due = due
        """time.monotonic() after which it no longer waits for other items."""
        self.changed = threading.Condition(lock)

    @property
    def finished(self) -> bool:
        return self.error is not None or not self.missing

    def fail(self, error: BaseException) -> None:
        if not self.finished:
            self.error = error
        self.changed.notify()


Item = tuple[_Submission, int]


class Dispatcher:
    """Batches the items of several threads. `run(items, parameters)` answers a batch, in order.

    A batch is ready when `min_size` items with equal parameters wait, or when its oldest item has waited `wait_s`;
    `run` is called by the first caller that finds a batch ready. So there is no thread that could die or leak, and
    `run` is never called with the lock held. A batch that fails is retried once, separately for each caller's items, so
    that only callers whose items are to blame see the error. After a TimeoutError there are no further retries: all
    remaining callers get it.
    """

    def __init__(self, run: Run, min_size: int | None = None, max_size: int | None = None, wait_s: float = 10.0):
        """Create a dispatcher without a thread of its own.

        `min_size` is 1 by default, `max_size` limits a batch, and `wait_s` is in seconds. Raises ConfigError for sizes
        below 1, min_size > max_size or a negative wait.
        """
        self.min_size, self.max_size, self.wait_s = 1 if min_size is None else min_size, max_size, wait_s
        if self.min_size < 1 or (max_size is not None and max_size < self.min_size):
            raise ConfigError(
                f"min_batch_size={min_size}, max_batch_size={max_size}: both must be at least 1, and the "
                "minimum at most the maximum."
            )
        if not wait_s >= 0:
            raise ConfigError(f"batching_timeout={wait_s} must be at least 0 seconds.")
        self._run = run
        self._lock = threading.Lock()
        self._groups: dict[Hashable, deque[Item]] = {}
        self._running = 0
        self._callers = 0
        """Number of threads in `submit`."""

    def submit(self, items: Sequence[Any], parameters: Hashable, deadline_s: float) -> list[Any]:
        """Return the answers to `items`, in order; blocks until all are answered.

        Only items with equal `parameters` share a batch. Raises what `run` raised for the items, DeadlineExceeded after
        `deadline_s` seconds, or CancelledError if `cleanup` empties the queue.
        """
        end = time.monotonic() + deadline_s
        submission = _Submission(items, time.monotonic() + self.wait_s, self._lock)
        with self._lock:
            self._callers += 1
            self._groups.setdefault(parameters, deque()).extend((submission, place) for place in range(len(items)))
            try:
                self._await(submission, parameters, end, deadline_s)
            finally:
                self._callers -= 1
                if submission.missing:  # late, failed in an earlier batch, or interrupted: drop the rest
                    waiting = self._groups.pop(parameters, ())
                    if others := deque(item for item in waiting if item[0] is not submission):
                        self._groups[parameters] = others
        if submission.error is not None:
            raise submission.error
        return submission.results

    def cleanup(self, flush: bool = False, deadline_s: float = 60.0) -> None:
        """Empty the queue: callers get CancelledError or, with `flush`, their answers without waiting for more items.

        With `flush`, blocks until those calls are answered, for at most `deadline_s` seconds. New calls are accepted.
        """
        with self._lock:
            submissions = list(dict.fromkeys(submission for queue in self._groups.values() for submission, _ in queue))
            if not flush:
                self._groups.clear()
            for submission in submissions:
                submission.due = 0.0
                if flush:
                    submission.changed.notify()
                else:
                    submission.fail(CancelledError("the batching queue was cleaned up; call again"))
        end = time.monotonic() + deadline_s
        while flush and time.monotonic() < end:
            with self._lock:
                if all(submission.finished for submission in submissions):
                    return
            time.sleep(0.001)

    def state(self) -> dict[str, Any]:
        """Return the settings and the state of the queue under TorchRL's names.

        `queue_size` is the number of waiting items, `pending_futures` the number of unanswered calls; `processing` and
        `lock_state` tell if a batch is running.
        """
        with self._lock:
            return {
                "min_batch_size": self.min_size,
                "max_batch_size": self.max_size,
                "queue_size": sum(map(len, self._groups.values())),
                "processing": self._running > 0,
                "lock_state": "locked" if self._running else "unlocked",
                "pending_futures": self._callers,
                "timeout": self.wait_s,
            }

    def _await(self, submission: _Submission, parameters: Hashable, end: float, deadline_s: float) -> None:
        while not submission.finished:
            if batch := self._take(parameters):
                self._lead(batch, parameters)
                continue
            now = time.monotonic()
            if now >= end:
                raise DeadlineExceeded("an answer from the batching dispatcher", deadline_s)
            waiting = any(other is submission for other, _ in self._groups.get(parameters, ()))
            submission.changed.wait(max(0.0, (min(end, submission.due) if waiting else end) - now))

    def _take(self, parameters: Hashable) -> list[Item]:
        queue = self._groups.get(parameters)
        if not queue or (len(queue) < self.min_size and queue[0][0].due > time.monotonic()):
            return []
        batch = [queue.popleft() for _ in range(min(len(queue), self.max_size or len(queue)))]
        if not queue:
            del self._groups[parameters]
        return batch

    def _lead(self, batch: list[Item], parameters: Hashable) -> None:
        """Run a batch; the lock is held on entry and on exit."""
        self._running += 1
        self._lock.release()
        outcomes: list[tuple[list[Item], Sequence[Any] | BaseException]] = []
        try:
            outcomes = self._outcomes(batch, parameters)
        except BaseException as error:  # this thread is interrupted: the others must not wait for it
            outcomes = [(batch, error)]
            raise
        finally:
            self._lock.acquire()
            self._running -= 1
            for items, outcome in outcomes:
                for place, (submission, index) in enumerate(items):
                    if isinstance(outcome, BaseException):
                        submission.fail(outcome)
                    else:
                        submission.results[index] = outcome[place]
                        submission.missing -= 1
                        if submission.finished:
                            submission.changed.notify()

    def _outcomes(self, batch: list[Item], parameters: Any) -> list[tuple[list[Item], Sequence[Any] | BaseException]]:
        outcome = self._try(batch, parameters)
        if not isinstance(outcome, Exception):
            return [(batch, outcome)]
        callers = list(dict.fromkeys(submission for submission, _ in batch))
        outcomes: list[tuple[list[Item], Sequence[Any] | BaseException]] = []
        for submission in callers:
            items = [item for item in batch if item[0] is submission]
            if len(callers) > 1 and not isinstance(outcome, TimeoutError):  # else each retry would take as long again
                outcome = self._try(items, parameters)
            outcomes.append((items, outcome))
        return outcomes

    def _try(self, batch: list[Item], parameters: Any) -> Sequence[Any] | Exception:
        try:
            results = self._run([submission.items[index] for submission, index in batch], parameters)
            if len(results) != len(batch):
                raise RuntimeError(
                    f"The batch function returned {len(results)} answers for {len(batch)} items. It must return one "
                    "for each item, in order."
                )
            return results
        except Exception as error:
            return error
