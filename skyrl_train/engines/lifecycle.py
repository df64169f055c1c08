"""The life cycle of an engine: its states, what it refuses in each, and the clocks of its requests.

    running ── pause ──► paused ── resume ──► running
    running ── pause("wait") ──► draining ── the last running request ends ──► paused
    any ── sleep ──► asleep ── wake_up of all that was freed ──► as before
    any ── first tensor of a weight sync ──► loading weights ── commit ──► as before
    any ── a process or device fails ──► broken
    any ── close ──► closed

An engine can be paused, asleep and loading weights at the same time; broken and closed are final.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from enum import StrEnum
from typing import Any, TypeVar

from skyrl_train import trace
from skyrl_train.aio import mark_exception_retrieved
from skyrl_train.engines.base import EngineHealth
from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.weight_sync.protocol import Manifest

T = TypeVar("T")

MEMORY_TAGS = frozenset({"weights", "kv_cache"})
"""The tags of what `sleep` frees and `wake_up` allocates."""
ABORT_RETRY_INTERVAL_S = 0.2
"""An abort may overtake its request on the way to a server: it is repeated until the request is answered."""


def tags_freed_at_level(level: int) -> frozenset[str]:
    """The tags of what `sleep(level)` frees, in engines that free the cache alone at level 1."""
    return MEMORY_TAGS if level >= 2 else frozenset({"kv_cache"})


class EngineState(StrEnum):
    """The state of an engine: of those that hold at the same time, the last one in this list."""

    RUNNING = "running"
    DRAINING = "draining"
    """Running requests finish; new ones wait."""
    PAUSED = "paused"
    """No request makes progress; new ones wait."""
    ASLEEP = "asleep"
    """Memory is freed; requests are refused."""
    LOADING_WEIGHTS = "loading weights"
    """The model is a mixture of two versions, or was discarded; requests are refused until a complete sync."""
    BROKEN = "broken"
    """A process or device of the engine failed; every call is refused."""
    CLOSED = "closed"


class Lifecycle:
    """The state of one engine, its transitions, and the errors of calls that the state does not allow.

    The engine changes it where it takes steps, one change at a time. Every thread may read it, fail it or close it.
    """

    def __init__(self, name: str):
        """`name`: the engine's, for messages."""
        self.name = name
        self._asleep: frozenset[str] = frozenset()
        """The tags of the memory that is freed."""
        self._lacks_weights = False
        """True if the model is a mixture of two versions, or was discarded."""
        self._paused = False
        self._drains: list[Future[None]] = []
        """Calls of `pause` that wait until no request runs."""
        self._closed = False
        self._end: str | None = None
        """Why the engine answers no more calls: the first reason."""

    @property
    def state(self) -> EngineState:
        if self._closed:
            return EngineState.CLOSED
        if self._end is not None:
            return EngineState.BROKEN
        if self._lacks_weights:
            return EngineState.LOADING_WEIGHTS
        if self._asleep:
            return EngineState.ASLEEP
        if self._paused:
            return EngineState.PAUSED
        return EngineState.DRAINING if self._drains else EngineState.RUNNING

    @property
    def is_halted(self) -> bool:
        """True if requests make no progress."""
        return self.state not in (EngineState.RUNNING, EngineState.DRAINING)

    @property
    def can_admit(self) -> bool:
        """True if waiting requests may begin."""
        return self.state is EngineState.RUNNING

    # -- pausing -----------------------------------------------------------------------------------------------------

    def pause(self, *, busy: bool = False) -> Future[None]:
        """Pause; if `busy`, drain first, until `finish_draining`. Returns a future that is done when that is over.

        An engine that is halted already does not drain, as its requests would not finish. `resume` ends draining, too.
        """
        drained: Future[None] = Future()
        if busy and not self.is_halted:
            self._drains.append(drained)
        else:
            self._paused = True
            drained.set_result(None)
        return drained

    def finish_draining(self) -> None:
        """Pause the engine if it drains, as no request runs any more."""
        if not self._drains:
            return
        self._paused = True
        drains, self._drains = self._drains, []
        for drained in drains:
            drained.set_result(None)

    def resume(self) -> None:
        """Continue, as soon as the engine is awake and has all weights."""
        self.finish_draining()
        self._paused = False

    # -- memory and weights ------------------------------------------------------------------------------------------

    def sleep(self, tags: Iterable[str], *, discards_weights: bool = False) -> frozenset[str]:
        """Note that the memory of `tags` is freed, without a copy of the weights if these are discarded.

        Returns the tags that were awake until now.
        """
        freed = frozenset(tags) - self._asleep
        self._lacks_weights |= discards_weights and "weights" in freed
        self._asleep |= freed
        return freed

    def freed_among(self, tags: Sequence[str] | None) -> frozenset[str]:
        """Return those of `tags` (None: of all) whose memory is freed."""
        return self._asleep if tags is None else self._asleep.intersection(tags)

    def wake_up(self, tags: frozenset[str]) -> None:
        """Note that the memory of `tags` is allocated again."""
        self._asleep -= tags

    def check_can_load(self, manifest: Manifest) -> None:
        """Raise EngineError if weights have no memory, WeightSyncError if a partial sync finds no complete model."""
        if "weights" in self._asleep:
            raise EngineError(f'Engine {self.name!r} sleeps without its weights; wake_up(["weights"]) first.')
        if self._lacks_weights and manifest.base_version is not None:
            raise WeightSyncError(f"engine {self.name} has no weights to change: a complete sync is needed.")

    def invalidate_weights(self) -> None:
        """Note that a tensor of a sync is loaded, or that one was lost: nothing is served until `weights_loaded`."""
        self._lacks_weights = True

    def mark_weights_loaded(self) -> None:
        """Note that a complete model is loaded and verified."""
        self._lacks_weights = False

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Note that the engine is dead: only starting it again helps."""
        self._end = self._end or f"is dead: {why}"

    def close(self) -> bool:
        """Note that the engine is closed; returns False if it was closed before."""
        was_open, self._closed = not self._closed, True
        self._end = self._end or "is closed"
        return was_open

    @property
    def end_error(self) -> EngineError:
        """The error of every call to an engine that is broken or closed."""
        return EngineError(f"Engine {self.name!r} {self._end}.")

    @contextmanager
    def translate_cancellation(self) -> Iterator[None]:
        """Raise `end_error` instead of a CancelledError, unless it is the caller that was cancelled."""
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self.check_alive()
            raise

    # -- what is answered --------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise EngineError if the engine is broken or closed."""
        if self._end is not None:
            raise self.end_error

    def check_serving(self, *, allow_freed_cache: bool = False) -> None:
        """Raise EngineError if the engine cannot take requests; with `only_weights` it may sleep without its cache."""
        self.check_alive()
        if self.state is EngineState.LOADING_WEIGHTS:
            raise EngineError(
                f"Engine {self.name!r} holds half of a weight transfer; it serves nothing until a complete sync."
            )
        if "weights" in self._asleep or (self._asleep and not allow_freed_cache):
            raise EngineError(f"Engine {self.name!r} is asleep; wake_up() first.")

    def as_engine_error(self, error: Exception) -> EngineError:
        """Return the error for callers whose requests a failure ended: `error` itself if it is an EngineError."""
        if isinstance(error, EngineError):
            return error
        failure = EngineError(f"Engine {self.name!r} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def health(self, version: int, **counters: Any) -> EngineHealth:
        """Return the state with the engine's counters. Raises EngineError if it is broken or closed."""
        self.check_alive()
        return EngineHealth(
            name=self.name,
            version=version,
            paused=self._paused or bool(self._drains or self._asleep),
            asleep=bool(self._asleep),
            torn=self._lacks_weights,
            **counters,
        )


async def await_thread_future(future: Future[T]) -> T:
    """Await a future of the engine's thread; it goes on if the caller is cancelled."""
    return await asyncio.shield(mark_exception_retrieved(asyncio.wrap_future(future)))


class RequestDeadlines:
    """The clocks of an engine's requests, in order of arrival.

    A request's clock starts once fewer than `slots` of those before it are unfinished: an engine that runs so many at a
    time then has room for it. If it started on arrival, the long answers of a large batch would be cut for having
    waited, and training would learn that answers are short.
    """

    def __init__(self, max_num_seqs: int):
        self._max_num_seqs = max_num_seqs
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
        if started < math.inf and trace.is_enabled():
            trace.add_span("request", trace.to_unix_time(started), track="requests", overlaps=True, id=request_id)
        self._start()
        return max(0.0, time.monotonic() - started)

    def clear(self) -> None:
        """No request is under way any more."""
        self._waiting.clear()
        self._running.clear()

    def expired(self) -> list[str]:
        """The requests whose deadline has passed."""
        now = time.monotonic()
        return [request_id for request_id, (_, expires) in self._running.items() if expires <= now]

    def next_deadline(self) -> float:
        """time.monotonic() at which the next request will be late; infinity for never."""
        return min((expires for _, expires in self._running.values()), default=math.inf)

    def _start(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) < self._max_num_seqs:
            request_id = next(iter(self._waiting))
            seconds = self._waiting.pop(request_id)
            self._running[request_id] = now, math.inf if seconds is None else now + seconds
