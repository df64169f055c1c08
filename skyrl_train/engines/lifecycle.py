"""The life cycle of an engine: its states, the calls that each state rejects, and the deadlines of its requests.

    running ── pause ──► paused ── resume ──► running
    running ── pause("wait") ──► draining ── the last running request ends ──► paused
    any ── sleep ──► asleep ── wake_up of all freed memory ──► as before
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


class MemoryTag(StrEnum):
    """The parts of an engine's memory that `sleep` frees and `wake_up` allocates."""

    WEIGHTS = "weights"
    KV_CACHE = "kv_cache"


MEMORY_TAGS = frozenset(tag.value for tag in MemoryTag)
"""All memory tags."""
ABORT_RETRY_INTERVAL_S = 0.2
"""Seconds after which an abort is sent again. An abort may overtake its request on the way to a server, so it is
repeated until the server answers the request."""


def tags_freed_at_level(level: int) -> frozenset[str]:
    """Return the memory tags that `sleep(level)` frees, for engines that free only the cache at level 1."""
    return MEMORY_TAGS if level >= 2 else frozenset({MemoryTag.KV_CACHE.value})


class EngineState(StrEnum):
    """The state of an engine. If several states apply at the same time, the last one in this list is reported."""

    RUNNING = "running"
    DRAINING = "draining"
    """Running requests finish, and new requests wait."""
    PAUSED = "paused"
    """No request makes progress, and new requests wait."""
    ASLEEP = "asleep"
    """Memory is freed, and requests are rejected."""
    LOADING_WEIGHTS = "loading weights"
    """The model mixes tensors of two versions, or was discarded. Requests are rejected until a full sync."""
    BROKEN = "broken"
    """A process or device of the engine failed, and every call is rejected."""
    CLOSED = "closed"


