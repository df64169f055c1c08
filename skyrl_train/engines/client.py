"""One interface to many engines: routing, limits, re-dispatch when an engine dies, calls to all with deadlines.

The path of a request: `EngineClient.generate` waits in `_admit`, `_attempt` sends it through `_dispatch` to the engine
that `_route` chooses, and `Progress` watches the call. `Lockstep` puts the requests of all episodes into one call.
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
from skyrl_train.data.token_arrays import to_logprob_array, to_token_array
from skyrl_train.engines.base import Completion, EngineHealth, SampleRequest
from skyrl_train.errors import DeadlineExceeded, EngineError, UnsupportedParameter, WorkerDied

HEALTH_TIMEOUT_S = 30.0
"""Seconds that an engine may take to answer a health check."""
HEALTH_CHECK_INTERVAL_S = 5.0
"""Seconds between two health checks of an engine with requests."""
PROGRESS_COUNTERS = ("generated_tokens", "prefilled_tokens", "cached_tokens", "running")
"""The counters that move while an engine works."""
MAX_STICKY = 1 << 16
"""Sessions and groups in the routing table; or four times the largest number that was open at once if that is more."""
MAX_STEP_S = 300.0
"""The longest step of an engine: it may prefill all that it runs, and a kernel's first use compiles it."""
_FATAL_ERRORS = (EngineError, WorkerDied, DeadlineExceeded, ConnectionError)
_TOKEN_COUNTERS = ("generated_tokens", "prefilled_tokens", "cached_tokens")
_tickets = count()
T = TypeVar("T")


def engine_name(index: int) -> str:
    """The name of a run's engine of this index."""
    return f"engine {index}"


def engine_index(name: str) -> int:
    """The index of the engine with this `engine_name`."""
    return int(name.removeprefix("engine "))


