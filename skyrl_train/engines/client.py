"""A client of many engines: routing, concurrency limits, retries when an engine dies, and calls to all engines.

The path of a request: `EngineClient.generate` waits in `_admit`, and `_attempt` sends the request through `_dispatch`
to the engine that `_route` chooses. `ProgressWatchdog` watches the call. `BatchedEngineClient` combines the requests of
all episodes into one call.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, TypeGuard, TypeVar

from skyrl_train import trace
from skyrl_train.aio import mark_exception_retrieved, with_timeout
from skyrl_train.clock import now
from skyrl_train.data.token_arrays import Tokens, to_logprob_array, to_token_array
from skyrl_train.engines.base import (
    Completion,
    EngineHealth,
    InferenceEngine,
    PauseMode,
    SampleRequest,
    StopReason,
)
from skyrl_train.engines.lifecycle import MemoryTag
from skyrl_train.errors import DeadlineExceeded, EngineError, UnsupportedParameter, WorkerDied

HEALTH_TIMEOUT_S = 30.0
"""Seconds that an engine may take to respond to a health check, an abort or a background close."""
HEALTH_CHECK_INTERVAL_S = 5.0
"""Seconds between two health checks of an engine with requests."""
PROGRESS_COUNTERS = ("generated_tokens", "prefilled_tokens", "cached_tokens", "running")
"""Fields of EngineHealth that change while an engine makes progress."""
MAX_STICKY = 1 << 16
"""Minimum capacity of the routing table, in sessions and groups. The capacity grows to four times the largest number of
requests and episodes that were open at the same time."""
MAX_STEP_S = 300.0
"""Longest step of an engine, in seconds. A step may prefill all running requests and compile kernels on first use."""
PARTIAL_TOKENS_TIMEOUT_S = 1.0
"""Seconds that `EngineClient.partial_tokens` waits for an engine. An engine that loads weights answers later."""
_FATAL_ERRORS = (EngineError, WorkerDied, DeadlineExceeded, ConnectionError)
_COUNTERS = ("generated_tokens", "prefilled_tokens", "cached_tokens", "draft_steps", "accepted_drafts")
_tickets = count()
T = TypeVar("T")


def engine_name(index: int) -> str:
    """Return the name of the run's engine with this index, such as "engine 0"."""
    return f"engine {index}"


def engine_index(name: str) -> int:
    """Return the index of the engine with this name; the inverse of `engine_name`.

    Raises:
        ValueError: `name` was not made by `engine_name`.
    """
    return int(name.removeprefix("engine "))


