"""One interface to many engines: routing, re-dispatch when one dies, calls to all of them with deadlines."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from skyrl_train import trace
from skyrl_train.clock import now
from skyrl_train.engines.base import Completion, EngineHealth, SampleRequest
from skyrl_train.engines.engine_record import BusyClock, EngineRecord, peaks
from skyrl_train.engines.progress import GRACE_S, LOOK_S, Progress
from skyrl_train.engines.seats import Call, Seats, keys_of, tokens_of
from skyrl_train.errors import DeadlineExceeded, EngineError, UnsupportedParameter, WorkerDied
from skyrl_train.tasks import unwatched, within

_REMEMBERED = 1 << 16
"""How many of the latest sessions and groups have their engine remembered, or four times the most that were at once."""
STEP_S = 300.0
"""The longest step of an engine: it may prefill all that it runs, and a kernel's first use compiles it."""
_DEATHS = (EngineError, WorkerDied, DeadlineExceeded, ConnectionError)
_COUNTED = ("generated_tokens", "prefilled_tokens", "cached_tokens")


class EngineClient:
    """Routes requests to InferenceEngines, in this process or remote, which are identified by their `name`.

    A session stays on the engine that has its history, and a group on the engine that has its prompt; other requests go
    to the engine with the least load. Routing depends only on the order of calls, not on time. An engine that dies gets
    no more requests until `replace`.
    """

    def __init__(
        self, engines: Sequence[Any], *, deadline_s: float, looks_every_s: float = LOOK_S, most_calls: int | None = None
    ):
        """`deadline_s`: of requests that have none of their own, and of all other calls. `looks_every_s`: how often an
        engine with requests is asked whether it gets on. `most_calls`: how many calls of `generate` an engine has at a
        time; None: as many as come."""
        self._looks_every_s = looks_every_s
        self._all = [self._record(one, getattr(one, "name", f"engine {index}")) for index, one in enumerate(engines)]
        self._deadline_s = deadline_s
        self._homes: OrderedDict[tuple[str, str], int] = OrderedDict()
        """("session" or "group", its name) -> index of its engine."""
        self._remembered = _REMEMBERED
        self._seats: Seats[EngineRecord] = Seats(most_calls, lambda record: record.takes_requests)
        self._background: set[asyncio.Task[Any]] = set()
        self._ended_first: list[Callable[[], Awaitable[None]]] = []
        self._reviving: asyncio.Task[None] | None = None
        self._came_back = asyncio.Event()
        """Set by `replace`."""
        self._busy = BusyClock()
        """Of all engines: runs while one of them does."""
        self._gone_busy_s = self._gone_s = 0.0
        """Of engines that are gone: in which they had requests, and in which they were there."""
        self._measured: dict[str, float] = defaultdict(float)
        """The counters at the last call of `metrics`."""
        self._asleep = False
        self._holds = self._open = self._interruptions = self._aborts = 0
        self._wasted = 0
        """Tokens of requests that a pause ended, and which were sampled again."""
        self._serving = asyncio.Event()
        """Cleared while the engines sleep or take weights; requests then wait."""
        self._serving.set()
        self.revive: Callable[[], Awaitable[None]] | None = None
        """Restarts dead engines; called if no engine is alive when a request comes."""
        self.revives_at_once = False
        """Whether `revive` is called as soon as an engine dies, while the others go on."""

    @property
    def engines(self) -> list[Any]:
        """The living engines, in order: those that must get weights, also while they are leaving."""
        return [record.engine for record in self._all if record.cause is None]

    @property
    def names(self) -> list[str]:
        """Of all engines, dead or leaving ones included."""
        return [record.name for record in self._all]

    @property
    def leaving(self) -> list[str]:
        """The names of those that get no more requests, as they are to leave."""
        return [record.name for record in self._all if record.empty is not None]

    @property
    def any_lives(self) -> bool:
        """Whether there is one that takes requests."""
        return any(record.takes_requests for record in self._all)

    @property
    def dead(self) -> dict[str, str]:
        """Name -> cause of death, of dead engines that are to be restarted: none that was leaving."""
        return {one.name: one.cause for one in self._all if one.cause is not None and one.empty is None}

    @property
    def busy_s(self) -> float:
        """Seconds in which engines had requests, added up over engines."""
        return self._gone_busy_s + sum(record.busy.seconds for record in self._all)

    @property
    def _there_s(self) -> float:
        """Seconds in which engines were there, added up over engines."""
        return self._gone_s + sum(now() - record.since for record in self._all)

    def kill(self, name: str) -> None:
        """End the dead engine called `name`: one that hangs still occupies its slot, or its connections."""
        engine = self._named(name).engine
        if hasattr(engine, "kill"):
            engine.kill()
        else:
            self._in_background(within(GRACE_S, engine.close()))

    def replace(self, name: str, engine: Any) -> None:
        """Replace the dead engine called `name` by a new one, which must already have the current weights."""
        old = self._named(name)
        self._count_gone(old)
        new = self._all[self._all.index(old)] = self._record(engine, name)
        new.empty = old.empty
        self._begins(new)

    def add(self, name: str, engine: Any) -> None:
        """Add an engine, which must already have the current weights; from now on it gets requests."""
        assert name not in self.names, f"there is an engine called {name} already"
        self._all.append(self._record(engine, name))
        self._begins(self._all[-1])

    def retire(self, name: str) -> asyncio.Event:
        """Send the engine called `name` no more requests; the event is set once it has none left.

        Until `remove` it takes part in pauses and syncs: what it still samples is of the newest weights, too.
        """
        record = self._named(name)
        record.empty = asyncio.Event()
        if record.cause is not None or not record.load:
            record.empty.set()
        self._ends(record)
        return record.empty

    def keep(self, name: str) -> None:
        """Send requests again to an engine that was to leave."""
        record = self._named(name)
        record.empty = None
        self._begins(record)

    def remove(self, name: str) -> Any:
        """Forget a retired engine, and return it. What it still has goes to the others as soon as its calls fail."""
        record = self._named(name)
        index = self._all.index(record)
        self._count_gone(record)
        del self._all[index]
        self._homes = OrderedDict((key, at - (at > index)) for key, at in self._homes.items() if at != index)
        return record.engine

    def _begins(self, record: EngineRecord) -> None:
        """It takes requests from now on."""
        self._came_back.set()
        self._seats.offer(record)

    def _ends(self, record: EngineRecord) -> None:
        """It takes requests no more."""
        self._seats.dissolve(record)
        if not self.any_lives:
            self._seats.dissolve(None)

    def _mark_dead(self, record: EngineRecord, error: BaseException) -> None:
        record.mark_dead(error)
        self._ends(record)

    def _count_gone(self, record: EngineRecord) -> None:
        self._gone_busy_s += record.busy.seconds
        self._gone_s += now() - record.since

    def _record(self, engine: Any, name: str) -> EngineRecord:
        progress = Progress(name, lambda: engine.health(), self._looks_every_s)
        return EngineRecord(engine, name, progress, BusyClock())

    def _named(self, name: str) -> EngineRecord:
        return next(record for record in self._all if record.name == name)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest], *, at_once: bool = False) -> list[Completion]:
        """Completions in request order; every engine gets its share of the requests in one call.

        The requests of one session, or of one group, wait until an engine has room for them unless they are to be sent
        `at_once`; those of several are always sent at once.

        If an engine dies, its requests are sent once more: to the others or, if none is left, to those that `revive`
        restarts; if it was to leave, that does not count. Requests wait while engines sleep or take weights; so do
        requests that an engine refused because they arrived just as that began. Raises EngineError naming the engines
        if none is left, and the engine's own UnsupportedParameter.
        """
        call: Call[EngineRecord] = Call(dict(enumerate(requests)))
        lost_at: set[EngineRecord] = set()
        seat: EngineRecord | None = None
        self._opens(len(requests))
        try:
            while call.missing:
                await self._until_serving()
                if not self.any_lives and self.revive is not None:
                    await self.revived()
                if seat is not None and (lost_at or not seat.takes_requests):
                    self._seats.leave(seat)
                    seat = None
                # What a pause has ended keeps its seat, or newer calls would be before it; what was lost has waited.
                if seat is None and self._seats.bounded and not (at_once or lost_at):
                    seat = await self._seat(call)
                await self._until_serving()
                if call.missing and (self.any_lives or self.revive is None or not self.dead):
                    await self._attempt(call, lost_at, seat)
        finally:
            self._open -= len(requests)
            if seat is not None:
                self._seats.leave(seat)
        return [call.completions[number] for number in range(len(requests))]

    async def _seat(self, call: Call[EngineRecord]) -> EngineRecord | None:
        """The engine that has room for `call`, once there is one; None if it does not wait, or none lives any more."""
        names = {one.group or one.session or one.request_id for one in call.missing.values()}
        if len(names) > 1:
            return None
        keys = keys_of(next(iter(call.missing.values())))
        while call.missing and self.any_lives:
            home = self._home(keys, ())
            those = self._all if home is None else [self._all[home]]
            free = min(filter(self._seats.has_room, those), key=lambda one: one.load, default=None)
            if free is not None:
                self._seats.take(free)
            else:
                free = await self._seats.wait(call, None if home is None else self._all[home])
            if free is not None:
                return free
        return None

    async def _attempt(self, call: Call[EngineRecord], lost_at: set[EngineRecord], seat: EngineRecord | None) -> None:
        """Send what is missing of a call; adds engines that failed to `lost_at`. `seat`: which engine is to have it."""
        missing, completions = call.missing, call.completions
        before, aborts = self._interruptions, self._aborts
        failed = await self._dispatch(missing, completions, avoid=lost_at, seat=seat)
        if aborts != self._aborts:
            self._take_back(missing, completions)
        call.update()
        died = {record: error for record, error in failed.items() if not self._was_interrupted(before, error)}
        for record, error in died.items():
            if not (isinstance(error, EngineError) and await self._serves(record)):
                self._mark_dead(record, error)
                if self.revives_at_once and self.revive is not None:
                    self._reviving_now()
        died = {record: error for record, error in died.items() if record.empty is None}
        if died and (lost_at or not (self.any_lives or self.revive)):
            record, error = next(iter(died.items()))
            last = "" if record.cause else f" {record.name}: {type(error).__name__}: {error}"
            lost = f"Requests were lost and could not be sent to another engine ({len(self.engines)} left)."
            raise EngineError(f"{lost}{last} {self._causes()}".rstrip()) from error
        lost_at.update(died)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Between its turns, too, its session and its group are among those that are remembered."""
        self._opens(1)
        try:
            yield
        finally:
            self._open -= 1

    def _opens(self, number: int) -> None:
        self._open += number
        self._remembered = max(self._remembered, 4 * self._open)

    async def _dispatch(
        self,
        requests: dict[int, SampleRequest],
        completions: dict[int, Completion],
        *,
        avoid: Collection[EngineRecord],
        seat: EngineRecord | None,
    ) -> dict[EngineRecord, BaseException]:
        """Send `requests` and fill `completions` under their numbers; returns the engines that failed, with errors."""
        parts: dict[EngineRecord, dict[int, SampleRequest]] = defaultdict(dict)
        for number, request in requests.items():
            record = self._route(request, avoid, seat)
            parts[record][number] = request
            record.load += tokens_of(request)
        if len(parts) == 1:  # as it is for most conversations, which need no task for it
            results = [await self._alone(*next(iter(parts.items())))]
        else:
            calls = [asyncio.ensure_future(self._generate(one, list(part.values()))) for one, part in parts.items()]
            for call, (record, part) in zip(calls, parts.items(), strict=True):  # even if it never began
                call.add_done_callback(partial(record.unload, sum(map(tokens_of, part.values()))))
            results = await asyncio.gather(*calls, return_exceptions=True)
        failed: dict[EngineRecord, BaseException] = {}
        for (record, part), result in zip(parts.items(), results, strict=True):
            if not isinstance(result, BaseException):
                completions.update(zip(part, result, strict=True))
            elif isinstance(result, UnsupportedParameter) or not isinstance(result, _DEATHS):
                raise result
            else:
                failed[record] = result
        return failed

    async def _alone(self, record: EngineRecord, part: dict[int, SampleRequest]) -> list[Completion] | BaseException:
        """What becomes of a call that has one engine, if it is not cancelled."""
        try:
            return await self._generate(record, list(part.values()))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            return error
        finally:
            record.unload(sum(map(tokens_of, part.values())))

    def _take_back(self, requests: dict[int, SampleRequest], completions: dict[int, Completion]) -> None:
        """Forget the completions of requests that a pause ended, unless their own deadline did."""
        for number, request in requests.items():
            found = completions.get(number)
            if found is None or found.stop_reason != "abort":
                continue
            if request.deadline_s is None or found.running_s < request.deadline_s:
                self._wasted += len(found.token_ids)
                del completions[number]

    def _was_interrupted(self, before: int, error: BaseException) -> bool:
        """Whether requests were refused because the engines began to sleep or to take weights."""
        return self._interruptions != before and isinstance(error, EngineError)

    async def _generate(self, record: EngineRecord, requests: list[SampleRequest]) -> list[Completion]:
        # Not less because these requests have little time left: the engine may be busy with the long ones of others.
        limit = max([self._deadline_s, *(request.deadline_s or 0.0 for request in requests)]) + GRACE_S
        self._busy.change(1)
        record.busy.change(1)
        try:
            return await record.progress.until_done(record.engine.generate(requests), limit)
        except (asyncio.CancelledError, DeadlineExceeded):
            # A remote engine does not notice that its caller has gone.
            self._in_background(self._abort_quietly(record, [request.request_id for request in requests]))
            raise
        finally:
            self._busy.change(-1)
            record.busy.change(-1)

    def _home(self, keys: Sequence[tuple[str, str]], avoid: Collection[EngineRecord]) -> int | None:
        """The index of the engine that has the history of its session, or else the prompt of its group."""
        homes = [self._homes[key] for key in keys if key in self._homes]
        return next((home for home in homes if self._all[home].takes_requests and self._all[home] not in avoid), None)

    def _route(
        self, request: SampleRequest, avoid: Collection[EngineRecord], seat: EngineRecord | None
    ) -> EngineRecord:
        keys = keys_of(request)
        # While it waited for a seat, others of its group may have found a home elsewhere.
        own = [key for key in keys if key[0] == "session"] if seat is not None and seat.takes_requests else keys
        index = self._home(own, avoid)
        if index is None and own is not keys and seat is not None:
            index = self._all.index(seat)
        if index is None:  # only then is there a look at all of them
            homes = [self._homes[key] for key in keys if key in self._homes]
            index = self._least_loaded(homes, avoid)
        for key in keys:
            self._homes[key] = index
            self._homes.move_to_end(key)
        while len(self._homes) > self._remembered:
            self._homes.popitem(last=False)
        return self._all[index]

    def _least_loaded(self, homes: Sequence[int], avoid: Collection[EngineRecord]) -> int:
        """The living engine with the least load that is not to be avoided; if all are, one of `homes` first."""
        alive = [index for index, one in enumerate(self._all) if one.cause is None and one.empty is None]
        if not alive:
            raise EngineError(f"There is no inference engine left. {self._causes()}")
        welcome = [index for index in alive if self._all[index] not in avoid] or alive
        home = next((home for home in homes if home in welcome), None)
        return min(welcome, key=lambda one: (self._all[one].load, one)) if home is None else home

    def _causes(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.dead.items())

    async def _serves(self, record: EngineRecord) -> bool:
        """Whether an engine that failed a call is still healthy: then only these requests are lost, not the engine."""
        try:
            health = await within(GRACE_S, record.engine.health())
        except (*_DEATHS, TimeoutError):
            return False
        return not health.torn

    async def _abort_quietly(self, record: EngineRecord, request_ids: list[str]) -> None:
        try:
            await within(GRACE_S, record.engine.abort(request_ids))
        except Exception as error:
            self._mark_dead(record, error)

    async def revived(self) -> None:
        """Wait for one restart of what is dead that all share; it continues even if they are cancelled.

        Where others go on while an engine is restarted, the first one that is back is enough.
        """
        reviving = self._reviving_now()
        if self.revives_at_once:
            self._came_back.clear()
            back = asyncio.ensure_future(self._came_back.wait())
            try:
                await asyncio.wait({reviving, back}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                back.cancel()
            if self.any_lives:
                return
        await asyncio.shield(reviving)

    def _reviving_now(self) -> asyncio.Task[None]:
        """The restart that is under way, or a new one."""
        assert self.revive is not None
        if self._reviving is None or self._reviving.done():
            self._reviving = self._in_background(self.revive())
        return self._reviving

    def revive_dead(self) -> None:
        """Begin to restart dead engines while the others go on. Raises what the last attempt has ended with."""
        if not self.dead or self.revive is None:
            return
        last = self._reviving
        if last is not None and last.done() and not last.cancelled() and (error := last.exception()) is not None:
            raise error
        self._reviving_now()

    def _in_background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        return unwatched(task)

    # -- all engines -------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
        """See InferenceEngine; on all living engines, as are the following methods. What waits for room ends here."""
        for call in self._seats.waiting:
            call.abort(request_ids)
        await self._each("abort", request_ids)

    async def pause(self, mode: str = "keep") -> None:
        """An engine that does not answer, or does not get to the end of its step, hangs, and is dead."""
        await self._each("pause", mode, between_steps=mode != "wait")

    async def resume(self) -> None:
        await self._each("resume", between_steps=True)

    @asynccontextmanager
    async def paused(self, mode: str) -> AsyncIterator[None]:
        """Requests under way stop between two tokens, and go on afterwards; new ones wait. `mode`: as of `pause`.

        What "abort" ends is sent again with the same seed, as if it had just come.
        """
        async with self.held():
            if mode == "abort":
                self._aborts += 1
            with trace.span(f"paused: {mode}", row="engines", overlaps=True):
                await self.pause(mode)
                try:
                    yield
                finally:
                    await self.resume()

    async def sleep(self, level: int = 1) -> int:
        """Let all engines sleep; returns the bytes freed by all. Requests wait until `wake_up`."""
        self._asleep = True
        self._update_serving()
        return sum(await self._each("sleep", level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._each("wake_up", tags)
        self._asleep = self._asleep and tags is not None and "kv_cache" not in tags
        self._update_serving()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Requests that come meanwhile wait: engines that take weights refuse requests, and would count as dead."""
        self._holds += 1
        self._update_serving()
        try:
            with trace.span("requests are held", row="engines", overlaps=True):
                yield
        finally:
            self._holds -= 1
            self._update_serving()

    def _update_serving(self) -> None:
        if self._asleep or self._holds:
            self._serving.clear()
            self._interruptions += 1
        else:
            self._serving.set()

    async def _until_serving(self) -> None:
        if self._serving.is_set():
            return
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._serving.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("engines that sleep or take weights", self._deadline_s) from error

    async def reset_prefix_cache(self) -> None:
        await self._each("reset_prefix_cache")

    async def health(self) -> list[EngineHealth]:
        return await self._each("health", deadline_s=GRACE_S)

    async def stop_reviving(self) -> None:
        """Give up a restart that is under way, which the ranks of the trainer may be taking part in, and begin none."""
        self.revive = None
        if self._reviving is not None:
            await self._given_up([self._reviving])

    def on_close(self, end: Callable[[], Awaitable[None]]) -> None:
        """Have `close` first end what adds engines and removes them."""
        self._ended_first.append(end)

    async def close(self) -> None:
        """Close every living engine; raises the first error after it has tried all."""
        for end in self._ended_first:
            await end()
        await self._given_up(self._background)
        await self._each("close")

    async def _given_up(self, tasks: Collection[asyncio.Task[Any]]) -> None:
        """Cancel tasks and wait for their end: they let go of what they hold."""
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(list(tasks), timeout=GRACE_S)

    async def metrics(self) -> dict[str, float]:
        """engines/* and memory/engine_*.

        Since the last call: generated tokens per second in which requests were running, the share of time in which an
        engine had none, the share of prompt tokens that needed no prefill, and the tokens that were sampled for
        nothing, as a pause ended their requests. Current values: running and queued requests, the numbers of engines
        that take requests and of dead ones, and the memory of the engine that needed most.
        """
        every = await self.health()
        counted = {kind: float(sum(getattr(one, kind) for one in every)) for kind in _COUNTED}
        counted |= {"busy_s": self._busy.seconds, "each_s": self.busy_s, "there_s": self._there_s}
        counted["wasted"] = float(self._wasted)
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
            "engines/queued": float(sum(one.queued for one in every) + self._seats.requests),
            "engines/count": float(sum(record.takes_requests for record in self._all)),
            "engines/dead": float(len(self.dead)),
            **peaks(every),
        }

    async def begin_anew(self) -> None:
        """Forget cached prompts and what `metrics` has counted: what ran until now does not show in what follows."""
        await self.reset_prefix_cache()
        await self.metrics()

    async def _each(
        self, method: str, *args: Any, deadline_s: float | None = None, between_steps: bool = False
    ) -> list[Any]:
        """Make the same call on every living engine concurrently; returns the results of those that do not die in it.

        `between_steps`: it waits for the step under way, in which an engine still answers health checks.

        Waits for all before it raises the first error. The death of an engine is no error as long as others live or
        dead engines are restarted.
        """
        records = [record for record in self._all if record.cause is None]
        limit = self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s)
        watch = self._watched if between_steps else self._within
        calls = [watch(record, method, getattr(record.engine, method)(*args), limit) for record in records]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for record, result in zip(records, results, strict=True):
            if isinstance(result, _DEATHS) and not isinstance(result, UnsupportedParameter):
                self._mark_dead(record, result)
        for result in results:
            fatal = not isinstance(result, _DEATHS) or isinstance(result, UnsupportedParameter)
            if isinstance(result, BaseException) and (fatal or not (self.any_lives or self.revive)):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _watched(self, record: EngineRecord, method: str, call: Awaitable[Any], seconds: float) -> Any:
        return await record.progress.until_done(call, min(seconds, STEP_S), method)

    async def _within(self, record: EngineRecord, method: str, call: Awaitable[Any], seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await call
        except TimeoutError as error:
            if deadline.expired():
                raise DeadlineExceeded(f"{record.name}.{method}", seconds) from error
            raise
