"""An inference engine that decodes nothing, and takes the time that one would which batches continuously."""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import count, pairwise

import numpy as np

from skyrl_train.clock import now
from skyrl_train.engines.base import (
    PAUSE_MODES,
    Capabilities,
    Completion,
    EngineHealth,
    SampleRequest,
    SamplingParams,
    VersionSpan,
)
from skyrl_train.errors import EngineError
from tests.support.simulation.timings import EngineTimings

HOUR_S = 3600.0


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request in the engine. Decode steps are counted by the engine: all that run are in every step."""

    request: SampleRequest
    tokens: int
    """To sample."""
    call: _Call
    arrival: int
    began: float = -1.0
    """The engine's count of steps when it joined the batch; -1 while it waits."""
    began_s: float = 0.0
    """The time then."""
    done: Completion | None = None

    @property
    def ends(self) -> float:
        return self.began + self.tokens


@dataclass(slots=True, eq=False)
class _Call:
    """One call of generate()."""

    answer: asyncio.Future[None]
    missing: int
    sequences: list[_Sequence] = field(default_factory=list)


class SimulatedEngine:
    """`length(request)` says how many tokens a request's answer has; `unit` is how many tokens one of them stands for.

    A step takes `decode_s + decode_per_sequence_s * batch`; between steps, prompts of arriving requests are read, one
    for each group in a call. What runs is worked out when something changes, so that time costs nothing.
    """

    def __init__(
        self,
        length: Callable[[SampleRequest], int],
        timings: EngineTimings,
        *,
        name: str,
        unit: int = 1,
        rng: random.Random | None = None,
    ):
        """`rng`: decides when it fails, if engines do; it draws from the loop's time on."""
        self.name = name
        self.capabilities = Capabilities(
            name=name,
            sampling=frozenset(one.name for one in fields(SamplingParams)),
            weight_routes=frozenset({"in_process"}),
            pause_modes=PAUSE_MODES,
        )
        self.version = 0
        self.dead = False
        self._length, self._timings, self._unit = length, timings, unit
        self._waiting: deque[_Sequence] = deque()
        self._running: list[tuple[float, int, _Sequence]] = []
        """A heap by the step in which they end."""
        self._arrivals = count()
        self._steps = 0.0
        """Decode steps taken, a fraction of the one under way included."""
        self._reading_s = 0.0
        """Seconds of prefill before the next step."""
        self._as_of = 0.0
        """The time for which these are right."""
        self._paused = False
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        """(steps, the version from there on)"""
        self._timer: asyncio.TimerHandle | None = None
        self._generated = 0
        if rng is not None and timings.failures_per_hour > 0:
            delay = rng.expovariate(timings.failures_per_hour / HOUR_S)
            asyncio.get_running_loop().call_later(delay, self.die)

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self._check()
        if not requests:
            return []
        here = {one.request.request_id for one in self._sequences()}
        if twice := here & {one.request_id for one in requests}:
            raise ValueError(f"{self.name}: {sorted(twice)} are under way already: requests need names of their own")
        call = _Call(asyncio.get_running_loop().create_future(), len(requests))
        call.sequences = [_Sequence(one, self._length(one), call, next(self._arrivals)) for one in requests]
        self._catch_up()
        self._waiting += call.sequences
        self._admit()
        try:
            await call.answer
        finally:
            if call.missing:
                self._forget(call)
        return [one.done for one in call.sequences if one.done is not None]

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check()
        self._catch_up()
        for one in self._sequences():
            if one.request.request_id in request_ids:
                self._finish(one, "abort")
        self._admit()

    def die(self) -> None:
        """Fail every call from now on, those under way included."""
        if self.dead:
            return
        self._catch_up()
        self._generated += self._sampled(one for *_, one in self._running)
        self.dead = True
        if self._timer is not None:
            self._timer.cancel()
        for call in dict.fromkeys(one.call for one in self._sequences()):  # in their order, as a set is in none
            if not call.answer.done():
                call.answer.set_exception(EngineError(f"engine {self.name} died"))

    def _check(self) -> None:
        if self.dead:
            raise EngineError(f"engine {self.name} is dead")

    def _sampled(self, running: Iterable[_Sequence]) -> int:
        """Tokens so far of sequences that run."""
        return round(sum(self._steps - one.began for one in running)) * self._unit

    def _sequences(self) -> list[_Sequence]:
        return [*(one for *_, one in self._running), *self._waiting]

    def _forget(self, call: _Call) -> None:
        """Its caller has gone."""
        if self.dead:
            return
        self._catch_up()
        self._generated += self._sampled(one for *_, one in self._running if one.call is call)
        self._waiting = deque(one for one in self._waiting if one.call is not call)
        self._running = [entry for entry in self._running if entry[2].call is not call]
        heapq.heapify(self._running)
        self._admit()

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def _step_s(self) -> float:
        """Of one unit of tokens, for the batch that runs."""
        timings = self._timings
        return (timings.decode_s + timings.decode_per_sequence_s * len(self._running)) * self._unit

    def _catch_up(self) -> None:
        """Take the steps up to now. Whatever ends in between has a timer of its own, so that the batch was the same."""
        passed, self._as_of = now() - self._as_of, now()
        if self._paused or not self._running:
            return
        read = min(passed, self._reading_s)
        self._reading_s -= read
        self._steps = min(self._steps + (passed - read) / max(self._step_s, 1e-12), self._running[0][0])

    def _admit(self) -> None:
        """Let the first who wait join the batch, and set the timer for what ends first."""
        joined = set()
        while self._waiting and len(self._running) < self._timings.max_num_seqs and not self._paused:
            one = self._waiting.popleft()
            one.began, one.began_s = self._steps, now()
            heapq.heappush(self._running, (one.ends, one.arrival, one))
            if (prompt := (one.request.group or one.request.request_id, len(one.request.token_ids))) not in joined:
                joined.add(prompt)
                self._read(len(one.request.token_ids))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._paused and not self.dead:
            left = max(0.0, self._running[0][0] - self._steps)
            seconds = self._reading_s + left * self._step_s
            self._timer = asyncio.get_running_loop().call_later(seconds, self._ended)

    def _read(self, units: int) -> None:
        self._reading_s += units * self._unit / self._timings.prefill_tokens_per_s

    def _ended(self) -> None:
        """What was to end first has ended, and whatever ends in the same step."""
        self._catch_up()
        self._reading_s = 0.0
        self._steps = self._running[0][0]
        while self._running and self._running[0][0] <= self._steps + 1e-9:
            self._complete(heapq.heappop(self._running)[2], "stop")
        self._admit()

    def _finish(self, one: _Sequence, reason: str) -> None:
        """End a sequence early."""
        if one.began < 0:
            self._waiting.remove(one)
        else:
            self._running = [entry for entry in self._running if entry[2] is not one]
            heapq.heapify(self._running)
        self._complete(one, reason)

    def _complete(self, one: _Sequence, reason: str) -> None:
        sampled = 0 if one.began < 0 else min(one.tokens, round(self._steps - one.began))
        if reason == "stop" and sampled >= one.request.sampling.max_tokens:
            reason = "length"
        ids, logprobs = np.zeros(sampled, np.int32), np.full(sampled, -1.0, np.float32)
        spans = self._spans(one.began, sampled)
        ran_s = 0.0 if one.began < 0 else now() - one.began_s
        one.done = Completion(one.request.request_id, ids, logprobs, logprobs, reason, spans, running_s=ran_s)
        self._generated += sampled * self._unit
        one.call.missing -= 1
        if not one.call.missing and not one.call.answer.done():
            one.call.answer.set_result(None)

    def _spans(self, began: float, sampled: int) -> list[VersionSpan]:
        """Which versions sampled the tokens of a sequence that joined the batch at this step."""
        changes = [(max(0, round(steps - began)), version) for steps, version in self._versions]
        spans = []
        for (start, version), (stop, _) in pairwise([*changes, (sampled, 0)]):
            if start < min(stop, sampled):
                spans.append(VersionSpan(start, min(stop, sampled), version))
        return spans

    # -- pauses and weights ------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        self._check()
        while mode == "wait" and self._running:
            await asyncio.wait([self._running[0][2].call.answer])
            self._check()
        self._catch_up()
        if mode == "abort":
            for one in self._sequences():
                self._finish(one, "abort")
        if mode == "retract":
            for *_, one in self._running:
                self._read(len(one.request.token_ids) + round(self._steps - one.began))
        self._paused = True
        self._admit()

    async def resume(self) -> None:
        self._check()
        self._catch_up()
        self._paused = False
        self._admit()

    async def commit_weights(self, version: int) -> None:
        self._check()
        self._catch_up()
        self.version = version
        self._versions.append((self._steps, version))
        oldest = min((one.began for *_, one in self._running), default=self._steps)
        while len(self._versions) > 1 and self._versions[1][0] <= oldest:
            self._versions.pop(0)

    async def sleep(self, level: int = 1) -> int:
        await self.pause("keep")
        return 0

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        if tags is None or "kv_cache" in tags:
            await self.resume()

    async def reset_prefix_cache(self) -> None:
        self._check()

    async def health(self) -> EngineHealth:
        self._check()
        self._catch_up()
        running, queued = len(self._running), len(self._waiting)
        sampled = self._generated + self._sampled(one for *_, one in self._running)
        return EngineHealth(self.name, self.version, running, queued, generated_tokens=sampled)

    def kill(self) -> None:
        self.die()

    async def close(self) -> None:
        self.die()