class EngineClient:
    """A client that routes requests to InferenceEngines, in this process or remote, and identifies each by its name.

    A session stays on the engine that has its history, and a group on the engine that has its prompt. Other requests go
    to the engine with the least load; engines of equal load take turns. Routing depends on the order of calls and not
    on time. An engine that dies gets no more requests until `replace`. The client is not thread-safe.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        deadline_s: float,
        health_check_interval_s: float = HEALTH_CHECK_INTERVAL_S,
        max_calls: int | None = None,
    ):
        """Create the client of these engines.

        Args:
            engines: Live engines. An engine without an attribute `name` is called "engine <index>".
            deadline_s: Seconds that a request without its own deadline, and every other call, may take.
            health_check_interval_s: Seconds between two health checks of an engine with requests.
            max_calls: Maximum number of concurrent `generate` calls to one engine; None for no limit.
        """
        self._health_check_interval_s = health_check_interval_s
        self._all = [
            self._new_record(engine, getattr(engine, "name", engine_name(index)))
            for index, engine in enumerate(engines)
        ]
        self._deadline_s = deadline_s
        self._sticky: OrderedDict[tuple[str, str], EngineRecord] = OrderedDict()
        self._num_routed = 0
        """Routing table: ("session" or "group", name) -> engine."""
        self._max_routing_entries = MAX_STICKY
        self._engine_of: dict[str, EngineRecord] = {}
        """The engine to which each unfinished request was sent last, by request id."""
        self._limiter = _ConcurrencyLimiter(max_calls)
        self._background: set[asyncio.Task[Any]] = set()
        self._restart_task: asyncio.Task[None] | None = None
        self._engine_available = asyncio.Event()
        """Set when an engine accepts requests again."""
        self._busy = BusyClock()
        """Clock that runs while at least one engine is busy."""
        self._removed_busy_s = self._removed_alive_s = 0.0
        """Seconds busy and seconds alive, summed over engines that have been removed."""
        self._last_counters: dict[str, float] = defaultdict(float)
        """The counters at the last call of `metrics`."""
        self._asleep = False
        self._num_holds = self._num_open = self._interruptions = self._aborts = 0
        self._wasted_tokens = 0
        """Tokens that were discarded and sampled again because a pause ended their requests."""
        self._serving = asyncio.Event()
        """Cleared while the engines sleep or load weights; requests then wait."""
        self._serving.set()
        self.restart_dead_engines: Callable[[], Awaitable[None]] | None = None
        """Callback that restarts dead engines. The client calls it if a request arrives and no engine is alive."""
        self.restarts_immediately = False
        """True if the client calls `restart_dead_engines` as soon as an engine dies, while the others continue."""

    @property
    def engines(self) -> list[InferenceEngine]:
        """The live engines, in the order in which they were added.

        Retired engines with requests are included and must receive weights, too.
        """
        return [record.engine for record in self._all if record.death_cause is None]

    @property
    def engine_names(self) -> list[str]:
        """The names of all engines, including dead and retired ones."""
        return [record.name for record in self._all]

    @property
    def retired_names(self) -> list[str]:
        """The names of retired engines, which get no new requests."""
        return [record.name for record in self._all if record.drained is not None]

    @property
    def has_live_engine(self) -> bool:
        """True if some engine accepts requests: it is alive and not retired."""
        return any(record.accepts_requests for record in self._all)

    @property
    def dead_engines(self) -> dict[str, str]:
        """The causes of death of the engines to restart, by name. Retired engines are not restarted."""
        return {
            record.name: record.death_cause
            for record in self._all
            if record.death_cause is not None and record.drained is None
        }

    @property
    def busy_s(self) -> float:
        """Seconds in which engines had requests, summed over all engines, including removed ones."""
        return self._removed_busy_s + sum(record.busy_clock.seconds for record in self._all)

    # -- adding and removing engines ---------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """Kill the processes of the dead engine `name`, or close the engine in the background if it has no `kill`.

        A dead engine that hangs still occupies its GPUs or connections. Does not block.
        """
        engine = self._find_record(name).engine
        if hasattr(engine, "kill"):
            engine.kill()
        else:
            self._in_background(with_timeout(HEALTH_TIMEOUT_S, engine.close()))

    def replace(self, name: str, engine: InferenceEngine) -> None:
        """Replace a dead engine by a new one, which gets requests from now on.

        The new engine takes over the sessions and groups that are routed to the old one, but not its caches.

        Args:
            name: Name of the dead engine. The client must have an engine of this name.
            engine: The new engine. The caller must have loaded the current weights into it.
        """
        old = self._find_record(name)
        self._count_removed(old)
        new = self._all[self._all.index(old)] = self._new_record(engine, name)
        new.drained = old.drained
        self._sticky = OrderedDict((key, new if record is old else record) for key, record in self._sticky.items())
        self._start_serving(new)

    def add(self, name: str, engine: InferenceEngine) -> None:
        """Add an engine, which gets requests from now on.

        Args:
            name: Name that no other engine has.
            engine: The engine. It must already have the current weights.
        """
        assert name not in self.engine_names, f"an engine named {name} already exists"
        self._all.append(self._new_record(engine, name))
        self._start_serving(self._all[-1])

    def retire(self, name: str) -> asyncio.Event:
        """Stop sending requests to the engine `name`.

        Until `remove` the engine takes part in pauses and weight syncs, so that its remaining requests use the newest
        weights, too.

        Returns:
            An event that is set once the engine has no requests left, or immediately if it is dead.
        """
        record = self._find_record(name)
        record.drained = asyncio.Event()
        if record.death_cause is not None or not record.load:
            record.drained.set()
        self._stop_serving(record)
        return record.drained

    def unretire(self, name: str) -> None:
        """Send requests to the retired engine `name` again."""
        record = self._find_record(name)
        record.drained = None
        self._start_serving(record)

    def remove(self, name: str) -> InferenceEngine:
        """Remove the retired engine `name` from the client and return it without closing it.

        Requests that it still has are sent to other engines as soon as its calls fail.
        """
        record = self._find_record(name)
        self._count_removed(record)
        self._all.remove(record)
        self._sticky = OrderedDict((key, other) for key, other in self._sticky.items() if other is not record)
        return record.engine

    def _start_serving(self, record: EngineRecord) -> None:
        self._engine_available.set()
        self._limiter.grant_free_calls(record)

    def _stop_serving(self, record: EngineRecord) -> None:
        self._limiter.wake_waiters(record)
        if not self.has_live_engine:
            self._limiter.wake_waiters(None)

    def _mark_dead(self, record: EngineRecord, error: BaseException) -> None:
        record.death_cause = record.death_cause or f"{type(error).__name__}: {error}"
        self._stop_serving(record)

    def _count_removed(self, record: EngineRecord) -> None:
        self._removed_busy_s += record.busy_clock.seconds
        self._removed_alive_s += now() - record.created_at

    def _new_record(self, engine: InferenceEngine, name: str) -> EngineRecord:
        return EngineRecord(
            engine, name, ProgressWatchdog(name, lambda: engine.health(), self._health_check_interval_s), BusyClock()
        )

    def _find_record(self, name: str) -> EngineRecord:
        return next(record for record in self._all if record.name == name)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest], *, skip_limit: bool = False) -> list[Completion]:
        """Sample a completion for each request. Every engine gets its share of the requests in one call.

        Requests wait while the engines sleep or load weights. If an engine dies, its requests are sent once more, to
        the other engines or to engines that `restart_dead_engines` starts. The death of a retired engine does not count
        as this retry.

        Args:
            requests: The requests. If all belong to the same session or group, they wait until an engine has fewer than
                `max_calls` calls; otherwise they never wait for that limit.
            skip_limit: True to send the requests without waiting for the concurrency limit.

        Returns:
            Completions in request order.

        Raises:
            EngineError: No engine is left, requests were lost twice, or the logits of a request were not finite.
            UnsupportedParameter: An engine does not support a parameter of a request.
            DeadlineExceeded: The engines slept or loaded weights for longer than the client's deadline.
        """
        call = _GenerateCall(dict(enumerate(requests)))
        failed_engines: set[EngineRecord] = set()
        self._change_open(len(requests))
        try:
            while call.missing:
                await self._admit(call, failed_engines, bounded=not skip_limit)
                if call.missing and (
                    self.has_live_engine or self.restart_dead_engines is None or not self.dead_engines
                ):
                    await self._attempt(call, failed_engines)
        finally:
            self._change_open(-len(requests))
            self._limiter.release(call)
            for request in requests:
                self._engine_of.pop(request.request_id, None)
        return [call.completions[number] for number in range(len(requests))]

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return the tokens that running requests have sampled so far; see `InferenceEngine.partial_tokens`.

        Each engine is asked for its own requests. An engine that fails or does not answer within a second contributes
        nothing: `generate` raises its error.
        """
        ids: dict[EngineRecord, list[str]] = defaultdict(list)
        for request_id in request_ids:
            if request_id in self._engine_of:
                ids[self._engine_of[request_id]].append(request_id)
        parts = await asyncio.gather(*(self._partial_tokens(record, own) for record, own in ids.items()))
        return {request_id: tokens for part in parts for request_id, tokens in part.items()}

    async def _partial_tokens(self, record: EngineRecord, request_ids: list[str]) -> dict[str, Tokens]:
        try:
            return await with_timeout(PARTIAL_TOKENS_TIMEOUT_S, record.engine.partial_tokens(request_ids))
        except (*_FATAL_ERRORS, TimeoutError):
            return {}

    async def _admit(self, call: _GenerateCall, failed_engines: set[EngineRecord], *, bounded: bool) -> None:
        """Wait until the engines serve requests and, if `bounded`, until an engine has capacity for the call.

        No other method makes a request wait before it is sent. A call that a pause ended keeps its reservation, or it
        would queue behind newer calls. A call that lost its engine has waited already and needs no reservation.
        """
        await self._wait_until_serving()
        if not self.has_live_engine and self.restart_dead_engines is not None:
            await self.wait_for_restart()
        if failed_engines or (call.reserved_engine is not None and not call.reserved_engine.accepts_requests):
            self._limiter.release(call)
        if bounded and not failed_engines and self._limiter.max_calls is not None and call.shares_engine:
            keys = _routing_keys(next(iter(call.missing.values())))
            while call.reserved_engine is None and call.missing and self.has_live_engine:
                await self._limiter.acquire(call, self._sticky_engine(keys, ()), self._all)
        await self._wait_until_serving()

    async def _attempt(self, call: _GenerateCall, failed_engines: set[EngineRecord]) -> None:
        """Send the unfinished requests of a call, and add engines that died with requests of it to `failed_engines`."""
        interruptions, aborts = self._interruptions, self._aborts
        failed = await self._dispatch(call, failed_engines)
        if aborts != self._aborts:
            self._drop_aborted(call)
        call.update()
        # An engine that has just begun to sleep or to load weights rejects requests but is alive.
        interrupted = self._interruptions != interruptions
        died = {
            record: error for record, error in failed.items() if not (interrupted and isinstance(error, EngineError))
        }
        for record, error in died.items():
            if not (isinstance(error, EngineError) and await self._is_healthy(record)):
                self._mark_dead(record, error)
                if self.restarts_immediately and self.restart_dead_engines is not None:
                    self._ensure_restart()
        died = {record: error for record, error in died.items() if record.drained is None}
        if died and (failed_engines or not (self.has_live_engine or self.restart_dead_engines)):
            record, error = next(iter(died.items()))
            cause = "" if record.death_cause else f" {record.name}: {type(error).__name__}: {error}"
            problem = f"Requests were lost and could not be sent to another engine ({len(self.engines)} left)."
            raise EngineError(f"{problem}{cause} {self._describe_deaths()}".rstrip()) from error
        failed_engines.update(died)

    async def _dispatch(
        self, call: _GenerateCall, avoid: Collection[EngineRecord]
    ) -> dict[EngineRecord, BaseException]:
        """Send the unfinished requests, store their completions, and return the errors of the engines that failed."""
        parts: dict[EngineRecord, dict[int, SampleRequest]] = defaultdict(dict)
        for number, request in call.missing.items():
            record = self._engine_of[request.request_id] = self._route(request, avoid, call.reserved_engine)
            parts[record][number] = request
            record.load += _token_load(request)
        results: list[list[Completion] | BaseException]
        if len(parts) == 1:  # as for most conversations; no task is needed
            ((record, part),) = parts.items()
            try:
                results = [await self._generate(record, list(part.values()))]
            except asyncio.CancelledError:
                raise
            except BaseException as error:
                results = [error]
            finally:
                record.remove_load(sum(map(_token_load, part.values())))
        else:
            tasks = [
                asyncio.ensure_future(self._generate(record, list(part.values()))) for record, part in parts.items()
            ]
            for task, (record, part) in zip(tasks, parts.items(), strict=True):  # called even if a task never starts
                task.add_done_callback(partial(record.remove_load, sum(map(_token_load, part.values()))))
            results = await asyncio.gather(*tasks, return_exceptions=True)
        failed: dict[EngineRecord, BaseException] = {}
        for (record, part), result in zip(parts.items(), results, strict=True):
            if not isinstance(result, BaseException):
                call.completions.update(zip(part, result, strict=True))
            elif _is_death(result):
                failed[record] = result
            else:
                raise result
        return failed

    def _drop_aborted(self, call: _GenerateCall) -> None:
        """Discard the completions of requests that a pause aborted, but keep those whose own deadline passed."""
        for number, request in call.missing.items():
            completion = call.completions.get(number)
            if completion is None or completion.stop_reason != StopReason.ABORT:
                continue
            if request.deadline_s is None or completion.running_s < request.deadline_s:
                self._wasted_tokens += len(completion.token_ids)
                del call.completions[number]

    async def _generate(self, record: EngineRecord, requests: list[SampleRequest]) -> list[Completion]:
        # Short deadlines of these requests do not lower the limit: the engine may be busy with long requests of others.
        limit = max([self._deadline_s, *(request.deadline_s or 0.0 for request in requests)]) + HEALTH_TIMEOUT_S
        self._busy.change(1)
        record.busy_clock.change(1)
        try:
            return await record.watchdog.watch(record.engine.generate(requests), limit)
        except (asyncio.CancelledError, DeadlineExceeded):
            # A remote engine does not notice that its caller no longer waits.
            self._in_background(self._abort_quietly(record, [request.request_id for request in requests]))
            raise
        finally:
            self._busy.change(-1)
            record.busy_clock.change(-1)

    def _sticky_engine(self, keys: Sequence[tuple[str, str]], avoid: Collection[EngineRecord]) -> EngineRecord | None:
        """Return the engine that has the history of a request's session, or else the prompt of its group, or None."""
        records = [self._sticky[key] for key in keys if key in self._sticky]
        return next((record for record in records if record.accepts_requests and record not in avoid), None)

    def _route(
        self, request: SampleRequest, avoid: Collection[EngineRecord], reserved_engine: EngineRecord | None
    ) -> EngineRecord:
        """Choose the engine for a request and store it in the routing table.

        Args:
            request: The request.
            avoid: Engines that lost requests of this call.
            reserved_engine: The engine that has capacity for the request's call, if the call waited for one.
        """
        keys = _routing_keys(request)
        if reserved_engine is not None and reserved_engine.accepts_requests:
            # While the call waited, other requests of its group may have been routed to another engine. Its own
            # session has not.
            record = self._sticky_engine([key for key in keys if key[0] == "session"], avoid) or reserved_engine
        else:
            record = self._sticky_engine(keys, avoid) or self._least_loaded(keys, avoid)
        for key in keys:
            self._sticky[key] = record
            self._sticky.move_to_end(key)
        while len(self._sticky) > self._max_routing_entries:
            self._sticky.popitem(last=False)
        self._num_routed += 1
        record.last_routed = self._num_routed
        return record

    def _least_loaded(self, keys: Sequence[tuple[str, str]], avoid: Collection[EngineRecord]) -> EngineRecord:
        """Return the engine with the least load outside of `avoid`, or among all live engines if all are in `avoid`.

        An engine that has served `keys` takes precedence. Engines of equal load take turns."""
        alive = [record for record in self._all if record.accepts_requests]
        if not alive:
            raise EngineError(f"No inference engine is left. {self._describe_deaths()}")
        candidates = [record for record in alive if record not in avoid] or alive
        sticky = next((self._sticky[key] for key in keys if self._sticky.get(key) in candidates), None)
        return min(candidates, key=_load_and_turn) if sticky is None else sticky

    def _describe_deaths(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.dead_engines.items())

    async def _is_healthy(self, record: EngineRecord) -> bool:
        """True if an engine that failed a call is healthy, so that only the requests of that call are lost."""
        try:
            health = await with_timeout(HEALTH_TIMEOUT_S, record.engine.health())
        except (*_FATAL_ERRORS, TimeoutError):
            return False
        return not health.partially_loaded

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Keep room in the routing table for an episode, so that its session and group stay there between its turns."""
        self._change_open(1)
        try:
            yield
        finally:
            self._change_open(-1)

    def _change_open(self, number: int) -> None:
        self._num_open += number
        self._max_routing_entries = max(self._max_routing_entries, 4 * self._num_open)

    async def _abort_quietly(self, record: EngineRecord, request_ids: list[str]) -> None:
        try:
            await with_timeout(HEALTH_TIMEOUT_S, record.engine.abort(request_ids))
        except Exception as error:
            self._mark_dead(record, error)

    async def wait_for_restart(self) -> None:
        """Restart dead engines and wait until an engine accepts requests.

        All callers share one restart, which continues if a caller is cancelled. If `restarts_immediately`, the first
        engine that is available ends the wait; otherwise the whole restart does. Requires `restart_dead_engines`.

        Raises:
            Exception: The error with which the restart failed.
        """
        restart = self._ensure_restart()
        if self.restarts_immediately:
            self._engine_available.clear()
            available = asyncio.ensure_future(self._engine_available.wait())
            try:
                await asyncio.wait({restart, available}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                available.cancel()
            if self.has_live_engine:
                return
        await asyncio.shield(restart)

    def _ensure_restart(self) -> asyncio.Task[None]:
        """Return the running restart, or start one."""
        assert self.restart_dead_engines is not None
        if self._restart_task is None or self._restart_task.done():
            self._restart_task = self._in_background(self.restart_dead_engines())
        return self._restart_task

    def start_restart(self) -> None:
        """Start restarting dead engines in the background while the others continue. Do nothing if none is dead.

        Raises:
            Exception: The error with which the previous restart failed.
        """
        if not self.dead_engines or self.restart_dead_engines is None:
            return
        previous = self._restart_task
        if previous is not None and previous.done() and not previous.cancelled():
            error = previous.exception()
            if error is not None:
                raise error
        self._ensure_restart()

    def _in_background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return mark_exception_retrieved(task)

    # -- all engines -------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort these requests on all live engines, and complete those that wait for capacity without any token."""
        for call in self._limiter.waiting:
            call.abort(request_ids)
        await self._call_all("abort", request_ids)

    async def pause(self, mode: str = "keep") -> None:
        """Stop sampling on all live engines until `resume`, and return when they are paused.

        An engine that does not respond or does not finish its current step in time is marked dead.

        Args:
            mode: A PauseMode that decides what happens to running requests; see `InferenceEngine.pause`.

        Raises:
            UnsupportedParameter: An engine does not support the mode.
            EngineError: No live engine is left, and dead engines are not restarted.
        """
        await self._call_all("pause", mode, waits_for_step=mode != PauseMode.WAIT)

    async def resume(self) -> None:
        """Let all live engines continue sampling after `pause`.

        An engine that does not finish its step in time is marked dead.

        Raises:
            EngineError: No live engine is left, and dead engines are not restarted.
        """
        await self._call_all("resume", waits_for_step=True)

    @asynccontextmanager
    async def pause_requests(self, mode: str) -> AsyncIterator[None]:
        """Pause all engines inside the context and hold back new requests; resume the engines on exit.

        Args:
            mode: A PauseMode. With "abort", running requests are sampled again from the start with the same seed after
                the context, and their callers notice nothing.
        """
        async with self.hold_requests():
            if mode == PauseMode.ABORT:
                self._aborts += 1
            with trace.span(f"paused: {mode}", track="engines", overlaps=True):
                await self.pause(mode)
                try:
                    yield
                finally:
                    await self.resume()

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> int:
        """Put all live engines to sleep and hold back requests until `wake_up`.

        Kills the processes of dead engines, because one that hangs would keep its memory.

        Args:
            level: 1 frees the KV cache; 2 also frees the weights.
            keep_weights: True to free only the KV cache, also in vLLM, which otherwise moves weights at level 1.

        Returns:
            Bytes freed by all engines together.

        Raises:
            EngineError: No live engine is left, and dead engines are not restarted.
        """
        self._asleep = True
        self._update_serving()
        self._kill_dead_engines()  # before the call, because memory is freed some time after a process was killed
        freed = sum(await self._call_all("sleep", level, keep_weights))
        self._kill_dead_engines()
        return freed

    def _kill_dead_engines(self) -> None:
        for record in self._all:
            if record.death_cause is not None and hasattr(record.engine, "kill"):
                record.engine.kill()

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Let all live engines allocate the memory that `sleep` freed.

        Requests continue once the memory of the KV cache is allocated. An engine that does not respond in time is
        marked dead.

        Args:
            tags: Memory to allocate: "weights" or "kv_cache"; None for both.

        Raises:
            UnsupportedParameter: A tag is unknown.
            EngineError: No live engine is left, and dead engines are not restarted.
        """
        await self._call_all("wake_up", tags)
        self._asleep = self._asleep and tags is not None and MemoryTag.KV_CACHE not in tags
        self._update_serving()

    @asynccontextmanager
    async def hold_requests(self) -> AsyncIterator[None]:
        """Hold back new requests inside the context, while running requests continue.

        Engines that load weights reject requests, and would be marked dead for that.
        """
        self._num_holds += 1
        self._update_serving()
        try:
            with trace.span("requests are held", track="engines", overlaps=True):
                yield
        finally:
            self._num_holds -= 1
            self._update_serving()

    def _update_serving(self) -> None:
        if self._asleep or self._num_holds:
            self._serving.clear()
            self._interruptions += 1
        else:
            self._serving.set()

    async def _wait_until_serving(self) -> None:
        if self._serving.is_set():
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._serving.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("engines that sleep or load weights", self._deadline_s) from error

    async def reset_prefix_cache(self) -> None:
        """Drop the prefix caches of all live engines. An engine that does not respond in time is marked dead."""
        await self._call_all("reset_prefix_cache")

    async def health(self) -> list[EngineHealth]:
        """Return the health of all live engines, in the order in which they were added.

        Engines that do not respond within HEALTH_TIMEOUT_S seconds are marked dead and left out of the result.

        Raises:
            EngineError: No live engine is left, and dead engines are not restarted. DeadlineExceeded instead if the
                first one did not respond in time.
        """
        return await self._call_all("health", deadline_s=HEALTH_TIMEOUT_S)

    async def cancel_restart(self) -> None:
        """Cancel a running restart, in which the trainer's ranks may take part, and never start another one.

        Clears `restart_dead_engines`, and waits until the restart has ended.
        """
        self.restart_dead_engines = None
        if self._restart_task is not None:
            await self._cancel([self._restart_task])

    async def close(self) -> None:
        """Cancel background work and close every live engine.

        Raises:
            Exception: The first error of an engine, after all engines were tried.
        """
        await self._cancel(self._background)
        await self._call_all("close")

    async def _cancel(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel tasks and wait until they have ended and released their resources."""
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=HEALTH_TIMEOUT_S)

    async def metrics(self) -> dict[str, float]:
        """Return the metrics engines/* and memory/engine_*, and start a new measuring interval.

        Since the last call: generated tokens per second during which requests were running, the fraction of time in
        which an engine had no requests, the fraction of prompt tokens that needed no prefill, the tokens that were
        discarded because a pause ended their requests, and with speculative decoding the accepted drafts per step. At
        the moment: running and queued requests, the number of engines that accept requests, the number of dead engines,
        and the memory of the engine that needs most.
        """
        healths = await self.health()
        counters = {name: float(sum(getattr(health, name) for health in healths)) for name in _COUNTERS}
        counters |= {"any_busy_s": self._busy.seconds, "busy_s": self.busy_s}
        counters["alive_s"] = self._removed_alive_s + sum(now() - record.created_at for record in self._all)
        counters["wasted"] = float(self._wasted_tokens)
        # A restarted engine counts from 0 again.
        deltas = {name: max(0.0, count - self._last_counters[name]) for name, count in counters.items()}
        self._last_counters = defaultdict(float, counters)
        prompt_tokens = deltas["prefilled_tokens"] + deltas["cached_tokens"]
        steps = deltas["draft_steps"]
        drafts = {"engines/accepted_drafts_per_step": deltas["accepted_drafts"] / steps} if steps else {}
        return {
            "engines/tokens_per_s": deltas["generated_tokens"] / max(deltas["any_busy_s"], 1e-9),
            "engines/idle": 1.0 - min(1.0, deltas["busy_s"] / max(deltas["alive_s"], 1e-9)),
            "engines/wasted_tokens": deltas["wasted"],
            "engines/prefix_cache_hit_rate": deltas["cached_tokens"] / max(prompt_tokens, 1.0),
            **drafts,
            "engines/running": float(sum(health.running for health in healths)),
            "engines/queued": float(
                sum(health.queued for health in healths) + sum(len(call.missing) for call in self._limiter.waiting)
            ),
            "engines/count": float(sum(record.accepts_requests for record in self._all)),
            "engines/dead": float(len(self.dead_engines)),
            **_memory_peaks(healths),
        }

    async def reset_statistics(self) -> None:
        """Drop the prefix caches and reset the counters of `metrics`, for example before the first training step."""
        await self.reset_prefix_cache()
        await self.metrics()

    async def _call_all(
        self, method: str, *args: Any, deadline_s: float | None = None, waits_for_step: bool = False
    ) -> list[Any]:
        """Call a method on every live engine concurrently and return the results of those that do not die in the call.

        All calls finish before the first error is raised. The death of an engine is not an error while another engine
        is alive or dead engines can be restarted.

        Args:
            method: Name of the method.
            *args: Its arguments.
            deadline_s: Limit of the call in seconds, if it is less than the client's deadline.
            waits_for_step: True if the call waits for the engine's current step, during which the engine still responds
                to health checks.
        """
        records = [record for record in self._all if record.death_cause is None]
        limit = self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s)
        calls = []
        for record in records:
            call = getattr(record.engine, method)(*args)
            if waits_for_step:
                calls.append(record.watchdog.watch(call, min(limit, MAX_STEP_S), method))
            else:
                calls.append(_with_deadline(limit, f"{record.name}.{method}", call))
        results = await asyncio.gather(*calls, return_exceptions=True)
        for record, result in zip(records, results, strict=True):
            if _is_death(result):
                self._mark_dead(record, result)
        for result in results:
            if isinstance(result, BaseException) and not (
                _is_death(result) and (self.has_live_engine or self.restart_dead_engines)
            ):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]


