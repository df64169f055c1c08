"""Many engines as one: routing, re-dispatch when one dies, calls to all of them with deadlines."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from skyrl_train.engines.base import Completion, EngineHealth, SampleRequest
from skyrl_train.errors import DeadlineExceeded, EngineError, UnsupportedParameter, WorkerDied

_REMEMBERED = 1 << 16
"""Sessions and groups whose engine is remembered, the latest ones."""
_GRACE_S = 30.0
"""How long an engine may take beyond a request's own deadline, or to say how it is, before it counts as dead."""

_DEATHS = (EngineError, WorkerDied, DeadlineExceeded, ConnectionError)


@dataclass(eq=False, slots=True)
class _Place:
    """An engine and what is known of it; another engine under its name is another place."""

    engine: Any
    name: str
    load: int = 0
    """Tokens under way: prompts and what may be sampled."""
    cause: str | None = None
    """Why it gets no more traffic: the first thing that went wrong."""

    def bury(self, error: BaseException) -> None:
        self.cause = self.cause or f"{type(error).__name__}: {error}"


class EngineClient:
    """Speaks to InferenceEngines, in this process or remote; they are known by their `name`.

    A session stays on the engine that has its history, a group on the engine that reads its prompt once; everything
    else goes where least is under way. Which engine gets what depends on the order of calls only, not on time. An
    engine that dies gets no more traffic until `replace`.
    """

    def __init__(self, engines: Sequence[Any], *, deadline_s: float):
        """`deadline_s`: for requests without a deadline of their own, and for every other call."""
        self._all = [_Place(one, getattr(one, "name", f"engine {index}")) for index, one in enumerate(engines)]
        self._deadline_s = deadline_s
        self._homes: OrderedDict[tuple[str, str], int] = OrderedDict()
        """("session" or "group", its name) -> index of its engine."""
        self._background: set[asyncio.Task[Any]] = set()
        self._reviving: asyncio.Task[None] | None = None
        self._under_way = 0
        self._busy_s = self._busy_until = 0.0
        """Time in which requests were under way, and up to when that was counted."""
        self._measured: dict[str, float] = defaultdict(float)
        """Counters at the last call of `metrics`."""
        self._asleep = False
        self._holds = 0
        self._interruptions = 0
        self._serving = asyncio.Event()
        """Cleared while the engines sleep or take weights: requests wait."""
        self._serving.set()
        self.revive: Callable[[], Awaitable[None]] | None = None
        """Brings dead engines back; asked when requests find none alive."""

    @property
    def engines(self) -> list[Any]:
        """Those alive, in order: who must get weights."""
        return [place.engine for place in self._all if place.cause is None]

    @property
    def dead(self) -> dict[str, str]:
        """Name -> why, of engines that died."""
        return {place.name: place.cause for place in self._all if place.cause is not None}

    def kill(self, name: str) -> None:
        """End what is left of the engine called `name`: one that hangs still holds its slot, or its connections."""
        engine = self._named(name).engine
        if hasattr(engine, "kill"):
            engine.kill()
        else:
            self._in_background(asyncio.wait_for(engine.close(), _GRACE_S))

    def replace(self, name: str, engine: Any) -> None:
        """Put a new engine, which must hold the current weights already, where the one called `name` was."""
        self._all[self._all.index(self._named(name))] = _Place(engine, name)

    def _named(self, name: str) -> _Place:
        return next(place for place in self._all if place.name == name)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Completions in request order, one call to each engine that has a part.

        The part of an engine that dies goes to the others, once; where none is left, to what `revive` brings back.
        Requests wait while engines sleep or take weights, those too that an engine refused because they came as that
        began. Raises EngineError naming the engines when there is none, UnsupportedParameter as the engine says it.
        """
        completions: dict[int, Completion] = {}
        missing = dict(enumerate(requests))
        lost_at: set[_Place] = set()
        while missing:
            await self._until_serving()
            if not self.engines and self.revive is not None:
                await self._revived()
            before = self._interruptions
            failed = await self._dispatch(missing, completions, avoid=lost_at)
            missing = {number: missing[number] for number in missing if number not in completions}
            died = {place: error for place, error in failed.items() if not self._was_interrupted(before, error)}
            for place, error in died.items():
                if not (isinstance(error, EngineError) and await self._serves(place)):
                    place.bury(error)
            if died and (lost_at or not (self.engines or self.revive)):
                place, error = next(iter(died.items()))
                raise EngineError(self._lost(place, error)) from error
            lost_at |= died.keys()
        return [completions[number] for number in range(len(requests))]

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Nothing: only Lockstep needs to know who may still ask."""
        yield

    async def _dispatch(
        self, requests: dict[int, SampleRequest], completions: dict[int, Completion], *, avoid: Collection[_Place]
    ) -> dict[_Place, BaseException]:
        """Send them, fill `completions` under their numbers; returns which engines failed their part, and how."""
        parts: dict[_Place, dict[int, SampleRequest]] = defaultdict(dict)
        for number, request in requests.items():
            place = self._route(request, avoid)
            parts[place][number] = request
            place.load += _tokens(request)
        calls = [self._generate(place, list(part.values())) for place, part in parts.items()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed: dict[_Place, BaseException] = {}
        for (place, part), result in zip(parts.items(), results, strict=True):
            if isinstance(result, UnsupportedParameter) or (
                isinstance(result, BaseException) and not isinstance(result, _DEATHS)
            ):
                raise result
            if isinstance(result, BaseException):
                failed[place] = result
            else:
                completions.update(zip(part, result, strict=True))
        return failed

    def _was_interrupted(self, before: int, error: BaseException) -> bool:
        """Refused because the engines began to sleep or to take weights."""
        return self._interruptions != before and isinstance(error, EngineError)

    async def _generate(self, place: _Place, requests: list[SampleRequest]) -> list[Completion]:
        deadlines = [request.deadline_s for request in requests if request.deadline_s is not None]
        limit = max(deadlines) + _GRACE_S if len(deadlines) == len(requests) else self._deadline_s
        self._count_under_way(1)
        try:
            return await self._within(place, "generate", place.engine.generate(requests), limit)  # type: ignore[no-any-return]
        except (asyncio.CancelledError, DeadlineExceeded):
            # A remote engine does not notice that nobody waits any more.
            self._in_background(self._abort_quietly(place, [request.request_id for request in requests]))
            raise
        finally:
            self._count_under_way(-1)
            place.load -= sum(_tokens(request) for request in requests)

    def _count_under_way(self, change: int) -> None:
        now = time.monotonic()
        if self._under_way:
            self._busy_s += now - self._busy_until
        self._busy_until = now
        self._under_way += change

    def _route(self, request: SampleRequest, avoid: Collection[_Place]) -> _Place:
        keys = [(kind, name) for kind, name in (("session", request.session), ("group", request.group)) if name]
        alive = [index for index, place in enumerate(self._all) if place.cause is None]
        if not alive:
            raise EngineError(f"There is no inference engine left. {self._causes()}")
        welcome = [index for index in alive if self._all[index] not in avoid] or alive
        homes = (self._homes.get(key) for key in keys)
        index = next((home for home in homes if home in welcome), None)
        if index is None:
            index = min(welcome, key=lambda candidate: (self._all[candidate].load, candidate))
        for key in keys:
            self._homes[key] = index
            self._homes.move_to_end(key)
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return self._all[index]

    def _lost(self, place: _Place, error: BaseException) -> str:
        last = "" if place.cause else f" {place.name}: {type(error).__name__}: {error}"
        return (
            f"Requests were lost and could not be sent to another engine ({len(self.engines)} left)."
            f"{last} {self._causes()}".rstrip()
        )

    def _causes(self) -> str:
        return "; ".join(f"{name}: {reason}" for name, reason in self.dead.items())

    async def _serves(self, place: _Place) -> bool:
        """Whether an engine that failed a call is whole all the same: then what it failed is lost, not the engine."""
        try:
            health = await asyncio.wait_for(place.engine.health(), _GRACE_S)
        except (*_DEATHS, TimeoutError):
            return False
        return not health.torn

    async def _abort_quietly(self, place: _Place, request_ids: list[str]) -> None:
        try:
            await asyncio.wait_for(place.engine.abort(request_ids), _GRACE_S)
        except Exception as error:
            place.bury(error)

    async def _revived(self) -> None:
        """One restart for all who wait for it; it goes on when they no longer do."""
        assert self.revive is not None
        if self._reviving is None or self._reviving.done():
            self._reviving = self._in_background(self.revive())
        await asyncio.shield(self._reviving)

    def _in_background(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)  # type: ignore[assignment]
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        task.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be waiting
        return task

    # -- all engines -------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._each("abort", request_ids)

    async def pause(self, mode: str = "keep") -> None:
        await self._each("pause", mode)

    async def resume(self) -> None:
        await self._each("resume")

    async def sleep(self, level: int = 1) -> int:
        """Bytes freed by all. Requests wait until `wake_up`."""
        self._asleep = True
        self._update_serving()
        return sum(await self._each("sleep", level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._each("wake_up", tags)
        self._asleep = self._asleep and tags is not None and "kv_cache" not in tags
        self._update_serving()

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """Requests that come meanwhile wait: an engine that takes weights would refuse them, and count as dead."""
        self._holds += 1
        self._update_serving()
        try:
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
        try:
            async with asyncio.timeout(self._deadline_s):
                await self._serving.wait()
        except TimeoutError as error:
            raise DeadlineExceeded("engines that sleep or take weights", self._deadline_s) from error

    async def reset_prefix_cache(self) -> None:
        await self._each("reset_prefix_cache")

    async def health(self) -> list[EngineHealth]:
        return await self._each("health", deadline_s=_GRACE_S)

    async def close(self) -> None:
        """Close every engine that is alive; the first error is raised when all were tried."""
        for task in self._background:
            task.cancel()
        await self._each("close")

    async def metrics(self) -> dict[str, float]:
        """Since the last call: tokens per second in which requests were under way, and the share of prompt tokens that
        needed no prefill. Now: what is under way, how many engines are dead, and the memory that one needed at most.
        """
        every = await self.health()
        self._count_under_way(0)
        kinds = ("generated_tokens", "prefilled_tokens", "cached_tokens")
        counted = {kind: float(sum(getattr(one, kind) for one in every)) for kind in kinds} | {"busy_s": self._busy_s}
        # An engine that was restarted counts from 0 again.
        since = {kind: max(0.0, count - self._measured[kind]) for kind, count in counted.items()}
        self._measured = defaultdict(float, counted)
        prompts = since["prefilled_tokens"] + since["cached_tokens"]
        return {
            "engines/tokens_per_s": since["generated_tokens"] / max(since["busy_s"], 1e-9),
            "engines/prefix_cache_hit_rate": since["cached_tokens"] / max(prompts, 1.0),
            "engines/running": float(sum(one.running for one in every)),
            "engines/queued": float(sum(one.queued for one in every)),
            "engines/dead": float(len(self.dead)),
            **_peaks(every),
        }

    async def _each(self, method: str, *args: Any, deadline_s: float | None = None) -> list[Any]:
        """The same call on every engine alive, at once; answers of those that live through it.

        All are waited for before the first error is raised. An engine that dies meanwhile is no error while others
        live, or while dead ones are brought back.
        """
        places = [place for place in self._all if place.cause is None]
        limit = self._deadline_s if deadline_s is None else min(deadline_s, self._deadline_s)
        calls = [self._within(place, method, getattr(place.engine, method)(*args), limit) for place in places]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for place, result in zip(places, results, strict=True):
            if isinstance(result, _DEATHS) and not isinstance(result, UnsupportedParameter):
                place.bury(result)
        for result in results:
            fatal = not isinstance(result, _DEATHS) or isinstance(result, UnsupportedParameter)
            if isinstance(result, BaseException) and (fatal or not (self.engines or self.revive)):
                raise result
        return [result for result in results if not isinstance(result, BaseException)]

    async def _within(self, place: _Place, method: str, call: Awaitable[Any], seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await call
        except TimeoutError as error:
            if deadline.expired():
                raise DeadlineExceeded(f"{place.name}.{method}", seconds) from error
            raise


def _peaks(every: Sequence[EngineHealth]) -> dict[str, float]:
    """Memory of the engine that needed most, where they count it (see report/memory.py)."""
    found = [(name, gib) for one in every for name, gib in one.extra.items() if name.endswith("_gib")]
    return {f"memory/engine_{name}": max(gib for n, gib in found if n == name) for name, _ in found}


def _tokens(request: SampleRequest) -> int:
    return len(request.token_ids) + request.sampling.max_tokens