class Lifecycle:
    """The state of one engine, its transitions, and the errors of calls that the state does not allow.

    The engine changes the state only where it runs its steps, one change at a time. Every thread may read
    the state, and may call `fail` and `close`.
    """

    def __init__(self, name: str):
        """Create the life cycle of a running engine; `name` is used in error messages."""
        self.name = name
        self._asleep: frozenset[str] = frozenset()
        """Tags of the freed memory."""
        self._lacks_weights = False
        """True if the model mixes tensors of two versions, or was discarded."""
        self._paused = False
        self._drains: list[Future[None]] = []
        """Futures of `pause` calls that wait until no request runs."""
        self._closed = False
        self._end: str | None = None
        """The first reason why the engine rejects all calls, or None."""

    @property
    def state(self) -> EngineState:
        """The current state; if several states apply, the last one in EngineState."""
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
        """True if running requests make no progress."""
        return self.state not in (EngineState.RUNNING, EngineState.DRAINING)

    @property
    def can_admit(self) -> bool:
        """True if waiting requests may start."""
        return self.state is EngineState.RUNNING

    # -- pausing -----------------------------------------------------------------------------------------------------

    def pause(self, *, busy: bool = False) -> Future[None]:
        """Pause the engine, after draining its running requests if `busy`. Does not block.

        An engine that is already halted pauses immediately, because its requests would never finish.

        Args:
            busy: True if requests are running and should finish first.

        Returns:
            A future that completes when the engine is paused. `finish_draining` and `resume` end draining.
        """
        drained: Future[None] = Future()
        if busy and not self.is_halted:
            self._drains.append(drained)
        else:
            self._paused = True
            drained.set_result(None)
        return drained

    def finish_draining(self) -> None:
        """Pause the engine if it is draining, and complete the futures of `pause`. Call it when no request runs."""
        if not self._drains:
            return
        self._paused = True
        drains, self._drains = self._drains, []
        for drained in drains:
            drained.set_result(None)

    def resume(self) -> None:
        """End the pause and any draining. Requests make progress once the engine is also awake and fully loaded."""
        self.finish_draining()
        self._paused = False

    # -- memory and weights ------------------------------------------------------------------------------------------

    def sleep(self, tags: Iterable[str], *, discards_weights: bool = False) -> frozenset[str]:
        """Record that memory was freed.

        Args:
            tags: Tags of the freed memory.
            discards_weights: True if no copy of the weights exists, so that the engine needs a full sync.

        Returns:
            Those of `tags` whose memory was not freed before.
        """
        freed = frozenset(tags) - self._asleep
        self._lacks_weights |= discards_weights and "weights" in freed
        self._asleep |= freed
        return freed

    def freed_among(self, tags: Sequence[str] | None) -> frozenset[str]:
        """Return those of `tags` whose memory is freed; None stands for all tags."""
        return self._asleep if tags is None else self._asleep.intersection(tags)

    def wake_up(self, tags: frozenset[str]) -> None:
        """Record that the memory of `tags` ("weights", "kv_cache") is allocated again. This allocates nothing."""
        self._asleep -= tags

    def check_can_load(self, manifest: Manifest) -> None:
        """Check that a weight sync with this manifest can start.

        Raises:
            EngineError: The memory of the weights is freed.
            WeightSyncError: The sync sends only changed tensors, but the engine has no complete model to change,
                because its weights were discarded or an earlier sync failed.
        """
        if MemoryTag.WEIGHTS in self._asleep:
            raise EngineError(f'Engine {self.name!r} sleeps without its weights; call wake_up(["weights"]) first.')
        if self._lacks_weights and manifest.base_version is not None:
            raise WeightSyncError(
                f"Engine {self.name!r} has no complete weights to update. Send all tensors in a full weight sync."
            )

    def invalidate_weights(self) -> None:
        """Record that the model is incomplete. The engine serves no requests until `mark_weights_loaded`.

        Call it when the first tensor of a sync is loaded, or when a tensor was lost.
        """
        self._lacks_weights = True

    def mark_weights_loaded(self) -> None:
        """Record that a complete model is loaded and verified."""
        self._lacks_weights = False

    # -- the end -----------------------------------------------------------------------------------------------------

    def fail(self, why: str) -> None:
        """Record that the engine is dead and must be restarted; only the first reason is kept."""
        self._end = self._end or f"is dead: {why}"

    def close(self) -> bool:
        """Record that the engine is closed. Return False if it was closed before."""
        was_open, self._closed = not self._closed, True
        self._end = self._end or "is closed"
        return was_open

    @property
    def end_error(self) -> EngineError:
        """The error to raise from every call once the engine is broken or closed. Do not use it before."""
        return EngineError(f"Engine {self.name!r} {self._end}.")

    @contextmanager
    def translate_cancellation(self) -> Iterator[None]:
        """Replace a CancelledError by `end_error` if the engine has ended and the calling task was not cancelled.

        An engine that closes cancels pending futures. Their callers should see that the engine is closed.
        """
        try:
            yield
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not task.cancelling():
                self.check_alive()
            raise

    # -- checks ------------------------------------------------------------------------------------------------------

    def check_alive(self) -> None:
        """Raise EngineError if the engine is broken or closed."""
        if self._end is not None:
            raise self.end_error

    def check_serving(self, *, allow_freed_cache: bool = False) -> None:
        """Check that the engine can serve requests.

        Args:
            allow_freed_cache: True if the call works while the engine sleeps without its KV cache.

        Raises:
            EngineError: The engine is broken, closed, not fully loaded, or asleep.
        """
        self.check_alive()
        if self.state is EngineState.LOADING_WEIGHTS:
            raise EngineError(
                f"Engine {self.name!r} is not fully loaded: a weight sync did not finish, or its weights were "
                "discarded. It serves no requests until then. Run a full weight sync."
            )
        if MemoryTag.WEIGHTS in self._asleep or (self._asleep and not allow_freed_cache):
            raise EngineError(f"Engine {self.name!r} is asleep; call wake_up() first.")

    def as_engine_error(self, error: Exception) -> EngineError:
        """Return `error` if it is an EngineError, otherwise an EngineError that names the engine and has it as
        cause."""
        if isinstance(error, EngineError):
            return error
        failure = EngineError(f"Engine {self.name!r} failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure

    def health(self, version: int, **counters: Any) -> EngineHealth:
        """Return a snapshot of the state.

        Args:
            version: Version of the weights that the engine serves.
            **counters: Values for the other fields of EngineHealth.

        Raises:
            EngineError: The engine is broken or closed.
        """
        self.check_alive()
        return EngineHealth(
            name=self.name,
            version=version,
            paused=self._paused or bool(self._drains or self._asleep),
            asleep=bool(self._asleep),
            partially_loaded=self._lacks_weights,
            **counters,
        )


async def await_thread_future(future: Future[T]) -> T:
    """Await a future of another thread and return its result.

    If the caller is cancelled, the work behind the future continues, and its exception is not reported as unretrieved.
    """
    return await asyncio.shield(mark_exception_retrieved(asyncio.wrap_future(future)))


class RequestDeadlines:
    """The deadlines of an engine's requests.

    A request's time starts when fewer than `max_num_seqs` earlier requests are unfinished, because the engine can then
    run it. If the time started on arrival, the long responses of a large batch would be aborted only because they had
    to wait, and training would favor short responses.
    """

    def __init__(self, max_num_seqs: int):
        """Create the deadlines of an engine that runs at most `max_num_seqs` requests at a time."""
        self._max_num_seqs = max_num_seqs
        self._waiting: dict[str, float | None] = {}
        """Request id -> seconds it may run, in order of arrival."""
        self._running: dict[str, tuple[float, float]] = {}
        """Request id -> time.monotonic() of its start and of its deadline."""

    def add(self, requests: Iterable[tuple[str, float | None]]) -> None:
        """Add requests in order of arrival, and start the time of those that the engine can run.

        Args:
            requests: Pairs of request id and seconds that the request may run; None for no deadline.
        """
        self._waiting |= dict(requests)
        self._start()

    def remove(self, request_id: str) -> float:
        """Remove a finished request, start the time of waiting requests, and record a trace span if tracing is on.

        Returns:
            Seconds since the request's time started; 0 if it never started or is unknown.
        """
        self._waiting.pop(request_id, None)
        started, _ = self._running.pop(request_id, (math.inf, 0.0))
        if started < math.inf and trace.is_enabled():
            trace.add_span("request", trace.to_unix_time(started), track="requests", overlaps=True, id=request_id)
        self._start()
        return max(0.0, time.monotonic() - started)

    def clear(self) -> None:
        """Remove all requests."""
        self._waiting.clear()
        self._running.clear()

    def expired(self) -> list[str]:
        """Return the ids of running requests whose deadline has passed."""
        now = time.monotonic()
        return [request_id for request_id, (_, expires) in self._running.items() if expires <= now]

    def next_deadline(self) -> float:
        """Return the time.monotonic() of the earliest deadline; infinity if no running request has one."""
        return min((expires for _, expires in self._running.values()), default=math.inf)

    def _start(self) -> None:
        now = time.monotonic()
        while self._waiting and len(self._running) < self._max_num_seqs:
            request_id = next(iter(self._waiting))
            seconds = self._waiting.pop(request_id)
            self._running[request_id] = now, math.inf if seconds is None else now + seconds