@dataclass(eq=False, slots=True)
class EngineRecord:
    """An engine and its state in the client. A replacement under the same name gets a new record."""

    engine: InferenceEngine
    name: str
    watchdog: ProgressWatchdog
    busy_clock: BusyClock
    load: int = 0
    """Sum of prompt length and max_tokens over the running requests, in tokens."""
    calls: int = 0
    """Number of calls that have reserved this engine; see _ConcurrencyLimiter."""
    last_routed: int = 0
    """Number of the last request that was routed here, among those of the client; 0 if there is none."""
    death_cause: str | None = None
    """The first error, after which the engine gets no more requests; None while it is alive."""
    created_at: float = field(default_factory=now)
    drained: asyncio.Event | None = None
    """Event of a retired engine, set when it has no requests left; None for an engine that is not retired."""

    @property
    def accepts_requests(self) -> bool:
        """True if the engine is alive and not retired."""
        return self.death_cause is None and self.drained is None

    def remove_load(self, tokens: int, _: object = None) -> None:
        """Subtract the tokens of finished requests from the load, and set `drained` when no load is left."""
        self.load -= tokens
        if self.drained is not None and not self.load:
            self.drained.set()


class BusyClock:
    """A clock that runs while at least one call is running."""

    def __init__(self) -> None:
        self._running = 0
        self._seconds = self._changed_at = 0.0

    def change(self, calls: int) -> None:
        """Add `calls` to the number of running calls; a negative number removes calls."""
        self._seconds, self._changed_at = self.seconds, now()
        self._running += calls

    @property
    def seconds(self) -> float:
        """Seconds in which at least one call was running."""
        return self._seconds + (now() - self._changed_at if self._running else 0.0)


