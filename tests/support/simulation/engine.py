"""An inference engine that decodes nothing and takes the time of an engine with continuous batching."""

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
    """A request in the engine. Every running sequence takes part in every decode step."""

    request: SampleRequest
    tokens: int
    """Number of tokens to sample."""
    call: _Call
    arrival: int
    start_step: float = -1.0
    """The engine's number of steps when the sequence joined the batch; -1 while it waits."""
    start_s: float = 0.0
    """The time when the sequence joined the batch."""
    completion: Completion | None = None

    @property
    def end_step(self) -> float:
        return self.start_step + self.tokens


@dataclass(slots=True, eq=False)
class _Call:
    """One call of `generate`."""

    done: asyncio.Future[None]
    num_unfinished: int
    sequences: list[_Sequence] = field(default_factory=list)


class SimulatedEngine:
    """An engine that only takes time.

    A step takes `decode_s + decode_per_sequence_s * batch`. Between steps the prompts of new requests are prefilled,
    once per group. The state is computed only when something changes, so simulated time is free.
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
        """Create an engine that serves version 0.

        Args:
            length: Returns the number of tokens of a request's response, in units.
            timings: Durations of the engine's work.
            name: The engine's name.
            unit: Number of tokens that one simulated token stands for.
            rng: Draws the time at which the engine dies, if `timings` has failures; None for an engine that never dies.
        """
        self.name = name
        self.capabilities = Capabilities(
            name=name,
            sampling=frozenset(field.name for field in fields(SamplingParams)),
            weight_routes=frozenset({"in_process"}),
            pause_modes=PAUSE_MODES,
        )
        self.version = 0
        self.dead = False
        self._length, self._timings, self._unit = length, timings, unit
        self._waiting: deque[_Sequence] = deque()
        self._running: list[tuple[float, int, _Sequence]] = []
        """Running sequences, a heap by the step in which they end."""
        self._arrivals = count()
        self._steps = 0.0
        """Number of decode steps so far, including a fraction of the current one."""
        self._prefill_s = 0.0
        """Seconds of prefill before the next step."""
        self._updated_s = 0.0
        """Time of the last update of these numbers."""
        self._paused = False
        self._versions: list[tuple[float, int]] = [(0.0, 0)]
        """(number of steps, version from that step on)."""
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
        active_ids = {sequence.request.request_id for sequence in self._sequences()}
        if duplicates := active_ids & {request.request_id for request in requests}:
            raise ValueError(f"{self.name}: request ids {sorted(duplicates)} are already in use; they must be unique")
        call = _Call(asyncio.get_running_loop().create_future(), len(requests))
        call.sequences = [_Sequence(request, self._length(request), call, next(self._arrivals)) for request in requests]
        self._catch_up()
        self._waiting += call.sequences
        self._admit()
        try:
            await call.done
        finally:
            if call.num_unfinished:
                self._forget(call)
        return [sequence.completion for sequence in call.sequences if sequence.completion is not None]

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._check()
        self._catch_up()
        for sequence in self._sequences():
            if sequence.request.request_id in request_ids:
                self._finish(sequence, "abort")
        self._admit()

    def die(self) -> None:
        """Fail all running and later calls."""
        if self.dead:
            return
        self._catch_up()
        self._generated += self._sampled(sequence for *_, sequence in self._running)
        self.dead = True
        if self._timer is not None:
            self._timer.cancel()
        # dict.fromkeys keeps the order of calls, which a set does not.
        for call in dict.fromkeys(sequence.call for sequence in self._sequences()):
            if not call.done.done():
                call.done.set_exception(EngineError(f"engine {self.name} died"))

    def _check(self) -> None:
        if self.dead:
            raise EngineError(f"engine {self.name} is dead")

    def _sampled(self, running: Iterable[_Sequence]) -> int:
        """Return the number of tokens that running sequences have so far."""
        return round(sum(self._steps - sequence.start_step for sequence in running)) * self._unit

    def _sequences(self) -> list[_Sequence]:
        return [*(sequence for *_, sequence in self._running), *self._waiting]

    def _forget(self, call: _Call) -> None:
        """Remove the sequences of a call that was cancelled."""
        if self.dead:
            return
        self._catch_up()
        self._generated += self._sampled(sequence for *_, sequence in self._running if sequence.call is call)
        self._waiting = deque(sequence for sequence in self._waiting if sequence.call is not call)
        self._running = [entry for entry in self._running if entry[2].call is not call]
        heapq.heapify(self._running)
        self._admit()

    # -- time --------------------------------------------------------------------------------------------------------

    @property
    def _step_s(self) -> float:
        """Seconds of a decode step of one unit, for the running batch."""
        timings = self._timings
        return (timings.decode_s + timings.decode_per_sequence_s * len(self._running)) * self._unit

    def _catch_up(self) -> None:
        """Take the steps up to now. The batch did not change meanwhile, because a timer fires when a sequence ends."""
        elapsed_s, self._updated_s = now() - self._updated_s, now()
        if self._paused or not self._running:
            return
        prefill_s = min(elapsed_s, self._prefill_s)
        self._prefill_s -= prefill_s
        self._steps = min(self._steps + (elapsed_s - prefill_s) / max(self._step_s, 1e-12), self._running[0][0])

    def _admit(self) -> None:
        """Move waiting sequences into the batch, and set the timer for the sequence that ends first."""
        prefilled = set()
        while self._waiting and len(self._running) < self._timings.max_num_seqs and not self._paused:
            sequence = self._waiting.popleft()
            request = sequence.request
            sequence.start_step, sequence.start_s = self._steps, now()
            heapq.heappush(self._running, (sequence.end_step, sequence.arrival, sequence))
            if (prompt := (request.group or request.request_id, len(request.token_ids))) not in prefilled:
                prefilled.add(prompt)
                self._prefill(len(request.token_ids))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._paused and not self.dead:
            remaining_steps = max(0.0, self._running[0][0] - self._steps)
            delay_s = self._prefill_s + remaining_steps * self._step_s
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._complete_first)

    def _prefill(self, units: int) -> None:
        self._prefill_s += units * self._unit / self._timings.prefill_tokens_per_s

    def _complete_first(self) -> None:
        """Complete the sequence that ends first, and all that end in the same step."""
        self._catch_up()
        self._prefill_s = 0.0
        self._steps = self._running[0][0]
        while self._running and self._running[0][0] <= self._steps + 1e-9:
            self._complete(heapq.heappop(self._running)[2], "stop")
        self._admit()

    def _finish(self, sequence: _Sequence, reason: str) -> None:
        """End a sequence early."""
        if sequence.start_step < 0:
            self._waiting.remove(sequence)
        else:
            self._running = [entry for entry in self._running if entry[2] is not sequence]
            heapq.heapify(self._running)
        self._complete(sequence, reason)

    def _complete(self, sequence: _Sequence, reason: str) -> None:
        is_waiting, call, request = sequence.start_step < 0, sequence.call, sequence.request
        sampled = 0 if is_waiting else min(sequence.tokens, round(self._steps - sequence.start_step))
        if reason == "stop" and sampled >= request.sampling.max_tokens:
            reason = "length"
        ids, logprobs = np.zeros(sampled, np.int32), np.full(sampled, -1.0, np.float32)
        spans = self._spans(sequence.start_step, sampled)
        running_s = 0.0 if is_waiting else now() - sequence.start_s
        sequence.completion = Completion(
            request.request_id, ids, logprobs, logprobs, reason, spans, running_s=running_s
        )
        self._generated += sampled * self._unit
        call.num_unfinished -= 1
        if not call.num_unfinished and not call.done.done():
            call.done.set_result(None)

    def _spans(self, start_step: float, sampled: int) -> list[VersionSpan]:
        """Return the versions of the tokens of a sequence that joined the batch at `start_step`."""
        changes = [(max(0, round(steps - start_step)), version) for steps, version in self._versions]
        spans = []
        for (start, version), (stop, _) in pairwise([*changes, (sampled, 0)]):
            if start < min(stop, sampled):
                spans.append(VersionSpan(start, min(stop, sampled), version))
        return spans

    # -- pauses and weights ------------------------------------------------------------------------------------------

    async def pause(self, mode: str = "keep") -> None:
        self._check()
        while mode == "wait" and self._running:
            await asyncio.wait([self._running[0][2].call.done])
            self._check()
        self._catch_up()
        if mode == "abort":
            for sequence in self._sequences():
                self._finish(sequence, "abort")
        if mode == "retract":
            for *_, sequence in self._running:
                self._prefill(len(sequence.request.token_ids) + round(self._steps - sequence.start_step))
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
        oldest = min((sequence.start_step for *_, sequence in self._running), default=self._steps)
        while len(self._versions) > 1 and self._versions[1][0] <= oldest:
            self._versions.pop(0)

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> int:
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
        sampled = self._generated + self._sampled(sequence for *_, sequence in self._running)
        return EngineHealth(self.name, self.version, running, queued, generated_tokens=sampled)

    def kill(self) -> None:
        self.die()

    async def close(self) -> None:
        self.die()