class EngineClient:
    """Routes requests to InferenceEngines, in this process or remote, which are identified by their `name`.

    A session stays on the engine that has its history, and a group on the engine that has its prompt; other requests go
    to the engine with the least load. Routing depends only on the order of calls, not on time. An engine that dies gets
    no more requests until `replace`.
    """

    def __init__(
        self,
        engines: Sequence[Any],
        *,
        deadline_s: float,
        health_check_interval_s: float = HEALTH_CHECK_INTERVAL_S,
        max_calls: int | None = None,
    ):
        """Create the client of these engines.

        Args:
            engines: The engines, all alive.
            deadline_s: The deadline of requests that have none of their own, and of all other calls.
            looks_every_s: Seconds between two health checks of an engine with requests.
            max_calls: The largest number of calls of `generate` that an engine has at a time; None for no limit.
        """
        self._health_check_interval_s = health_check_interval_s
        self._all = [
            self._new_record(one, getattr(one, "name", engine_name(index))) for index, one in enumerate(engines)
        ]
        self._deadline_s = deadline_s
        self._sticky: OrderedDict[tuple[str, str], EngineRecord] = OrderedDict()
        """The routing table: ("session" or "group", its name) -> its engine."""
        self._max_routing_entries = MAX_STICKY
        self._limiter = _ConcurrencyLimiter(max_calls)
        self._background: set[asyncio.Task[Any]] = set()
        self._restart_task: asyncio.Task[None] | None = None
        self._engine_available = asyncio.Event()
        """Set when an engine takes requests again."""
        self._busy = BusyClock()
        """Clock that runs while at least one engine is busy."""
        self._removed_busy_s = self._removed_alive_s = 0.0
        """Seconds busy and seconds alive, summed over engines that have been removed."""
        self._measured: dict[str, float] = defaultdict(float)
        """The counters at the last call of `metrics`."""
        self._asleep = False
        self._num_holds = self._num_open = self._interruptions = self._aborts = 0
        self._wasted_tokens = 0
        """Tokens of requests that a pause ended and that were sampled again."""
        self._serving = asyncio.Event()
        """Cleared while the engines sleep or take weights; requests then wait."""
        self._serving.set()
        self.restart_dead_engines: Callable[[], Awaitable[None]] | None = None
        """Restarts dead engines; called if no engine is alive when a request comes."""
        self.restarts_immediately = False
        """True if `revive` is called as soon as an engine dies, while the others go on."""

    @property
    def engines(self) -> list[Any]:
        """The living engines, in order. All of them must get weights, also retired ones that still have requests."""
        return [record.engine for record in self._all if record.death_cause is None]

    @property
    def engine_names(self) -> list[str]:
        """The names of all engines, dead and retired ones included."""
        return [record.name for record in self._all]

    @property
    def retired_names(self) -> list[str]:
        """The names of retired engines, which get no more requests."""
        return [record.name for record in self._all if record.drained is not None]

    @property
    def has_live_engine(self) -> bool:
        """True if some engine takes requests."""
        return any(record.accepts_requests for record in self._all)

    @property
    def dead_engines(self) -> dict[str, str]:
        """Name -> cause of death of the engines to restart: dead ones that were not retired."""
        return {one.name: one.death_cause for one in self._all if one.death_cause is not None and one.drained is None}

    @property
    def busy_s(self) -> float:
        """Seconds with requests, summed over engines, removed ones included."""
        return self._removed_busy_s + sum(record.busy_clock.seconds for record in self._all)

    # -- joining and leaving -----------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """End the dead engine called `name`: one that hangs still occupies its GPUs, or its connections."""
        engine = self._find_record(name).engine
        if hasattr(engine, "kill"):
            engine.kill()
        else:
            self._in_background(with_timeout(HEALTH_TIMEOUT_S, engine.close()))

    def replace(self, name: str, engine: Any) -> None:
        """Replace the dead engine called `name` by a new one, which must already have the current weights."""
        old = self._find_record(name)
        self._count_removed(old)
        new = self._all[self._all.index(old)] = self._new_record(engine, name)
        new.drained = old.drained
        self._sticky = OrderedDict((key, new if one is old else one) for key, one in self._sticky.items())
        self._start_serving(new)

    def add(self, name: str, engine: Any) -> None:
        """Add an engine, which must already have the current weights; it gets requests from now on."""
        assert name not in self.engine_names, f"there is an engine called {name} already"
        self._all.append(self._new_record(engine, name))
        self._start_serving(self._all[-1])

    def retire(self, name: str) -> asyncio.Event:
        """Send the engine called `name` no more requests; returns an event that is set once it has none left.

        Until `remove` it takes part in pauses and syncs: what it still samples is of the newest weights, too.
        """
        record = self._find_record(name)
        record.drained = asyncio.Event()
        if record.death_cause is not None or not record.load:
            record.drained.set()
        self._stop_serving(record)
        return record.drained

    def unretire(self, name: str) -> None:
        """Send requests to a retired engine again."""
        record = self._find_record(name)
        record.drained = None
        self._start_serving(record)

    def remove(self, name: str) -> Any:
        """Forget a retired engine, and return it. Its requests go to the other engines as soon as its calls fail."""
        record = self._find_record(name)
        self._count_removed(record)
        self._all.remove(record)
        self._sticky = OrderedDict((key, one) for key, one in self._sticky.items() if one is not record)
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

    def _new_record(self, engine: Any, name: str) -> EngineRecord:
        return EngineRecord(
            engine, name, ProgressWatchdog(name, lambda: engine.health(), self._health_check_interval_s), BusyClock()
        )

    def _find_record(self, name: str) -> EngineRecord:
        return next(record for record in self._all if record.name == name)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest], *, skip_limit: bool = False) -> list[Completion]:
        """Completions in request order; every engine gets its share of the requests in one call.

        The requests of one session, or of one group, wait until an engine has room for them unless they are to be sent
        `at_once`; those of several are always sent at once.

        If an engine dies, its requests are sent once more: to the others or, if none is left, to those that `revive`
        restarts; if it was to leave, that does not count. Requests wait while engines sleep or take weights; so do
        requests that an engine refused because they arrived just as that began. Raises EngineError naming the engines
        if none is left, and the engine's own UnsupportedParameter.
        """
        call = _GenerateCall(dict(enumerate(requests)))
        lost_at: set[EngineRecord] = set()
        self._change_open(len(requests))
        try:
            while call.missing:
                await self._admit(call, lost_at, bounded=not skip_limit)
                if call.missing and (
                    self.has_live_engine or self.restart_dead_engines is None or not self.dead_engines
                ):
                    await self._attempt(call, lost_at)
        finally:
            self._change_open(-len(requests))
            self._limiter.release(call)
        return [call.completions[number] for number in range(len(requests))]

    async def _admit(self, call: _GenerateCall, failed_engines: set[EngineRecord], *, bounded: bool) -> None:
        """Wait until engines serve and, if `bounded`, until one has room: the only place where a request waits here.

        A call that a pause ended keeps its place, or it would queue behind newer ones. A call that an engine lost has
        waited already, and needs none.
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
        """Send what is missing of a call; adds engines that died with requests of it to `lost_at`."""
        before, aborts = self._interruptions, self._aborts
        failed = await self._dispatch(call, failed_engines)
        if aborts != self._aborts:
            self._drop_aborted(call)
        call.update()
        # Engines that began to sleep or to take weights refuse requests, and live.
        interrupted = self._interruptions != before
        died = {one: error for one, error in failed.items() if not (interrupted and isinstance(error, EngineError))}
        for record, error in died.items():
            if not (isinstance(error, EngineError) and await self._is_healthy(record)):
                self._mark_dead(record, error)
                if self.restarts_immediately and self.restart_dead_engines is not None:
                    self._ensure_restart()
        died = {record: error for record, error in died.items() if record.drained is None}
        if died and (failed_engines or not (self.has_live_engine or self.restart_dead_engines)):
            record, error = next(iter(died.items()))
            last = "" if record.death_cause else f" {record.name}: {type(error).__name__}: {error}"
            lost = f"Requests were lost and could not be sent to another engine ({len(self.engines)} left)."
            raise EngineError(f"{lost}{last} {self._describe_deaths()}".rstrip()) from error
        failed_engines.update(died)

    async def _dispatch(
        self, call: _GenerateCall, avoid: Collection[EngineRecord]
    ) -> dict[EngineRecord, BaseException]:
        """Send the missing requests and fill in their completions; returns the engines that failed, with errors."""
        parts: dict[EngineRecord, dict[int, SampleRequest]] = defaultdict(dict)
        for number, request in call.missing.items():
            record = self._route(request, avoid, call.reserved_engine)
            parts[record][number] = request
            record.load += _token_load(request)
        results: list[list[Completion] | BaseException]
        if len(parts) == 1:  # as for most conversations: no task is needed
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
            tasks = [asyncio.ensure_future(self._generate(one, list(part.values()))) for one, part in parts.items()]
            for task, (record, part) in zip(tasks, parts.items(), strict=True):  # also if a task never begins
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
        """Forget the completions of requests that a pause ended, unless their own deadline did."""
        for number, request in call.missing.items():
            found = call.completions.get(number)
            if found is None or found.stop_reason != "abort":
                continue
            if request.deadline_s is None or found.running_s < request.deadline_s:
                self._wasted_tokens += len(found.token_ids)
                del call.completions[number]

    async def _generate(self, record: EngineRecord, requests: list[SampleRequest]) -> list[Completion]:
        # Not less because these requests have little time left: the engine may be busy with the long ones of others.
        limit = max([self._deadline_s, *(request.deadline_s or 0.0 for request in requests)]) + HEALTH_TIMEOUT_S
        self._busy.change(1)
        record.busy_clock.change(1)
        try:
            return await record.watchdog.watch(record.engine.generate(requests), limit)
        except (asyncio.CancelledError, DeadlineExceeded):
            # A remote engine does not notice that its caller has gone.
            self._in_background(self._abort_quietly(record, [request.request_id for request in requests]))
            raise
        finally:
            self._busy.change(-1)
            record.busy_clock.change(-1)

    def _sticky_engine(self, keys: Sequence[tuple[str, str]], avoid: Collection[EngineRecord]) -> EngineRecord | None:
        """The engine that has the history of a request's session, or else the prompt of its group."""
        homes = [self._sticky[key] for key in keys if key in self._sticky]
        return next((home for home in homes if home.accepts_requests and home not in avoid), None)

    def _route(
        self, request: SampleRequest, avoid: Collection[EngineRecord], reserved_engine: EngineRecord | None
    ) -> EngineRecord:
        """Return the engine for a request, and remember it. `place`: the engine with a place for its call."""
        keys = _routing_keys(request)
        if reserved_engine is not None and reserved_engine.accepts_requests:
            # Others of its group may have gone elsewhere while it waited for its place; its own session has not.
            record = self._sticky_engine([key for key in keys if key[0] == "session"], avoid) or reserved_engine
        else:
            record = self._sticky_engine(keys, avoid) or self._least_loaded(keys, avoid)
        for key in keys:
            self._sticky[key] = record
            self._sticky.move_to_end(key)
        while len(self._sticky) > self._max_routing_entries:
            self._sticky.popitem(last=False)
        return record

    def _least_loaded(self, keys: Sequence[tuple[str, str]], avoid: Collection[EngineRecord]) -> EngineRecord:
        """The engine with the least load that is not to be avoided; if all are, one that has served `keys` first."""
        alive = [record for record in self._all if record.accepts_requests]
        if not alive:
            raise EngineError(f"There is no inference engine left. {self._describe_deaths()}")
        welcome = [record for record in alive if record not in avoid] or alive
        homes = [self._sticky[key] for key in keys if key in self._sticky]
        home = next((home for home in homes if home in welcome), None)
        return min(welcome, key=lambda one: one.load) if home is None else home

    def _describe_deaths(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.dead_engines.items())

    async def _is_healthy(self, record: EngineRecord) -> bool:
        """True if an engine that failed a call is healthy: then only these requests are lost, not the engine."""
        try:
            health = await with_timeout(HEALTH_TIMEOUT_S, record.engine.health())
        except (*_FATAL_ERRORS, TimeoutError):
            return False
        return not health.torn

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """A context for an episode: between its turns, too, its session and group stay in the routing table."""
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
        """Wait for one restart of what is dead that all share; it continues even if they are cancelled.

        Where others go on while an engine is restarted, the first one that is back is enough.
        """
        reviving = self._ensure_restart()
        if self.restarts_immediately:
            self._engine_available.clear()
            back = asyncio.ensure_future(self._engine_available.wait())
            try:
                await asyncio.wait({reviving, back}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                back.cancel()
            if self.has_live_engine:
                return
        await asyncio.shield(reviving)

    def _ensure_restart(self) -> asyncio.Task[None]:
        """The restart that is under way, or a new one."""
        assert self.restart_dead_engines is not None
        if self._restart_task is None or self._restart_task.done():
            self._restart_task = self._in_background(self.restart_dead_engines())
        return self._restart_task

    def start_restart(self) -> None:
        """Begin to restart dead engines while the others go on. Raises what the last attempt has ended with."""
        if not self.dead_engines or self.restart_dead_engines is None:
            return
        last = self._restart_task
        if last is not None and last.done() and not last.cancelled() and (error := last.exception()) is not None:
            raise error
        self._ensure_restart()

    def _in_background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return mark_exception_retrieved(task)

    # -- all engines -------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See InferenceEngine; on all living engines, as are the following methods. What waits for room ends here."""
        for call in self._limiter.waiting:
            call.abort(request_ids)
        await self._call_all("abort", request_ids)

    async def pause(self, mode: str = "keep") -> None:
        """An engine that does not answer, or does not get to the end of its step, hangs, and is dead."""
        await self._call_all("pause", mode, waits_for_step=mode != "wait")

    async def resume(self) -> None:
        await self._call_all("resume", waits_for_step=True)

    @asynccontextmanager
    async def pause_requests(self, mode: str) -> AsyncIterator[None]:
        """Requests under way stop between two tokens, and go on afterwards; new ones wait. `mode`: as of `pause`.

        What "abort" ends is sent again with the same seed, as if it had just come.
        """
        async with self.hold_requests():
            if mode == "abort":
                self._aborts += 1
            with trace.span(f"paused: {mode}", track="engines", overlaps=True):
                await self.pause(mode)
                try:
                    yield
                finally:
                    await self.resume()

    async def sleep(self, level: int = 1) -> int:
        """Let all engines sleep; returns the bytes freed by all. Requests wait until `wake_up`."""
        self._asleep = True
        self._update_serving()
        return sum(await self._call_all("sleep", level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._call_all("wake_up", tags)
        self._asleep = self._asleep and tags is not None and "kv_cache" not in tags
        self._update_serving()

    @asynccontextmanager
    async def hold_requests(self) -> AsyncIterator[None]:
        """Requests that come meanwhile wait: engines that take weights refuse requests, and would count as dead."""
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
            raise DeadlineExceeded("engines that sleep or take weights", self._deadline_s) from error

    async def reset_prefix_cache(self) -> None:
        await self._call_all("reset_prefix_cache")

    async def health(self) -> list[EngineHealth]:
        return await self._call_all("health", deadline_s=HEALTH_TIMEOUT_S)

    async def cancel_restart(self) -> None:
        """Give up a restart that is under way, which the ranks of the trainer may be taking part in, and begin none."""
        self.restart_dead_engines = None
        if self._restart_task is not None:
            await self._cancel([self._restart_task])

    async def close(self) -> None:
        """Close every living engine; raises the first error after it has tried all."""
        await self._cancel(self._background)
        await self._call_all("close")

    async def _cancel(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel tasks and wait for their end: they let go of what they hold."""
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=HEALTH_TIMEOUT_S)

    async def metrics(self) -> dict[str, float]:
        """engines/* and memory/engine_*.

        Since the last call: generated tokens per second in which requests were running, the share of time in which an
        engine had none, the share of prompt tokens that needed no prefill, and the tokens that were sampled for
        nothing, as a pause ended their requests. Current values: running and queued requests, the numbers of engines
        that take requests and of dead ones, and the memory of the engine that needed most.
        """
        every = await self.health()
        counted = {kind: float(sum(getattr(one, kind) for one in every)) for kind in _TOKEN_COUNTERS}
        counted |= {"busy_s": self._busy.seconds, "each_s": self.busy_s}
        counted["there_s"] = self._removed_alive_s + sum(now() - record.created_at for record in self._all)
        counted["wasted"] = float(self._wasted_tokens)
        # A restarted engine counts from 0 again.
        since = {kind: max(0.0, count - self._measured[kind]) for kind, count in counted.items()}
        self._measured = defaultdict(float, counted)
        prompts = since["prefilled_tokens"] + since["cached_tokens"]
        return {
            "engines/tokens_per_s": since["generated_tokens"] / max(since["busy_s"], 1e-9),
            "engines/idle": 1.0 - min(1.0, since["each_s"] / max(since["there_s"], 1e-9)),
            "engines/wasted_tokens": since["wasted"],
            "engines/prefix_cache_hit_rate": since["cached_tokens"] / max(prompts, 1.0),
            "engines/running": float(sum(one.running for one in every)),
            "engines/queued": float(
                sum(one.queued for one in every) + sum(len(call.missing) for call in self._limiter.waiting)
            ),
            "engines/count": float(sum(record.accepts_requests for record in self._all)),
            "engines/dead": float(len(self.dead_engines)),
            **_memory_peaks(every),
        }

    async def reset_statistics(self) -> None:
        """Forget cached prompts and what `metrics` has counted: what ran until now does not show in what follows."""
        await self.reset_prefix_cache()
        await self.metrics()

    async def _call_all(
        self, method: str, *args: Any, deadline_s: float | None = None, waits_for_step: bool = False
    ) -> list[Any]:
        """Make the same call on every living engine concurrently; returns the results of those that do not die in it.

        `between_steps`: it waits for the step under way, in which an engine still answers health checks.

        Waits for all before it raises the first error. The death of an engine is no error as long as others live or
        dead engines are restarted.
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
    """An engine and its state as the client knows it; a replacement under the same name gets a new record."""

    engine: Any
    name: str
    watchdog: ProgressWatchdog
    busy_clock: BusyClock
    load: int = 0
    """Tokens of running requests: their prompts and max_tokens."""
    calls: int = 0
    """Calls that have a place on this engine: see _ConcurrencyLimiter."""
    death_cause: str | None = None
    """The first error, after which the engine gets no more requests; None while it is alive."""
    created_at: float = field(default_factory=now)
    drained: asyncio.Event | None = None
    """Set when a retired engine has no requests left; None for an engine that is not to leave."""

    @property
    def accepts_requests(self) -> bool:
        return self.death_cause is None and self.drained is None

    def remove_load(self, tokens: int, _: object = None) -> None:
        self.load -= tokens
        if self.drained is not None and not self.load:
            self.drained.set()


class BusyClock:
    """Counts the seconds in which calls were running."""

    def __init__(self) -> None:
        self._running = 0
        self._seconds = self._until = 0.0

    def change(self, calls: int) -> None:
        self._seconds, self._until = self.seconds, now()
        self._running += calls

    @property
    def seconds(self) -> float:
        return self._seconds + (now() - self._until if self._running else 0.0)


class ProgressWatchdog:
    """Watches one engine, for all calls that wait for it.

    A call of generate() takes as long as the requests before it: no deadline fits it. But an engine that lives answers
    health checks, and one that works counts tokens.
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
        """The time at which a counter was last seen to have moved, and of the last health check."""

    async def watch(self, call: Awaitable[T], stall_timeout_s: float, method: str = "generate") -> T:
        """The result of a call. Raises DeadlineExceeded if the engine does nothing for `stalls_s`, or does not answer.

        The call is then cancelled, as it is if this is cancelled.
        """
        task, begun = asyncio.ensure_future(call), now()
        look_s = min(self._health_check_interval_s, stall_timeout_s)
        try:
            while not (await asyncio.wait([task], timeout=look_s))[0]:
                await self._check_health(look_s)
                stalled = now() - max(begun, self._moved_at) > stall_timeout_s
                if stalled and not task.done():
                    raise DeadlineExceeded(f"{self._name}.{method}", stall_timeout_s)
            return task.result()
        finally:
            task.cancel()
            mark_exception_retrieved(task)

    async def _check_health(self, interval_s: float) -> None:
        """Ask for the counters, unless another call just has."""
        moment = now()
        if moment - self._checked_at < interval_s / 2:
            return
        self._checked_at = moment
        health = await _with_deadline(HEALTH_TIMEOUT_S, f"{self._name}.health", self._health())
        counters = tuple(getattr(health, one) for one in PROGRESS_COUNTERS)
        if counters != self._counters:
            self._counters, self._moved_at = counters, now()


@dataclass(eq=False)
class _GenerateCall:
    """The requests of one generate() that have no completion yet, and its place on an engine or in a queue."""

    missing: dict[int, SampleRequest]
    completions: dict[int, Completion] = field(default_factory=dict)
    reserved_engine: EngineRecord | None = None
    """The engine that has a place for this call: see _ConcurrencyLimiter."""
    ticket: int = field(default_factory=lambda: next(_tickets))
    wakeup: asyncio.Future[None] | None = None
    """Set while the call waits in a queue."""

    @property
    def shares_engine(self) -> bool:
        """True if its requests are of one group, or one session."""
        return len({one.group or one.session or one.request_id for one in self.missing.values()}) == 1

    @property
    def is_waiting(self) -> bool:
        return self.wakeup is not None and not self.wakeup.done()

    def wake(self) -> None:
        """End the waiting: the call has a place, or has to look for an engine again."""
        if self.is_waiting:
            self.wakeup.set_result(None)  # type: ignore[union-attr]

    def update(self) -> None:
        """Remove the requests that have a completion from `missing`."""
        self.missing = {number: one for number, one in self.missing.items() if number not in self.completions}

    def abort(self, request_ids: Collection[str]) -> None:
        """Complete these requests without a token; to be called while no engine has them."""
        for number, one in self.missing.items():
            if one.request_id in request_ids:
                nothing = to_token_array(()), to_logprob_array(()), to_logprob_array(())
                self.completions[number] = Completion(one.request_id, *nothing, "abort", [])
        self.update()
        if not self.missing:
            self.wake()


class _ConcurrencyLimiter:
    """Limits each engine to `max_calls` calls at a time; other calls wait here and go in order of arrival.

    A call that belongs to an engine, which has the history of its session or the prompt of its group, waits for that
    engine; all others go to the engine that first has room. At least one request of a call is unfinished, so an engine
    without room has at least `max_calls` requests.
    """

    def __init__(self, max_calls: int | None):
        self.max_calls = max_calls
        self._queues: dict[EngineRecord | None, list[tuple[int, _GenerateCall]]] = {}
        """Heaps of tickets and calls: those that wait for one engine, and under None those that take any."""

    @property
    def waiting(self) -> list[_GenerateCall]:
        """The waiting calls, in no order."""
        return [call for queue in self._queues.values() for _, call in queue if call.is_waiting]

    async def acquire(
        self, call: _GenerateCall, sticky_engine: EngineRecord | None, engines: Sequence[EngineRecord]
    ) -> None:
        """Give the call a place on `home`, or if that is None on any engine; waits until there is one.

        The call has no place on return if it has to look for an engine again.
        """
        candidates = engines if sticky_engine is None else [sticky_engine]
        free = min(filter(self._has_capacity, candidates), key=lambda one: one.load, default=None)
        if free is not None:
            self._reserve(free, call)
            return
        call.wakeup = asyncio.get_running_loop().create_future()
        heappush(self._queues.setdefault(sticky_engine, []), (call.ticket, call))
        await call.wakeup

    def release(self, call: _GenerateCall) -> None:
        """Take back the place of a call that has ended or goes to another engine, if it has one."""
        if call.reserved_engine is not None:
            engine, call.reserved_engine = call.reserved_engine, None
            engine.calls -= 1
            self.grant_free_calls(engine)

    def grant_free_calls(self, engine: EngineRecord) -> None:
        """Give the free places of an engine to the calls that have waited longest, if it takes requests."""
        while self._has_capacity(engine):
            queues = [queue for queue in map(self._queues.get, (engine, None)) if queue]
            if not queues:
                return
            _, call = heappop(min(queues, key=lambda queue: queue[0][0]))
            if call.is_waiting:
                self._reserve(engine, call)
                call.wake()

    def wake_waiters(self, engine: EngineRecord | None) -> None:
        """Let the calls that wait for this engine, or (None) for any, look for one again."""
        for _, call in self._queues.pop(engine, ()):
            call.wake()

    def _has_capacity(self, engine: EngineRecord) -> bool:
        return engine.accepts_requests and (self.max_calls is None or engine.calls < self.max_calls)

    def _reserve(self, engine: EngineRecord, call: _GenerateCall) -> None:
        engine.calls += 1
        call.reserved_engine = engine


def _is_death(result: Any) -> TypeGuard[BaseException]:
    """True for an error after which an engine may be dead; False for other errors and for results."""
    return isinstance(result, _FATAL_ERRORS) and not isinstance(result, UnsupportedParameter)


async def _with_deadline(seconds: float, what: str, call: Awaitable[T]) -> T:
    """Return the result of `call`. Raises DeadlineExceeded naming `what` if it takes longer than `seconds`."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await call
    except TimeoutError as error:
        if deadline.expired():
            raise DeadlineExceeded(what, seconds) from error
        raise


def _routing_keys(request: SampleRequest) -> list[tuple[str, str]]:
    """What a request belongs to, that which has most of its tokens first."""
    return [(kind, name) for kind, name in (("session", request.session), ("group", request.group)) if name]


def _token_load(request: SampleRequest) -> int:
    """What an engine may have to hold of it."""
    return len(request.token_ids) + request.sampling.max_tokens


def _memory_peaks(every: Sequence[EngineHealth]) -> dict[str, float]:
    """The memory of the engine that needed most, if engines report it (see report/profiling.py)."""
    found = [(name, gib) for one in every for name, gib in one.extra.items() if name.endswith("_gib")]
    return {f"memory/engine_{name}": max(gib for n, gib in found if n == name) for name, _ in found}


@dataclass(eq=False, slots=True)
class _PendingCall:
    """One generate() that waits for those of the other episodes."""

    episode: int
    requests: Sequence[SampleRequest]
    answer: asyncio.Future[list[Completion]]


class BatchedEngineClient:
    """An EngineClient whose generate() waits until every live episode is in one, and then sends all as one call.

    The call is ordered by the registration of episodes. So it is the same in every run in which the same episodes
    register in the same order, however long their environments take. The price: each turn waits for the slowest one.

    An episode is live while it computes or waits for its environment, and the others wait for it; one that has ended
    (even by an exception) is not. generate() outside of any episode is sent with the next call.
    """

    def __init__(self, client: EngineClient):
        self._client = client
        self._numbers = count()
        self._live: set[int] = set()
        self._waiting: dict[int, list[_PendingCall]] = {}
        """By episode, each one's in the order in which they came."""
        self._sends: set[asyncio.Task[None]] = set()
        self._check_scheduled = False
        self._current_episode: ContextVar[int | None] = ContextVar("episode", default=None)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """An episode is live inside this block. Tasks started inside belong to it."""
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
        """See EngineClient.generate. An error of the shared call is raised to all callers in it."""
        number = self._current_episode.get()
        one = _PendingCall(
            next(self._numbers) if number is None else number,
            requests,
            asyncio.get_running_loop().create_future(),
        )
        self._waiting.setdefault(one.episode, []).append(one)
        self._check_soon()
        try:
            return await one.answer
        finally:
            mine = self._waiting.get(one.episode, [])
            if one in mine:  # cancelled before its call went out
                mine.remove(one)
                if not mine:
                    del self._waiting[one.episode]
                self._check_soon()

    def _check_soon(self) -> None:
        """Check once everything that can run now has run: an episode about to register must not miss the call."""
        if not self._check_scheduled:
            self._check_scheduled = True
            asyncio.get_running_loop().call_soon(self._check)

    def _check(self) -> None:
        self._check_scheduled = False
        # While fewer wait than live, which is nearly always, nobody is looked up: only the numbers are compared.
        if not self._waiting or not self._waiting.keys() >= self._live:
            return
        batch = [one for episode in sorted(self._waiting) for one in self._waiting[episode]]
        self._waiting = {}
        task = asyncio.get_running_loop().create_task(self._send(batch))
        self._sends.add(task)
        task.add_done_callback(self._sends.discard)

    async def _send(self, batch: Sequence[_PendingCall]) -> None:
        requests = [request for one in batch for request in one.requests]
        try:
            answers = iter(await self._client.generate(requests, skip_limit=True))
        except Exception as error:
            for one in batch:
                if not one.answer.done():
                    one.answer.set_exception(error)
            return
        except asyncio.CancelledError:
            for one in batch:
                one.answer.cancel()
            raise
        for one in batch:
            mine = [next(answers) for _ in one.requests]
            if not one.answer.done():
                one.answer.set_result(mine)