class ProgressWatchdog:
    """A watchdog that detects an engine without progress, for all calls that wait for the engine.

    A `generate` call may wait for the requests before it, so no fixed deadline fits it. But a live engine responds to
    health checks, and the token counters of a working engine change.
    """

    def __init__(
        self,
        name: str,
        health: Callable[[], Awaitable[EngineHealth]],
        health_check_interval_s: float = HEALTH_CHECK_INTERVAL_S,
    ):
        self._name = name
        self._health_check_interval_s = health_check_interval_s
        self._health = health
        self._counters: tuple[int, ...] = ()
        self._moved_at = self._checked_at = -math.inf
        """The times of the last observed change of a counter, and of the last health check."""

    async def watch(self, call: Awaitable[T], stall_timeout_s: float, method: str = "generate") -> T:
        """Await a call to the engine, check the engine's health meanwhile, and return the call's result.

        The call is cancelled if the engine stalls, and if the caller is cancelled.

        Args:
            call: The call.
            stall_timeout_s: Seconds without a change of the engine's counters after which the engine has stalled.
            method: Name of the call, for the error message.

        Raises:
            DeadlineExceeded: The engine stalled or did not respond to a health check.
            Exception: The error of the call, or of a health check.
        """
        task, started_at = asyncio.ensure_future(call), now()
        interval_s = min(self._health_check_interval_s, stall_timeout_s)
        try:
            while not (await asyncio.wait([task], timeout=interval_s))[0]:
                await self._check_health(interval_s)
                stalled = now() - max(started_at, self._moved_at) > stall_timeout_s
                if stalled and not task.done():
                    raise DeadlineExceeded(f"{self._name}.{method}", stall_timeout_s)
            return task.result()
        finally:
            task.cancel()
            mark_exception_retrieved(task)

    async def _check_health(self, interval_s: float) -> None:
        """Read the engine's counters, unless another call has just done so."""
        checked_at = now()
        if checked_at - self._checked_at < interval_s / 2:
            return
        self._checked_at = checked_at
        health = await _with_deadline(HEALTH_TIMEOUT_S, f"{self._name}.health", self._health())
        counters = tuple(getattr(health, name) for name in PROGRESS_COUNTERS)
        if counters != self._counters:
            self._counters, self._moved_at = counters, now()


