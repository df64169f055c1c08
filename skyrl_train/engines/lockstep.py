"""Engine batches that do not depend on timing, for bitwise reproducible synchronous runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count
from typing import Any

from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.engines.client import EngineClient


@dataclass(eq=False, slots=True)
class _Waiting:
    """One generate() that waits for those of the other episodes."""

    episode: int
    requests: Sequence[SampleRequest]
    answer: asyncio.Future[list[Completion]]


class Lockstep:
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
        self._waiting: dict[int, list[_Waiting]] = {}
        """By episode, each one's in the order in which they came."""
        self._flights: set[asyncio.Task[None]] = set()
        self._check_scheduled = False
        self._here: ContextVar[int | None] = ContextVar("episode", default=None)

    @asynccontextmanager
    async def episode(self) -> AsyncIterator[None]:
        """An episode is live inside this block. Tasks started inside belong to it."""
        number = next(self._numbers)
        self._live.add(number)
        token = self._here.set(number)
        try:
            yield
        finally:
            self._here.reset(token)
            self._live.discard(number)
            self._check_soon()

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See EngineClient.generate. An error of the shared call is raised to all callers in it."""
        number = self._here.get()
        one = _Waiting(
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
        self._flights.add(task)
        task.add_done_callback(self._flights.discard)

    async def _send(self, batch: Sequence[_Waiting]) -> None:
        requests = [request for one in batch for request in one.requests]
        try:
            answers = iter(await self._client.generate(requests, at_once=True))
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

    def __getattr__(self, name: str) -> Callable[..., Awaitable[Any]]:
        """All other attributes are the client's."""
        return getattr(self._client, name)  # type: ignore[no-any-return]
