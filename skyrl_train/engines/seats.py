"""Calls that wait until an engine has room for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from typing import Generic, TypeVar

from skyrl_train.data.arrays import logprob_array, token_array
from skyrl_train.engines.base import Completion, SampleRequest

E = TypeVar("E")
_tickets = count()


@dataclass(eq=False)
class Call(Generic[E]):
    """The requests of one generate() that have no completion yet, and its place in the line."""

    missing: dict[int, SampleRequest]
    completions: dict[int, Completion] = field(default_factory=dict)
    ticket: int = field(default_factory=lambda: next(_tickets))
    granted: asyncio.Future[E | None] | None = None
    """While it waits; None is no engine: it has to look for one again."""

    @property
    def waits(self) -> bool:
        return self.granted is not None and not self.granted.done()

    def update(self) -> None:
        """Nothing is missing that has a completion."""
        self.missing = {number: one for number, one in self.missing.items() if number not in self.completions}

    def abort(self, request_ids: Collection[str]) -> None:
        """While it waits: no engine gets these requests, and they end without a token."""
        for number, one in self.missing.items():
            if one.request_id in request_ids:
                nothing = token_array(()), logprob_array(()), logprob_array(())
                self.completions[number] = Completion(one.request_id, *nothing, "abort", [])
        self.update()
        if not self.missing:
            self.dismiss()

    def dismiss(self) -> None:
        """It waits no more."""
        if self.waits:
            self.granted.set_result(None)  # type: ignore[union-attr]


class Seats(Generic[E]):
    """An engine has at most `most` calls at a time; the others wait here, and go in the order in which they came.

    A call that belongs to an engine, which has the history of its session or the prompt of its group, waits for that
    one; all others go to the engine that first has room. Of a call's requests one at least is unfinished, so an engine
    without a free seat has `most` requests at least.
    """

    def __init__(self, most: int | None, takes_requests: Callable[[E], bool]):
        self._most = most
        self._takes_requests = takes_requests
        self._taken: Counter[E] = Counter()
        self._lines: dict[E | None, list[tuple[int, Call[E]]]] = {}
        """Heaps: of an engine, and of those who take any."""

    @property
    def bounded(self) -> bool:
        return self._most is not None

    @property
    def waiting(self) -> list[Call[E]]:
        """In no order."""
        return [call for line in self._lines.values() for _, call in line if call.waits]

    @property
    def requests(self) -> int:
        """How many wait."""
        return sum(len(call.missing) for call in self.waiting)

    def has_room(self, engine: E) -> bool:
        return self._takes_requests(engine) and (self._most is None or self._taken[engine] < self._most)

    def take(self, engine: E) -> None:
        self._taken[engine] += 1

    def leave(self, engine: E) -> None:
        """A call has ended, or gone elsewhere."""
        self._taken[engine] -= 1
        self.offer(engine)
        if not self._taken[engine]:
            del self._taken[engine]

    async def wait(self, call: Call[E], engine: E | None) -> E | None:
        """The engine that has room for `call`, whose seat is then taken; None if it has to look for one again."""
        call.granted = asyncio.get_running_loop().create_future()
        heappush(self._lines.setdefault(engine, []), (call.ticket, call))
        try:
            return await call.granted
        except asyncio.CancelledError:
            if not call.granted.cancelled() and (got := call.granted.result()) is not None:
                self.leave(got)  # cancelled just as it got it
            raise

    def offer(self, engine: E) -> None:
        """Give the free seats of an engine to those who have waited longest, if it takes requests."""
        while self.has_room(engine):
            lines = [line for line in map(self._lines.get, (engine, None)) if line]
            if not lines:
                return
            _, call = heappop(min(lines, key=lambda line: line[0][0]))
            if call.waits:
                self.take(engine)
                call.granted.set_result(engine)  # type: ignore[union-attr]

    def dissolve(self, engine: E | None) -> None:
        """Those who wait for this engine, or for any, have to look for one again."""
        for _, call in self._lines.pop(engine, ()):
            call.dismiss()


def keys_of(request: SampleRequest) -> list[tuple[str, str]]:
    """What a request belongs to, that which has most of its tokens first."""
    return [(kind, name) for kind, name in (("session", request.session), ("group", request.group)) if name]


def tokens_of(request: SampleRequest) -> int:
    """What an engine may have to hold of it."""
    return len(request.token_ids) + request.sampling.max_tokens