@dataclass(eq=False)
class _GenerateCall:
    """The state of one `generate` call: unfinished requests, completions, and its reservation or place in a queue."""

    missing: dict[int, SampleRequest]
    """Requests without a completion, by their index in the call."""
    completions: dict[int, Completion] = field(default_factory=dict)
    reserved_engine: EngineRecord | None = None
    """The engine that counts this call toward its limit; see _ConcurrencyLimiter."""
    ticket: int = field(default_factory=lambda: next(_tickets))
    wakeup: asyncio.Future[None] | None = None
    """Set while the call waits in a queue."""

    @property
    def shares_engine(self) -> bool:
        """True if all requests belong to the same group or session, or if there is only one request."""
        return len({request.group or request.session or request.request_id for request in self.missing.values()}) == 1

    @property
    def is_waiting(self) -> bool:
        return self.wakeup is not None and not self.wakeup.done()

    def wake(self) -> None:
        """End the call's wait: it has a reservation, or must choose an engine again."""
        if self.is_waiting:
            self.wakeup.set_result(None)  # type: ignore[union-attr]

    def update(self) -> None:
        """Remove the requests that have a completion from `missing`."""
        self.missing = {number: request for number, request in self.missing.items() if number not in self.completions}

    def abort(self, request_ids: Collection[str]) -> None:
        """Complete these requests without a token. Call it only while no engine has them."""
        for number, request in self.missing.items():
            if request.request_id in request_ids:
                no_tokens = to_token_array(()), to_logprob_array(()), to_logprob_array(())
                self.completions[number] = Completion(request.request_id, *no_tokens, StopReason.ABORT.value, [])
        self.update()
        if not self.missing:
            self.wake()


