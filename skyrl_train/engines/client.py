"""Many engines as one: routing, re-dispatch when one dies, calls to all of them with deadlines."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from skyrl_train.engines.base import Completion, EngineHealth, SampleRequest
from skyrl_train.errors import DeadlineExceeded, EngineError, UnsupportedParameter, WorkerDied

_REMEMBERED = 1 << 16
"""Sessions and groups whose engine is remembered, the latest ones."""
_GRACE_S = 30.0
"""How long an engine may take beyond a request's own deadline before it counts as dead."""

_DEATHS = (EngineError, WorkerDied, DeadlineExceeded, ConnectionError)


class EngineClient:
    """Speaks to InferenceEngines, in this process or remote; they are known by their `name`.

    A session stays on the engine that has its history, a group on the engine that reads its prompt once; everything
    else goes where least is under way. Which engine gets what depends on the order of calls only, not on time. An
    engine that fails a call gets no more traffic until `replace`.
    """

    def __init__(self, engines: Sequence[Any], *, deadline_s: float):
        """`deadline_s`: for requests without a deadline of their own, and for every other call."""
        self._all = list(engines)
        self._names = [getattr(engine, "name", f"engine {index}") for index, engine in enumerate(engines)]
        self._deadline_s = deadline_s
        self._dead: dict[int, str] = {}
        """Index -> why."""
        self._load = [0] * len(self._all)
        """Tokens under way on each engine: prompts and what may be sampled."""
        self._homes: OrderedDict[tuple[str, str], int] = OrderedDict()
        """("session" or "group", its name) -> index of its engine."""
        self._background: set[asyncio.Task[Any]] = set()
        self._measured = (time.monotonic(), 0)

    @property
    def engines(self) -> list[Any]:
        """Those alive, in order: who must get weights."""
        return [engine for index, engine in enumerate(self._all) if index not in self._dead]

    @property
    def dead(self) -> dict[str, str]:
        """Name -> why, of engines that failed a call."""
        return {self._names[index]: reason for index, reason in self._dead.items()}

    def replace(self, name: str, engine: Any) -> None:
        """Put a new engine, which must hold the current weights already, where the one called `name` was."""
        index = self._names.index(name)
        self._all[index] = engine
        self._load[index] = 0
        self._dead.pop(index, None)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Completions in request order, one call to each engine that has a part.

        The part of an engine that dies goes to the others, once. Raises EngineError naming the engines when none is
        left, UnsupportedParameter as the engine says it.
        """
        completions: dict[int, Completion] = {}
        places = list(range(len(requests)))
        for last_try in (False, True):
            failed = await self._dispatch(requests, places, completions)
            if not failed:
                break
            places = sorted(place for lost, _ in failed.values() for place in lost)
            error = next(error for _, error in failed.values())
            if last_try or not self.engines:
                raise EngineError(self._none_left()) from error
        return [completions[place] for place in range(len(requests))]

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """Nothing: only Lockstep needs to know who may still ask."""
        yield

    async def _dispatch(
        self, requests: Sequence[SampleRequest], places: Sequence[int], completions: dict[int, Completion]
    ) -> dict[int, tuple[list[int], BaseException]]:
        """Send the requests at `places`, fill `completions`; returns by engine what was lost and why."""
        parts: dict[int, list[int]] = defaultdict(list)
        for place in places:
            index = self._route(requests[place])
            parts[index].append(place)
            self._load[index] += _tokens(requests[place])
        calls = [self._generate(index, [requests[place] for place in part]) for index, part in parts.items()]
        results = await asyncio.gather(*calls, return_exceptions=True)
        failed: dict[int, tuple[list[int], BaseException]] = {}
        for (index, part), result in zip(parts.items(), results, strict=True):
            if not isinstance(result, BaseException):
                completions.update(zip(part, result, strict=True))
            elif isinstance(result, _DEATHS) and not isinstance(result, UnsupportedParameter):
                self._bury(index, result)
                failed[index] = (part, result)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, _DEATHS):
                raise result
            if isinstance(result, UnsupportedParameter):
                raise result
        return failed

    async def _generate(self, index: int, requests: list[SampleRequest]) -> list[Completion]:
        deadlines = [request.deadline_s for request in requests if request.deadline_s is not None]
        limit = max(deadlines) + _GRACE_S if len(deadlines) == len(requests) else self._deadline_s
        try:
            return await self._within(index, "generate", self._all[index].generate(requests), limit)  # type: ignore[no-any-return]
        except (asyncio.CancelledError, DeadlineExceeded):
            # A remote engine does not notice that nobody waits any more.
            task = asyncio.ensure_future(self._abort_quietly(index, [request.request_id for request in requests]))
            self._background.add(task)
            task.add_done_callback(self._background.discard)
            raise
        finally:
            self._load[index] -= sum(_tokens(request) for request in requests)

    def _route(self, request: SampleRequest) -> int:
        keys = [(kind, name) for kind, name in (("session", request.session), ("group", request.group)) if name]
        homes = (self._homes.get(key) for key in keys)
        index = next((home for home in homes if home is not None and home not in self._dead), None)
        if index is None:
            alive = [index for index in range(len(self._all)) if index not in self._dead]
            if not alive:
                raise EngineError(self._none_left())
            index = min(alive, key=lambda candidate: (self._load[candidate], candidate))
        for key in keys:
            self._homes[key] = index
            self._homes.move_to_end(key)
        while len(self._homes) > _REMEMBERED:
            self._homes.popitem(last=False)
        return index

    def _bury(self, index: int, error: BaseException) -> None:
        self._dead[index] = f"{type(error).__name__}: {error}"

    def _none_left(self) -> str:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.dead.items())
        return f"Requests were lost and could not be sent to another engine ({len(self.engines)} left). {reasons}"

    async def _abort_quietly(self, index: int, request_ids: list[str]) -> None:
        try:
            await asyncio.wait_for(self._all[index].abort(request_ids), _GRACE_S)
        except Exception as error:
            self._bury(index, error)

    # -- all engines -------------------------------------------------------------------------------------------------

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._each("abort", request_ids)

    async def pause(self, mode: str = "keep") -> None:
        await self._each("pause", mode)

    async def resume(self) -> None:
        await self._each("resume")

    async def sleep(self, level: int = 1) -> int:
        """Bytes freed by all."""
        return sum(await self._each("sleep", level))

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        await self._each("wake_up", tags)

    async def reset_prefix_cache(self) -> None:
        await self._each("reset_prefix_cache")

    async def health(self) -> list[EngineHealth]:
        return await self._each("health")

    async def close(self) -> None:
        """Close every engine that is alive; the first error is raised when all were tried."""
        for task in self._background:
            task.cancel()
        await self._each("close")

    async def metrics(self) -> dict[str, float]:
        """Tokens per second since the last call, share of prompt tokens that needed no prefill, what is under way."""
        every = await self.health()
        (before, tokens_before), now = self._measured, time.monotonic()
        generated = sum(one.generated_tokens for one in every)
        prefilled, cached = (sum(getattr(one, f"{kind}_tokens") for one in every) for kind in ("prefilled", "cached"))
        self._measured = (now, generated)
        return {
            "engines/tokens_per_s": max(0, generated - tokens_before) / max(now - before, 1e-9),
            "engines/prefix_cache_hit_rate": cached / max(prefilled + cached, 1),
            "engines/running": float(sum(one.running for one in every)),
            "engines/queued": float(sum(one.queued for one in every)),
            "engines/dead": float(len(self._dead)),
        }

    async def _each(self, method: str, *args: Any) -> list[Any]:
        """The same call on every engine alive, at once; all are waited for before the first error is raised."""
        indices = [index for index in range(len(self._all)) if index not in self._dead]
        calls = [
            self._within(index, method, getattr(self._all[index], method)(*args), self._deadline_s) for index in indices
        ]
        results = await asyncio.gather(*calls, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def _within(self, index: int, method: str, call: Awaitable[Any], seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds) as deadline:
                return await call
        except TimeoutError as error:
            if deadline.expired():
                raise DeadlineExceeded(f"{self._names[index]}.{method}", seconds) from error
            raise


def _tokens(request: SampleRequest) -> int:
    return len(request.token_ids) + request.sampling.max_tokens