class _ConcurrencyLimiter:
    """A limit of `max_calls` concurrent calls for each engine. Other calls wait here and continue in order of arrival.

    A call whose session or group has a sticky engine waits for that engine. All other calls go to the first engine with
    capacity. At least one request of a call is unfinished, so an engine without capacity has at least `max_calls`
    requests.
    """

    def __init__(self, max_calls: int | None):
        self.max_calls = max_calls
        self._queues: dict[EngineRecord | None, list[tuple[int, _GenerateCall]]] = {}
        """Heaps of tickets and calls, by the engine that they wait for; under None those that wait for any engine."""

    @property
    def waiting(self) -> list[_GenerateCall]:
        """The waiting calls, in no order."""
        return [call for queue in self._queues.values() for _, call in queue if call.is_waiting]

    async def acquire(
        self, call: _GenerateCall, sticky_engine: EngineRecord | None, engines: Sequence[EngineRecord]
    ) -> None:
        """Reserve `sticky_engine` for the call, or any engine if that is None, and wait until one has capacity.

        On return the call has no reservation if it must choose an engine again.
        """
        candidates = engines if sticky_engine is None else [sticky_engine]
        free = min(filter(self._has_capacity, candidates), key=_load_and_turn, default=None)
        if free is not None:
            self._reserve(free, call)
            return
        call.wakeup = asyncio.get_running_loop().create_future()
        heappush(self._queues.setdefault(sticky_engine, []), (call.ticket, call))
        await call.wakeup

    def release(self, call: _GenerateCall) -> None:
        """Release the reservation of a call that has ended or moves to another engine, if it has one."""
        if call.reserved_engine is not None:
            engine, call.reserved_engine = call.reserved_engine, None
            engine.calls -= 1
            self.grant_free_calls(engine)

    def grant_free_calls(self, engine: EngineRecord) -> None:
        """Reserve the engine's free capacity for the calls that have waited longest, if it accepts requests."""
        while self._has_capacity(engine):
            queues = [queue for queue in map(self._queues.get, (engine, None)) if queue]
            if not queues:
                return
            _, call = heappop(min(queues, key=lambda queue: queue[0][0]))
            if call.is_waiting:
                self._reserve(engine, call)
                call.wake()

    def wake_waiters(self, engine: EngineRecord | None) -> None:
        """Wake the calls that wait for this engine, or for any engine if None, so that they choose an engine again."""
        for _, call in self._queues.pop(engine, ()):
            call.wake()

    def _has_capacity(self, engine: EngineRecord) -> bool:
        return engine.accepts_requests and (self.max_calls is None or engine.calls < self.max_calls)

    def _reserve(self, engine: EngineRecord, call: _GenerateCall) -> None:
        engine.calls += 1
        call.reserved_engine = engine


def _load_and_turn(engine: EngineRecord) -> tuple[int, int]:
    """Return a key that is least for the engine with the least load, and among equal ones for that which waits longest.

    Sessions that start while all engines are idle would otherwise all stay on the first engine.
    """
    return engine.load, engine.last_routed


def _is_death(result: Any) -> TypeGuard[BaseException]:
    """True for an error after which an engine may be dead; False for other errors and for results."""
    return isinstance(result, _FATAL_ERRORS) and not isinstance(result, UnsupportedParameter)


async def _with_deadline(seconds: float, what: str, call: Awaitable[T]) -> T:
    """Return the result of `call`. Raise DeadlineExceeded, which names `what`, after `seconds`."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await call
    except TimeoutError as error:
        if deadline.expired():
            raise DeadlineExceeded(what, seconds) from error
        raise


def _routing_keys(request: SampleRequest) -> list[tuple[str, str]]:
    """Return the routing keys of a request: its session first, then its group."""
    return [(kind, name) for kind, name in (("session", request.session), ("group", request.group)) if name]


def _token_load(request: SampleRequest) -> int:
    """Return the maximum number of tokens that the request adds to an engine's cache."""
    return len(request.token_ids) + request.sampling.max_tokens


def _memory_peaks(healths: Sequence[EngineHealth]) -> dict[str, float]:
    """Return the memory of the engine that needs most, for engines that report it (see report/profiling.py)."""
    values = [(name, gib) for health in healths for name, gib in health.extra.items() if name.endswith("_gib")]
    return {f"memory/engine_{name}": max(gib for n, gib in values if n == name) for name, _ in values}


@dataclass(eq=False, slots=True)
class _PendingCall:
    """A `generate` call that waits for the calls of the other episodes."""

    episode: int
    requests: Sequence[SampleRequest]
    completions: asyncio.Future[list[Completion]]


class BatchedEngineClient:
    """A client whose `generate` waits until every live episode has called it, and then sends all requests as one call.

    The requests are ordered by the registration of episodes. So the call is the same in every run in which the same
    episodes register in the same order, however long their environments take. In exchange, each turn waits for the
    slowest episode.

    An episode is live from its registration to its end, also while it waits for its environment. A call outside of any
    episode is sent together with the next call.
    """

    def __init__(self, client: EngineClient):
        """Create a batched view of `client`."""
        self._client = client
        self._numbers = count()
        self._live: set[int] = set()
        self._waiting: dict[int, list[_PendingCall]] = {}
        """Waiting calls by episode, in order of arrival."""
        self._sends: set[asyncio.Task[None]] = set()
        self._check_scheduled = False
        self._current_episode: ContextVar[int | None] = ContextVar("episode", default=None)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Register an episode, which is live inside the context. Tasks started inside belong to it."""
        number = next(self._numbers)
        self._live.add(number)
        token = self._current_episode.set(number)
        try:
            yield
        finally:
            self._current_episode.reset(token)
            self._live.discard(number)
            self._check_soon()

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample completions in one shared call for all episodes, and return them in the order of `requests`.

        This waits until every live episode waits for completions. The requests of all of them are then sampled in one
        call of `EngineClient.generate`, which ignores the concurrency limit. An error of the shared call is raised in
        every episode that waits for it.
        """
        number = self._current_episode.get()
        call = _PendingCall(
            next(self._numbers) if number is None else number,
            requests,
            asyncio.get_running_loop().create_future(),
        )
        self._waiting.setdefault(call.episode, []).append(call)
        self._check_soon()
        try:
            return await call.completions
        finally:
            calls = self._waiting.get(call.episode, [])
            if call in calls:  # cancelled before the shared call was sent
                calls.remove(call)
                if not calls:
                    del self._waiting[call.episode]
                self._check_soon()

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return the tokens that running requests have sampled so far; see `EngineClient.partial_tokens`."""
        return await self._client.partial_tokens(request_ids)

    def _check_soon(self) -> None:
        """Schedule the check after all callbacks that are ready now, so that no episode about to register is missed."""
        if not self._check_scheduled:
            self._check_scheduled = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        self._check_scheduled = False
        # If fewer episodes wait than are live, which is the usual case, this only compares two sizes.
        if not self._waiting or not self._waiting.keys() >= self._live:
            return
        batch = [call for episode in sorted(self._waiting) for call in self._waiting[episode]]
        self._waiting = {}
        task = asyncio.get_running_loop().create_task(self._send(batch))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, batch: Sequence[_PendingCall]) -> None:
        requests = [request for call in batch for request in call.requests]
        try:
            completions = iter(await self._client.generate(requests, skip_limit=True))
        except Exception as error:
            for call in batch:
                if not call.completions.done():
                    call.completions.set_exception(error)
            return
        except asyncio.CancelledError:
            for call in batch:
                call.completions.cancel()
            raise
        for call in batch:
            own_completions = [next(completions) for _ in call.requests]
            if not call.completions.done():
                call.completions.set_result(own_completions)
